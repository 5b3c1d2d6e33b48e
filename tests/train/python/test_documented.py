"""The code of docs/python.md runs from top to bottom, on data with every column and a run of a tiny model."""

import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.train.conftest import NUM_FRAMES, VIDEOS
from tests.train.latents.written import Chunk, Written, write_latents, write_text
from tests.train.running import train
from tests.train.tiny_data import Caption

BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
MOST_LINES_OF_A_PICTURE = 10


def blocks(repository: Path) -> list[str]:
    return BLOCK.findall((repository / "docs/python.md").read_text())


@pytest.fixture
def folder(data_dir: Path, tmp_path: Path) -> Path:
    """Working folder with data/, more/ and runs/first."""
    for name in ("data", "more"):
        shutil.copytree(data_dir, tmp_path / name)
    written = Written(tmp_path / "data")
    write_latents(written, [[Chunk(name, 0, NUM_FRAMES // 3) for name in VIDEOS]])
    write_text(written, [Caption(name, 0, 1, "") for name in VIDEOS])
    flags = ("--model", "tiny", "--size-px", "32", "--batch", "4", "--steps", "1", "--device", "cpu", "--workers", "1")
    assert train("dual-encoder", "--shards", tmp_path / "data", "--out", tmp_path / "runs/first", *flags) == 0
    return tmp_path


def test_the_documented_code_runs(
    repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = folder / "documented.py"
    program.write_text("\n".join(blocks(repository)))
    monkeypatch.chdir(folder)
    runpy.run_path(str(program))
    picture = np.asarray(Image.open("batch.png"))
    assert picture.shape == (8 * 112, 4 * 112, 3) and picture.std() > 10
    assert "a split of this manifest: train, val" in capsys.readouterr().out


def test_a_picture_of_a_batch_takes_ten_lines(repository: Path) -> None:
    first = blocks(repository)[0]
    assert "import" in first and ".save(" in first and len(first.splitlines()) <= MOST_LINES_OF_A_PICTURE
