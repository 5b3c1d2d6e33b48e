"use strict";
// Sort, search and step through the captions. The page's URL stores the choices (#sort=...&find=...).
const list = document.getElementById("videos");
const videos = [...list.children];
const contains = createMatcher(videos);
const sort = document.getElementById("sort");
const direction = document.getElementById("direction");
const find = document.getElementById("find");
const count = document.getElementById("count");
const splitIndices = new Map(videos.map((video, index) => [video, index]));
let isDescending = false;

function value(video, key) {
  return Number(video.dataset[key]);
}

function compare(first, second) {
  const key = sort.value;
  let difference = 0;
  if (key === "name") difference = first.dataset.name < second.dataset.name ? -1 : Number(first.dataset.name > second.dataset.name);
  else if (key !== "split") difference = value(first, key) - value(second, key);
  // Captions with equal values keep the order of the split in both directions.
  if (difference === 0) return (splitIndices.get(first) - splitIndices.get(second)) * (key === "split" && isDescending ? -1 : 1);
  return isDescending ? -difference : difference;
}

function show() {
  const words = wordsOf(find);
  for (const video of videos) video.hidden = !contains(video, words);
  const numShown = videos.filter((video) => !video.hidden).length;
  count.textContent = numShown === videos.length ? `${numShown}` : `${numShown} of ${videos.length}`;
  document.getElementById("none").hidden = numShown > 0;
}

function order() {
  direction.textContent = isDescending ? "↓" : "↑";
  direction.setAttribute("aria-label", isDescending ? "descending; reverse" : "ascending; reverse");
  list.append(...[...videos].sort(compare));
}

function remember() {
  const parameters = new URLSearchParams();
  if (sort.value !== "split") parameters.set("sort", sort.value);
  if (isDescending) parameters.set("order", "down");
  if (find.value) parameters.set("find", find.value);
  history.replaceState(null, "", `#${parameters}`);
}

function recall() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const key = parameters.get("sort");
  sort.value = [...sort.options].some((option) => option.value === key) ? key : "split";
  isDescending = parameters.get("order") === "down";
  find.value = parameters.get("find") ?? "";
  order();
  show();
}

function walk(step) {
  const visible = [...list.children].filter((video) => !video.hidden);
  if (!visible.length) return;
  const focusedIndex = visible.indexOf(document.activeElement.closest("article"));
  const nextIndex = focusedIndex < 0 ? (step > 0 ? 0 : visible.length - 1) : Math.min(Math.max(focusedIndex + step, 0), visible.length - 1);
  visible[nextIndex].focus();
  visible[nextIndex].scrollIntoView({ block: "center" });
}

sort.addEventListener("change", () => { order(); remember(); });
direction.addEventListener("click", () => { isDescending = !isDescending; order(); remember(); });
let timer = 0;
find.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => { show(); remember(); }, 80);
});
addEventListener("hashchange", recall);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target === find || event.target === sort;
  if (event.key === "/" && !isTyping) { find.focus(); event.preventDefault(); }
  else if (event.key === "Escape" && event.target === find) { find.value = ""; show(); remember(); find.blur(); }
  else if (event.key === "j" && !isTyping) walk(1);
  else if (event.key === "k" && !isTyping) walk(-1);
});
document.getElementById("bar").hidden = false;
recall();
