"""The tutorials run, block by block, on a few seconds of synthetic video."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.tutorials.made import DATA, Video, make_videos
from tests.tutorials.page import command_lines, missing_lines, read_page
from tests.tutorials.running import Runner
from train.tasks.caption.metrics.java import MetricUnavailable

PAGES = [ROOT / "docs/start.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]


@pytest.fixture(scope="module", autouse=True)
def _small_machine() -> Iterator[None]:
    """One thread, and no Java, which takes longer to start than a tutorial."""

    def java() -> None:
        raise MetricUnavailable("left out of this test")

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr("train.tasks.caption.metrics.java.java", java)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[Video]:
    return make_videos(tmp_path_factory.mktemp("shapes") / "videos")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, videos: list[Video], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read_page(path)
    assert page.data is not None, f"{path.name} does not say what it is tested with"
    DATA[page.data](tmp_path, videos)
    monkeypatch.chdir(tmp_path)
    runner = Runner(tmp_path, monkeypatch.setenv)
    for block in page.blocks:
        runner.run(block)
