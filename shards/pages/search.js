"use strict";
// Find the parts of a page that contain all words of a query. Case and accents are ignored.
const fold = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
const wordsOf = (field) => fold(field.value).split(/\s+/).filter(Boolean);

function createMatcher(parts) {
  const texts = new Map(parts.map((part) => [part, fold(`${part.id} ${part.textContent}`)]));
  return (part, words) => words.every((word) => texts.get(part).includes(word));
}
