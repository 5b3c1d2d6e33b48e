"""Tests against LeRobot: captions span the frames that LeRobotDataset returns for the episode and task."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import av
import numpy as np
import pytest

from clipmill.manifests.adapters.lerobot import read_lerobot
from tests.lerobot_folder import write_lerobot

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-lerobot" / "bin" / "python"
PROGRAM = REPOSITORY / "tests" / "manifests" / "lerobot_program.py"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="LeRobot is not installed: make lerobot"),
]


def ask(tmp_path: Path, *words: str | Path) -> None:
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run([PYTHON, "-P", PROGRAM, *words], check=True, env={**os.environ, **home}, capture_output=True)


def decode(path: str) -> list[tuple[float, np.ndarray]]:
    """Return the time in microseconds and the image of each frame of a file, decoded with PyAV."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        return [
            (float(1_000_000 * (frame.pts or 0) * stream.time_base), frame.to_ndarray(format="rgb24"))
            for frame in container.decode(stream)
        ]


@pytest.mark.parametrize("origin", ["LeRobot", "v3.0", "v2.1"])
def test_spans_have_the_frames_of_lerobots_own_reader(origin: str, tmp_path: Path) -> None:
    root = theirs = tmp_path / "drawers"
    if origin == "LeRobot":
        ask(tmp_path, "write", root)
    else:
        write_lerobot(root, version=origin)
    if origin == "v2.1":
        theirs = Path(shutil.copytree(root, tmp_path / "converted"))
        ask(tmp_path, "convert", theirs)
    assert json.loads((theirs / "meta/info.json").read_text())["codebase_version"] == "v3.0"
    ask(tmp_path, "frames", theirs, tmp_path / "frames.npz")
    read = np.load(tmp_path / "frames.npz")
    reading = read_lerobot(root)
    assert not reading.rejected.num_rows
    assert not reading.notes
    files = dict(zip(*(reading.videos[name].to_pylist() for name in ("video_id", "path")), strict=True))
    num_frames = 0
    for row in reading.captions.to_pylist():
        begin_us, end_us = (round(row[name] * 1e6) - 0.5 for name in ("begin_s", "end_s"))
        pictures = [picture for time_us, picture in decode(files[row["video_id"]]) if begin_us <= time_us < end_us]
        is_of_row = (read["episode"] == int(row["group"].removeprefix("episode_"))) & (read["task"] == row["text"])
        assert np.array_equal(np.stack(pictures), read[f"observation.images.{row['view']}"][is_of_row])
        num_frames += len(pictures)
    assert num_frames == 2 * len(read["episode"])
