"""Find problems of an open page: layout, contrast, keyboard access, and labels for screen readers."""

from scripts.pages.browser import Tab

_LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
# Each rule adds a description of every element that breaks the rule. Elements that are not displayed are omitted.
_RULES = r"""(() => {
  const found = [];
  const name = (element) => {
    const text = (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40);
    const kind = typeof element.className === "string" && element.className ? ` class=${element.className}` : "";
    return `<${element.tagName.toLowerCase()}${kind}> ${text}`;
  };
  const shown = (element) => element.checkVisibility() && element.getClientRects().length > 0;
  const all = (rule) => [...document.querySelectorAll(rule)].filter(shown);
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const widest = all("body *").filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1)
      .filter((one) => !one.closest(".wide, [data-scrolls]")).slice(0, 3).map(name).join("; ");
    found.push(`${root.scrollWidth - root.clientWidth} px wider than the window: ${widest}`);
  }
  if (!document.title) found.push("no title");
  if (!root.lang) found.push("no language");
  const labelled = (element) => element.getAttribute("aria-label") || element.getAttribute("aria-labelledby")
    || element.title || [...(element.labels || [])].some((label) => label.textContent.trim());
  const hasText = (element) => element.closest("[role=img][aria-label], [role=list][aria-label], [aria-hidden=true]");
  for (const image of all("img")) {
    const within = name(image.parentElement);
    if (!image.getAttribute("alt") && !hasText(image)) found.push(`image without alt: ${within}`);
    if (image.complete && !image.naturalWidth) found.push(`image that cannot be shown: ${within}`);
  }
  for (const one of all("svg, canvas")) {
    if (!hasText(one)) found.push(`drawing without a text: ${name(one.parentElement)}`);
  }
  for (const one of all("video, audio, input, select, textarea")) {
    if (!labelled(one)) found.push(`without a label: ${name(one)} in ${name(one.parentElement)}`);
  }
  for (const one of all("a[href], button, summary, [role=button]")) {
    if (!one.textContent.trim() && !labelled(one)) found.push(`without a text: ${name(one)}`);
    if (one.tabIndex < 0) found.push(`not reached by a keyboard: ${name(one)}`);
  }
  for (const one of all("body *")) {
    const style = getComputedStyle(one);
    const isCut = ["hidden", "clip"].includes(style.overflowX) && one.scrollWidth > one.clientWidth + 1;
    if (isCut && one.textContent.trim() && one.clientWidth > 1) found.push(`cut: ${name(one)}`);
  }
  const parsed = (colour) => {
    const context = parsed.context ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const colour = parsed(getComputedStyle(one).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = new Map();
  for (const one of all("body *")) {
    const hasWords = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasWords || one.closest("svg, script, style, option")) continue;
    const style = getComputedStyle(one);
    if (style.opacity === "0") continue;
    const below = ground(one), [a, b] = [light(over(parsed(style.color), below)), light(below)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const colours = `${style.color} on ${below.map(Math.round)}`;
    if (contrast < LEAST) faint.set(colours, `contrast ${contrast.toFixed(1)} (${colours}): ${name(one)}`);
  }
  found.push(...faint.values());
  return found;
})()"""


def problems(tab: Tab) -> list[str]:
    """Return the messages on the console and the broken rules, without duplicates."""
    found = [f"console: {message}" for message in tab.messages]
    found += tab.value(_RULES.replace("LEAST", str(_LEAST_CONTRAST)))
    return list(dict.fromkeys(found))
