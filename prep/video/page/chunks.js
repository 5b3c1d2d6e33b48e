"use strict";
// Play clips in place, and filter, search and sort the chunks of the page. Without this script, the page shows the same
// chunks, with the browser's video controls below the images.
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const grid = document.querySelector(".chunks");
  const cards = [...grid.querySelectorAll("article")];
  const contains = createMatcher(cards);

  for (const clip of grid.querySelectorAll(".clip")) {
    const video = clip.querySelector("video");
    if (!video) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "play";
    button.setAttribute("aria-label", video.getAttribute("aria-label"));
    clip.append(button);
    button.addEventListener("click", () => {
      clip.classList.add("playing");
      video.focus();
      video.play().catch(() => {}); // the "error" handler reports a failure
    });
    video.addEventListener("play", () => {
      for (const other of grid.querySelectorAll(".playing video")) if (other !== video) other.pause();
    });
    video.addEventListener("error", () => {
      const note = document.createElement("p");
      note.className = "bad small";
      note.setAttribute("role", "alert");
      note.textContent = "This clip cannot be played: its file is missing, or this browser does not play its codec.";
      clip.classList.remove("playing");
      button.remove();
      clip.after(note);
    });
  }

  const form = document.querySelector(".filters");
  const field = (name) => form.querySelector(`[name=${name}]`);
  const count = form.querySelector("output"), clear = form.querySelector("button"), none = document.querySelector(".none");
  const filters = [...form.querySelectorAll("select:not([name=sort])")];
  const labels = new Map(cards.map((card) => [card, JSON.parse(card.dataset.labels ?? "[]")]));
  // A chunk may have several values for a label, because it may overlap several captions.
  const matches = (card, { name, value }) => !value || (name.startsWith("label=")
    ? labels.get(card).includes(`${name.slice(6)}=${value}`) : card.dataset[name] === value);
  const all = document.querySelectorAll("a[data-all]");

  function update() {
    const words = wordsOf(field("q"));
    let shown = 0;
    for (const card of cards) {
      const isShown = contains(card, words) && filters.every((filter) => matches(card, filter));
      card.hidden = !isShown;
      shown += isShown;
      if (!isShown) card.querySelector("video")?.pause();
    }
    const isFiltered = words.length > 0 || filters.some((filter) => filter.value);
    count.textContent = isFiltered ? `${shown.toLocaleString("en")} of ${cards.length.toLocaleString("en")} on this page` : "";
    clear.hidden = !isFiltered;
    none.hidden = shown > 0;
    for (const link of all) link.hash = words.length ? `q=${encodeURIComponent(field("q").value)}` : "";
  }

  function sort() {
    const [name, isDown] = [field("sort").value, field("sort").value !== "order"];
    const value = (card) => Number(card.dataset[name] ?? (isDown ? -Infinity : 0));
    cards.sort((a, b) => (isDown ? value(b) - value(a) : 0) || a.dataset.order - b.dataset.order);
    grid.append(...cards);
  }

  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  field("sort").addEventListener("change", sort);
  clear.addEventListener("click", () => {
    field("q").value = "";
    for (const filter of filters) filter.value = "";
    update();
    field("q").focus();
  });
  const query = /^#q=(.*)$/.exec(location.hash);
  if (query) field("q").value = decodeURIComponent(query[1]);
  form.hidden = false;
  update();
})();
