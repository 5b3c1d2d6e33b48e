"""Open every page of the demo in Chromium, and report problems: `make pages`, after `make demo`.

Each page is opened at the widths of a desktop and of a phone, in light and dark colours. Screenshots of all pages are
written to build/pages/, and small screenshots for the documents to docs/pictures/.
"""

import io
import json
import sys
from pathlib import Path

from PIL import Image

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_bytes
from scripts.pages.browser import Browser, chromium
from scripts.pages.problems import problems

ROOT = Path(__file__).parents[2]
WIDTHS_PX = (1400, 420)
MAX_PICTURE_BYTES = 150_000
_PICTURE_WIDTH_PX, _NUM_COLOURS = 1000, (128, 64, 32, 16)
# Pictures of the documents at the width of a desktop: page of the demo, first element that is shown, and height.
PICTURES = {
    "overview": ("index.html", "main > section:has(.strips)", 1080),
    "chunks": ("chunks.html", "body", 900),
    "run": ("run/index.html", "body", 1100),
    "search": ("search.html", "body", 820),
}
# The pages contain absolute paths. The pictures of the documents show paths relative to this checkout.
_SHORTEN = """((root) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, "");
})"""


def pages_of(demo: Path) -> list[Path]:
    """Return the pages in a folder and in the runs in it, as relative paths."""
    found = [*demo.glob("*.html"), *demo.glob("*/index.html"), *demo.glob("*/evaluations/*.html")]
    return sorted(path.relative_to(demo) for path in found)


def look_at(page: Path, *, name: str, browser: Browser, out: Path) -> list[str]:
    """Open a page in each width and colour scheme, save screenshots, and return the problems."""
    found = []
    for width_px in WIDTHS_PX:
        for is_dark in (False, True):
            scheme = "dark" if is_dark else "light"
            with browser.page(page, width_px=width_px, is_dark=is_dark) as tab:
                publish_bytes(out / f"{name}-{width_px}-{scheme}.png", tab.screenshot())
                found += [f"{page}, {width_px} px, {scheme}: {problem}" for problem in problems(tab)]
    return found


def small_picture(screenshot: bytes) -> bytes:
    """Return a screenshot as a PNG of at most 150 kB, 1000 px wide, with as many colours as the limit allows."""
    whole = Image.open(io.BytesIO(screenshot)).convert("RGB")
    height = round(whole.height * _PICTURE_WIDTH_PX / whole.width)
    small = whole.resize((_PICTURE_WIDTH_PX, height), Image.Resampling.LANCZOS)
    for num_colours in _NUM_COLOURS:
        content = io.BytesIO()
        reduced = small.quantize(num_colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        reduced.save(content, "png", optimize=True)
        if content.tell() <= MAX_PICTURE_BYTES:
            return content.getvalue()
    raise UserError(f"the picture is larger than {MAX_PICTURE_BYTES:,} bytes", hint="show less of the page")


def main(demo: Path, *, out: Path, pictures: Path) -> int:
    """Check all pages, and return the exit status, which is 1 if a page has problems.

    Raises:
        UserError: Chromium is not installed, or there are no pages.
    """
    if chromium() is None:
        raise UserError("Chromium is not installed", hint="install it, for example with: apt install chromium")
    pages = pages_of(demo)
    if not pages:
        raise UserError(f"{demo} has no pages", hint="run make demo first")
    out.mkdir(parents=True, exist_ok=True)
    found = []
    with Browser() as browser:
        for page in pages:
            name = "-".join(page.with_suffix("").parts)
            wrong = look_at(demo / page, name=name, browser=browser, out=out)
            print(f"{page}: {'ok' if not wrong else f'{len(wrong)} problems'}")
            found += wrong
        pictures.mkdir(parents=True, exist_ok=True)
        for name, (page_name, begin, height_px) in PICTURES.items():
            if page_name not in map(str, pages):
                print(f"no picture {name}.png: there is no {page_name}")
                continue
            with browser.page(demo / page_name, width_px=WIDTHS_PX[0], height_px=height_px) as tab:
                tab.value(f"{_SHORTEN}({json.dumps(f'{demo.parent}/')})")
                publish_bytes(pictures / f"{name}.png", small_picture(tab.screenshot(begin=begin, height_px=height_px)))
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(pages)} pages; screenshots: {out}; pictures of the documents: {pictures}")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        status = main(ROOT / "demo", out=ROOT / "build" / "pages", pictures=ROOT / "docs" / "pictures")
    except UserError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        status = 2
    sys.exit(status)
