"""Small shard set for tests, and commands that run in this process."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import Commit
from clipmill.shards.dataset import current_variant
from tests.prep.running import Ran, chunk, manifest, prep_here

LEN = ("--len", "2s", "--preset", "ultrafast", "--short-side", "96")
NASTY = '<script>alert("x")</script> & more'


def make_set(folder: Path, *settings: object) -> Path:
    """Create 5 chunks in 2 shards: two videos of 5 and 3 s in two splits, one with captions, and a text as a third."""
    videos, data = folder / "videos", folder / "data"
    videos.mkdir(parents=True)
    for name, num_frames in (("long", 150), ("short", 90)):
        FrameNumberVideo(num_frames=num_frames, fps=Fraction(30), width=160, height=120).write(videos / f"{name}.mp4")
    (videos / "text.mp4").write_text("not a video")
    captions = folder / "captions.csv"
    quoted = NASTY.replace('"', '""')
    captions.write_text(
        f'video,text,begin_s,end_s,split\nlong,"{quoted}",0,1,train\nlong,the end,4,5,train\nshort,all,0,3,val\n'
    )
    manifest(data, videos, "--captions", captions)
    chunk(data, *(settings or LEN), status=1)
    return data


@dataclass(frozen=True)
class ShardSet:
    """Copy of the set that a test may damage."""

    data: Path

    @property
    def variant(self) -> Path:
        return self.data / "video" / str(current_variant(self.data, "video"))

    @property
    def commits(self) -> dict[int, Commit]:
        return read_commits(self.variant).commits

    def tar(self, shard_id: int = 0) -> Path:
        files = self.commits[shard_id].files
        assert files is not None
        return self.variant / files.tar

    def index(self, shard_id: int = 0) -> Path:
        files = self.commits[shard_id].files
        assert files is not None
        return self.variant / files.index


def rerun(prep: Callable[..., Ran], shard_set: ShardSet, *settings: object) -> dict[str, Any]:
    """Run `prep chunk` in this process; return its summary.

    The text file named as a video makes the first run fail.
    """
    engine = ("--engine", "processes", "--workers", 2)
    return prep("chunk", "--data", shard_set.data, "--json", *engine, *settings, status=None).summary


def flip(path: Path, offset: int) -> None:
    """Change one byte and restore the modification time, as decay on a disk does."""
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.fixture(scope="session")
def made_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"))


@pytest.fixture
def shard_set(made_set: Path, tmp_path: Path) -> ShardSet:
    shutil.copytree(made_set, tmp_path / "data")
    return ShardSet(tmp_path / "data")


@pytest.fixture
def prep() -> Callable[..., Ran]:
    """Return a function that runs `prep ARGUMENTS` in this process and fails if the exit status is not `status`."""
    return prep_here
