"""Labels from a user's table, from `prep manifest folder --captions` to `train classify`: the labelled frames."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill import open_clips
from clipmill.manifests.store import read_captions
from clipmill.prep.synthetic import FrameNumberVideo, read_frame_number
from clipmill.train.data.classes import read_classes
from tests.prep.running import chunk, manifest
from tests.tiers import nightly_beyond
from tests.train.running import facts, train

FPS = 10
# Each row is video, start and duration in seconds, label, speed and split. A row without times labels a complete video
# of 6 s. Spans cross the boundaries of chunks of 2 s, and one span extends beyond the end of its video.
ROWS: list[tuple[str, float | None, float | None, str, str | None, str]] = [
    ("a.mp4", 0.0, 1.5, "run", "fast", "train"),
    ("a.mp4", 1.5, 3.0, "jump", "slow", "train"),
    ("sub/b.mp4", None, None, "run", None, "train"),
    ("c.mp4", 1.0, 1.5, "jump", "slow", "val"),
    ("c.mp4", 4.5, 9.0, "run", "fast", "val"),
]
NAMES = ("video", "start", "duration", "label", "label_speed", "split")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name in ("a", "sub/b", "c"):
        FrameNumberVideo(num_frames=6 * FPS, fps=Fraction(FPS), width=64, height=64).write(folder / f"{name}.mp4")
    return folder


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(NAMES, map(list, zip(*ROWS, strict=True)), strict=True))), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps({name: [row[column] for row in ROWS] for column, name in enumerate(NAMES)}))
    else:
        lines = [NAMES, *(["" if cell is None else cell for cell in row] for row in ROWS)]
        path.write_text("".join(f"{';'.join(map(str, line))}\n" for line in lines))
    return path


def frames_by_class(data: Path, split: str, label: str) -> dict[str, list[tuple[int, int]]]:
    """Return the first and last frame of the clips of each class, found by sampling every frame."""
    frames_by_class: dict[str, list[tuple[int, int]]] = {}
    names = read_classes(data, label=label, splits=("train", "val")).names
    flags: dict[str, Any] = {"num_frames": 120, "size_px": 64, "crop": "centre", "shuffle": False, "workers": 1}
    with open_clips(data, split=split, label=label, batch=1, rgb=True, **flags) as clips:
        for batch in clips:
            numbers = [read_frame_number(picture) for picture in batch["video"][0].numpy()]
            frames_by_class.setdefault(names[int(batch["label"][0])], []).append((min(numbers), max(numbers)))
    return {name: sorted(spans) for name, spans in frames_by_class.items()}


@pytest.mark.parametrize("name", nightly_beyond(["t.csv"], ["t.parquet", "t.json", "t.csv"]))
def test_labels_of_spans_and_of_videos_are_those_of_the_frames(videos: Path, tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    manifest(data, videos, "--captions", write(tmp_path / name))
    chunk(data, "--len", "2s", "--preset", "ultrafast", "--short-side", "64")
    assert frames_by_class(data, "train", "class") == {"run": [(0, 14), (0, 59)], "jump": [(15, 44)]}
    assert frames_by_class(data, "val", "class") == {"jump": [(10, 24)], "run": [(45, 59)]}
    assert frames_by_class(data, "train", "speed") == {"fast": [(0, 14)], "slow": [(15, 44)]}  # b has no speed
    assert {row["text"]: row["source"] for row in read_captions(data).to_pylist()} == {
        **dict.fromkeys(("run fast", "jump slow", "run"), "class")
    }
    if name != "t.csv":
        return
    run = tmp_path / "run"
    flags = ("--model", "tiny", "--num-frames", 2, "--size-px", 32, "--workers", 1, "--warmup-steps", 1)
    assert (
        train("classify", "--shards", data, "--out", run, "--label", "speed", "--steps", 2, "--batch", 2, *flags) == 0
    )
    assert facts(run)["classes"]["names"] == ["fast", "slow"]
