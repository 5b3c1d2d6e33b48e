from pathlib import Path

import pytest

from clipmill.shards.commits import Commit, ShardFiles
from clipmill.shards.lists import write_shard_lists


def _commit(shard_id: int, split: str, *, is_empty: bool = False) -> Commit:
    stem = f"{shard_id:06d}-01234567"
    files = ShardFiles(f"{stem}.tar", 10240, "a" * 64, f"{stem}.index.arrow", 100, "b" * 64, 1)
    return Commit("video", shard_id, split, "c" * 64, None if is_empty else files, ())


def _lists(directory: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in directory.iterdir()}


def test_lists_follow_the_commits(tmp_path: Path) -> None:
    commits = {
        10: _commit(10, "train"),
        2: _commit(2, "val"),
        1: _commit(1, "train"),
        3: _commit(3, "test", is_empty=True),
    }
    write_shard_lists(tmp_path, commits)
    assert _lists(tmp_path) == {
        "shards.txt": ["000001-01234567.tar", "000002-01234567.tar", "000010-01234567.tar"],
        "shards-train.txt": ["000001-01234567.tar", "000010-01234567.tar"],
        "shards-val.txt": ["000002-01234567.tar"],
    }
    del commits[2]
    write_shard_lists(tmp_path, commits)
    assert sorted(_lists(tmp_path)) == ["shards-train.txt", "shards.txt"]
    write_shard_lists(tmp_path, {})
    assert _lists(tmp_path) == {"shards.txt": []}


def test_lists_that_are_right_are_left_alone(tmp_path: Path) -> None:
    write_shard_lists(tmp_path, {1: _commit(1, "train"), 2: _commit(2, "val")})
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    write_shard_lists(tmp_path, {1: _commit(1, "train"), 2: _commit(2, "val"), 3: _commit(3, "val")})
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"shards-train.txt"}


def test_a_split_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.\./x"):
        write_shard_lists(tmp_path, {1: _commit(1, "../x")})
    assert _lists(tmp_path) == {}
