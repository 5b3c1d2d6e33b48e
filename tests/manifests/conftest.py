"""Folders of files with the names of videos: adapters read names and sizes, never frames."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.reading import Reading

VideoMaker = Callable[..., Path]


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def of_splits(reading: Reading) -> dict[str, list[str]]:
    """Return the source IDs by split."""
    ids_by_split: dict[str, list[str]] = {}
    for video in reading.videos.to_pylist():
        ids_by_split.setdefault(video["split"], []).append(video["source_id"])
    return ids_by_split


@pytest.fixture
def make_videos(tmp_path: Path) -> VideoMaker:
    """Return a function: make_videos("a.mp4", "b/c.mkv") creates these files and returns their folder."""

    def make(*names: str, folder: str = "videos") -> Path:
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"video")
        return tmp_path / folder

    return make
