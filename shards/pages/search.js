"use strict";
// Which parts of a page contain all of some words, whatever their case and their accents.
const folded = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
const wordsOf = (field) => folded(field.value).split(/\s+/).filter(Boolean);

function searchable(parts) {
  const texts = new Map(parts.map((part) => [part, folded(`${part.id} ${part.textContent}`)]));
  return (part, words) => words.every((word) => texts.get(part).includes(word));
}
