"""`make pages`: it finds what is wrong with a page, and takes small pictures."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipmill.manifests.errors import UserError
from scripts.pages.build import MAX_PICTURE_BYTES, main, pages_of, small_picture
from tests.browser import needs_chromium, open_page

_POLICY = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
_PAGE = "<!doctype html><html lang='en'><head>{head}<title>t</title></head><body style='margin: 0'>{body}</body></html>"
_PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="


def page(path: Path, *, body: str, head: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PAGE.format(head=head, body=body))
    return path


@needs_chromium
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p>all is well</p>", ""),
        ("<div style='width: 500px'>wide</div>", "80 px wider than the window: <div> wide"),
        (f"<img src='{_PIXEL}'>", "image without alt"),
        (f"<div role='img' aria-label='a dot'><img src='{_PIXEL}' alt=''></div>", ""),
        ("<img src='gone.png' alt='gone'>", "image that cannot be shown"),
        ("<canvas></canvas>", "drawing without a text"),
        ("<video controls></video>", "without a label: <video>"),
        ("<button tabindex='-1'>go</button>", "not reached by a keyboard: <button> go"),
        ("<p style='color: #aaa'>faint</p>", "contrast 2.3 (rgb(170, 170, 170) on 255,255,255): <p> faint"),
        ("<p style='width: 40px; overflow: hidden; white-space: nowrap'>long words</p>", "cut: <p> long words"),
        ("<script>console.error('oh')</script>", "console: error: oh"),
        ("<script>nothing.there</script>", "console: exception: ReferenceError"),
    ],
)
def test_a_browser_finds_what_is_wrong(body: str, problem: str, tmp_path: Path) -> None:
    problems = open_page(page(tmp_path / "page.html", body=body), width_px=420).problems
    assert any(line.startswith(problem) for line in problems) if problem else problems == []


@needs_chromium
def test_what_the_policy_of_a_page_forbids_is_a_problem(tmp_path: Path) -> None:
    problems = open_page(page(tmp_path / "page.html", head=_POLICY, body="<script>1</script>"), width_px=420)
    assert any("Content Security Policy" in message for message in problems.messages)


@needs_chromium
def test_every_page_is_opened_and_pictures_are_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo, out, pictures = (tmp_path / name for name in ("demo", "out", "pictures"))
    with pytest.raises(UserError, match="has no pages"):
        main(demo, out=out, pictures=pictures)
    page(demo / "index.html", body="<main><section><p class='strips'>runs</p></section></main>")
    page(demo / "run/evaluations/captions-val.html", body="<canvas></canvas>")
    assert pages_of(demo) == [Path("index.html"), Path("run/evaluations/captions-val.html")]
    assert main(demo, out=out, pictures=pictures) == 1, "a page has a problem"
    output = capsys.readouterr()
    assert "index.html: ok" in output.out and "captions-val.html, 420 px, dark: drawing without a text" in output.err
    assert len(list(out.glob("index-*.png"))) == 4 and [path.name for path in pictures.iterdir()] == ["overview.png"]
    content = (pictures / "overview.png").read_bytes()
    assert len(content) <= MAX_PICTURE_BYTES and Image.open(io.BytesIO(content)).width == 1000


def test_a_picture_has_as_many_colours_as_its_size_allows() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 1400, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "png", compress_level=0)
    small = small_picture(content.getvalue())
    assert len(small) <= MAX_PICTURE_BYTES and Image.open(io.BytesIO(small)).size == (1000, 214)
