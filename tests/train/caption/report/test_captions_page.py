import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from clipmill.train.tasks.caption.evaluation import CaptionedVideo, sheet_uri, write_captions_page

HOSTILE = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\"> & 'x' {{ 7 * 7 }}"
VIDEOS = [
    CaptionedVideo("cat", "0-9 s", "a cat sleeps", ["a red cat"], {"cider_d": 0.5, "bleu4": 0.1, "exact_match": 0.0}),
    CaptionedVideo("dog", "0-9 s", "a dog runs", ["a dog runs"], {"cider_d": 2.5, "bleu4": 1e-9, "exact_match": 1.0}),
    CaptionedVideo(HOSTILE, HOSTILE, HOSTILE, [HOSTILE, ""], {"cider_d": 0.0, "bleu4": 0.1, "exact_match": 0.0}),
    CaptionedVideo("ant", "", "", ["一只蚂蚁", "a red ant"], {"cider_d": 0.5, "bleu4": 0.3, "exact_match": 0.0}),
]


class Tags(HTMLParser):
    """Parser that collects tags, loaded URLs, event handlers, and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.handlers: list[str] = []
        self.names: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag == "article" and not any(name == "hidden" for name, _ in attrs):
            self.names += [value or "" for name, value in attrs if name == "data-name"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def tags_of(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "captions & more.html"
    picture = sheet_uri([np.full((90, 160, 3), 40 * number, dtype=np.uint8) for number in range(6)])
    rows = [CaptionedVideo(**{**vars(video), "picture": picture}) for video in VIDEOS]
    write_captions_page(
        path,
        iter(rows),
        title=HOSTILE,
        means={"cider_d": 0.875, "bleu4": 0.125, "exact_match": 0.25},
        baseline={"cider_d": 0.375},
        absent={"spice": HOSTILE},
        protocol={HOSTILE: HOSTILE},
    )
    return path


def test_nothing_from_outside_becomes_markup_and_nothing_is_loaded(page: Path) -> None:
    tags = tags_of(page.read_text(encoding="utf-8"))
    assert tags.tags.count("script") == 2 and tags.tags.count("img") == len(VIDEOS)
    assert all(source.startswith("data:image/jpeg;base64,") for source in tags.loaded)
    assert not tags.handlers
    assert tags.names == [video.name for video in VIDEOS]
    assert HOSTILE in tags.texts


def test_the_policy_allows_these_scripts_only(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].replace("&#39;", "'").endswith(f"; script-src {allowed}")
    assert policy[1].startswith("default-src")


def test_scores_stand_times_a_hundred_and_absent_metrics_with_their_reason(page: Path) -> None:
    texts = tags_of(page.read_text(encoding="utf-8")).texts
    assert {"87.5", "constant caption 37.5", "250.0", "no SPICE", "✓ equals a reference", "(empty)"} <= set(texts)


def test_a_page_that_cannot_be_finished_does_not_exist(tmp_path: Path) -> None:
    def videos() -> Iterator[CaptionedVideo]:
        yield VIDEOS[0]
        raise OSError("no more frames")

    with pytest.raises(OSError, match="no more frames"):
        write_captions_page(tmp_path / "page.html", videos(), title="t", means={}, baseline={}, absent={}, protocol={})
    assert list(tmp_path.iterdir()) == []


def test_a_sheet_has_four_frames_from_all_of_the_clip() -> None:
    import cv2

    frames = [np.full((180, 320, 3), (20 * number, 0, 200), dtype=np.uint8) for number in range(8)]
    jpeg = base64.b64decode(sheet_uri(frames).removeprefix("data:image/jpeg;base64,"))
    picture = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None and picture.shape == (194, 344, 3)
    reds = [int(picture[y, x, 2]) for y in (48, 144) for x in (85, 256)]
    assert reds == pytest.approx([20, 60, 100, 140], abs=6)
    assert int(picture[48, 85, 0]) == pytest.approx(200, abs=6)  # blue
    assert sheet_uri([]) == ""
    assert sheet_uri(frames[:1]).startswith("data:image/jpeg")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("#sort=cider_d&order=down", ["dog", "cat", "ant", HOSTILE]),  # equal scores keep the order of the split
        ("#sort=name&find=RED+a", ["ant", "cat"]),
    ],
)
def test_a_browser_sorts_and_searches(page: Path, tmp_path: Path, address: str, names: list[str]) -> None:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", page.as_uri() + address],
        capture_output=True,
        check=True,
        timeout=120,
    ).stdout.decode()
    assert tags_of(shown).names == names
    title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
    assert title and title[1].startswith("&lt;script&gt;")  # no script in a caption changed the title
    assert 'id="bar">' in shown  # the page's own script ran
