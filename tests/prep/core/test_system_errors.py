"""Tests of operating system errors in the driver: a line with the path and the remedy; a rerun repairs the record."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prep.running import Ran, contents, failing, messages
from tests.prep.sets import LEN, ShardSet

Prep = Callable[..., Ran]
RECORDS = ["dataset.json", "probes.parquet", "layout/*.parquet", "video/*/recipe.json", "video/*/shards.txt"]


def chunk_again(prep: Prep, data: Path, *, status: int | None) -> Ran:
    return prep("chunk", "--data", data, "--engine", "processes", "--workers", 1, *LEN, status=status)


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_that_cannot_be_written_is_named(prep: Prep, shard_set: ShardSet, record: str) -> None:
    before = contents(shard_set.data)
    path = next(shard_set.data.glob(record))
    path.unlink()
    for call, error, status in (("fsync", errno.EIO, 1), ("fsync", errno.ENOSPC, 1), ("replace", errno.EACCES, 2)):
        with failing(call, error, of=path.name):
            ran = chunk_again(prep, shard_set.data, status=status)
        assert f"{path}" in ran.stderr and os.strerror(error) in ran.stderr
        assert "Traceback" not in ran.stderr
        # A missing layout adds a line that says that it is rebuilt.
        assert len(messages(ran.stderr)) == status + record.startswith("layout")
    chunk_again(prep, shard_set.data, status=0)
    assert contents(shard_set.data) == before


@pytest.mark.parametrize(
    ("record", "status"),
    [("dataset.json", 1), ("probes.parquet", 1), ("layout/*.parquet", 1), ("video/*/commits/000000.json", 1)],
)
def test_a_record_that_cannot_be_read_is_named_and_kept(
    prep: Prep, shard_set: ShardSet, record: str, status: int, tmp_path: Path
) -> None:
    path = next(shard_set.data.glob(record))
    kept = path.rename(tmp_path / "kept")
    path.mkdir()  # reading a folder fails even for a user who may read every file
    ran = chunk_again(prep, shard_set.data, status=status)
    output = ran.stdout + ran.stderr
    assert f"{path}" in output and "this path is a folder, not a file; remove it or move it away" in output
    assert "Traceback" not in output
    path.rmdir()
    shutil.move(kept, path)
    prep("verify", "--data", shard_set.data)


def test_a_record_that_is_nested_too_deeply_is_damaged(prep: Prep, shard_set: ShardSet) -> None:
    bomb = "[" * 200_000
    for record in ("dataset.json", "manifest/manifest.json", "video/*/recipe.json"):
        path = next(shard_set.data.glob(record))
        kept = path.read_bytes()
        path.write_text(bomb)
        assert str(path) in prep("retry" if "recipe" in record else "status", "--data", shard_set.data, status=2).error
        path.write_bytes(kept)
    commit = next(shard_set.variant.glob("commits/*.json"))
    commit.write_text(bomb)
    assert "nested too deeply" in prep("status", "--data", shard_set.data, status=1).stdout


@pytest.mark.parametrize("record", [*RECORDS[:3], "manifest/manifest.json", "video/*/commits/000000.json"])
def test_a_pipe_in_the_place_of_a_record_is_named_and_not_waited_for(
    prep: Prep, shard_set: ShardSet, record: str
) -> None:
    path = next(shard_set.data.glob(record))
    path.unlink()
    os.mkfifo(path)
    stderr = prep("status", "--data", shard_set.data, status=2 if path.name == "manifest.json" else 1).stderr
    assert str(path) in stderr and "not a regular file" in stderr and "Traceback" not in stderr
