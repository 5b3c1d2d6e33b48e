"""Tests that run the tutorials, block by block, on a few seconds of synthetic video."""

import re
import stat
from base64 import b64decode
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from clipmill.train.doctor.machine import ask_child
from clipmill.train.tasks.caption.java import MetricUnavailable
from tests.conftest import ROOT
from tests.prep.captions.server import run_server
from tests.small_tiny import restore, shrink
from tests.tiers import nightly_beyond
from tests.tutorials.made import DATA, Video, make_videos
from tests.tutorials.page import command_lines, missing_lines, read_page
from tests.tutorials.running import Runner

PAGES = [ROOT / "docs/start.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]

EVERY_DAY = ("start",)  # most readers follow this page to its end


@pytest.fixture(scope="module", autouse=True)
def _no_java() -> Iterator[None]:
    """Hide Java, which takes longer to start than a tutorial."""

    def java() -> None:
        raise MetricUnavailable("left out of this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.train.tasks.caption.java.java", java)
        yield


@pytest.fixture(scope="module", autouse=True)
def _one_machine() -> Iterator[None]:
    """Let `train doctor` query torch about this machine only once for all pages, in a separate process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.train.doctor.machine.ask_child", cache(ask_child))
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_trials() -> Iterator[None]:
    """Shorten `train quickstart`, which otherwise measures for eight seconds and at least twenty steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.train.commands.quickstart._TRIAL_S", 0.0)
        patch.setattr("clipmill.train.quickstart.choice._FEWEST_STEPS", 4)
        yield


@pytest.fixture(scope="module", autouse=True)
def _complete_tiny() -> Iterator[None]:
    """Use the complete model `tiny`, because a page shows what it learns."""
    restore()
    yield
    shrink()


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Video]:
    return make_videos(tmp_path_factory.mktemp("shapes") / "videos")


@pytest.mark.parametrize(
    "path", nightly_beyond(EVERY_DAY, PAGES, key=lambda path: path.stem), ids=lambda path: path.stem
)
def test_a_tutorial_runs(path: Path, videos: list[Video], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read_page(path)
    assert page.data is not None, f"{path.name} does not name its test data"
    DATA[page.data](tmp_path, videos)
    monkeypatch.chdir(tmp_path)
    runner = Runner(tmp_path, monkeypatch.setenv)
    with run_server() as server:  # for `prep captions`
        monkeypatch.setenv("ENDPOINT", server.address)
        for block in page.blocks:
            runner.run(block)
    if path.stem == "notebook":
        assert_shows_pictures(runner.shown)
    assert_follows_the_umask(tmp_path)


def assert_follows_the_umask(folder: Path) -> None:
    """Check that other users can read what the commands have made if they can read other new files."""
    (new := folder / "new").touch()
    usual = stat.S_IMODE(new.stat().st_mode)
    assert usual != stat.S_IRUSR | stat.S_IWUSR, "the umask of the tests is too strict for this check"
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if stat.S_IMODE(path.stat().st_mode) & usual != usual] == []


def assert_shows_pictures(shown: list[str | bytes]) -> None:
    """Check that a batch and a chunk were shown as images."""
    batch, chunk = shown
    assert isinstance(batch, bytes) and Image.open(BytesIO(batch)).size == (4 * 112, 4 * 112)
    assert isinstance(chunk, str)
    match = re.fullmatch(r'<img src="data:image/jpeg;base64,(\S+)" alt="(.*)"><br>\2', chunk)
    assert match and "garden_" in match[2] and Image.open(BytesIO(b64decode(match[1]))).size == (8 * 160, 120)


def test_a_page_that_no_longer_fits_its_data_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- tested with\ndata: vatex\n--steps 9 | --steps 1\n-->\n```sh\ntrain mae --steps 8\n```\n")
    with pytest.raises(AssertionError, match="does not show '--steps 9'"):
        read_page(path)


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("10 videos, 2 new\n...\ndone in runs/first", []),
        ("made ... encoded", []),
        ("done in runs/first\n10 videos, 2 new", ["10 videos, 2 new"]),
        ("10 videos", ["10 videos"]),
        ("shape (2, 128)", []),
        ("shape (2, 256)", ["shape (2, 256)"]),
    ],
)
def test_outputs_are_compared_in_shape(shown: str, missing: list[str]) -> None:
    real = "8 videos,  1,200 new\nmade 3 shards: 7 encoded\nnext\nshape (2, 128)\ndone in runs/first\n"
    assert missing_lines(shown, real) == missing


def test_a_shell_block_is_read_line_by_line() -> None:
    text = "# nothing\nprep plan \\\n    --len 15s\ncat > a.csv <<EOF\nvideo,text\nEOF\nls\n"
    assert command_lines(text) == ["prep plan      --len 15s", "cat > a.csv <<EOF\nvideo,text\nEOF\n", "ls"]
