"use strict";
// Sort, search and step through the captions. The page's address keeps the choice (#sort=...&find=...).
const list = document.getElementById("videos");
const videos = [...list.children];
const contains = createMatcher(videos);
const sort = document.getElementById("sort");
const direction = document.getElementById("direction");
const find = document.getElementById("find");
const count = document.getElementById("count");
const places = new Map(videos.map((video, place) => [video, place]));
let descending = false;

function value(video, key) {
  return Number(video.dataset[key]);
}

function compare(first, second) {
  const key = sort.value;
  let difference = 0;
  if (key === "name") difference = first.dataset.name < second.dataset.name ? -1 : Number(first.dataset.name > second.dataset.name);
  else if (key !== "split") difference = value(first, key) - value(second, key);
  // Captions with equal values keep the order of the split in both directions.
  if (difference === 0) return (places.get(first) - places.get(second)) * (key === "split" && descending ? -1 : 1);
  return descending ? -difference : difference;
}

function show() {
  const words = wordsOf(find);
  for (const video of videos) video.hidden = !contains(video, words);
  const shown = videos.filter((video) => !video.hidden).length;
  count.textContent = shown === videos.length ? `${shown}` : `${shown} of ${videos.length}`;
  document.getElementById("none").hidden = shown > 0;
}

function order() {
  direction.textContent = descending ? "↓" : "↑";
  direction.setAttribute("aria-label", descending ? "descending; reverse" : "ascending; reverse");
  list.append(...[...videos].sort(compare));
}

function remember() {
  const chosen = new URLSearchParams();
  if (sort.value !== "split") chosen.set("sort", sort.value);
  if (descending) chosen.set("order", "down");
  if (find.value) chosen.set("find", find.value);
  history.replaceState(null, "", `#${chosen}`);
}

function recall() {
  const chosen = new URLSearchParams(location.hash.slice(1));
  const key = chosen.get("sort");
  sort.value = [...sort.options].some((option) => option.value === key) ? key : "split";
  descending = chosen.get("order") === "down";
  find.value = chosen.get("find") ?? "";
  order();
  show();
}

function walk(step) {
  const visible = [...list.children].filter((video) => !video.hidden);
  if (!visible.length) return;
  const here = visible.indexOf(document.activeElement.closest("article"));
  const next = here < 0 ? (step > 0 ? 0 : visible.length - 1) : Math.min(Math.max(here + step, 0), visible.length - 1);
  visible[next].focus();
  visible[next].scrollIntoView({ block: "center" });
}

sort.addEventListener("change", () => { order(); remember(); });
direction.addEventListener("click", () => { descending = !descending; order(); remember(); });
let waiting = 0;
find.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { show(); remember(); }, 80);
});
addEventListener("hashchange", recall);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target === find || event.target === sort;
  if (event.key === "/" && !typing) { find.focus(); event.preventDefault(); }
  else if (event.key === "Escape" && event.target === find) { find.value = ""; show(); remember(); find.blur(); }
  else if (event.key === "j" && !typing) walk(1);
  else if (event.key === "k" && !typing) walk(-1);
});
document.getElementById("bar").hidden = false;
recall();
