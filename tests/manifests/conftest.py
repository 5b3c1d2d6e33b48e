"""Folders of files that are named like videos: adapters read names and sizes, never pictures."""

from collections.abc import Callable
from pathlib import Path

import pytest

VideoMaker = Callable[..., Path]


@pytest.fixture
def make_videos(tmp_path: Path) -> VideoMaker:
    """make_videos("a.mp4", "b/c.mkv") makes these files and returns their folder."""

    def make(*names: str, folder: str = "videos") -> Path:
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"video")
        return tmp_path / folder

    return make
