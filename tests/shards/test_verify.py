import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import Commit, Failure, commit_path, write_commit
from clipmill.shards.index import index_bytes, open_index
from clipmill.shards.verify import Code, commit_problem, quick_check, verify_shard
from clipmill.shards.writer import Sample

MakeSamples = Callable[..., list[Sample]]
CommitShard = Callable[..., Commit]
Flip = Callable[[Path, int], None]
KEYS = [f"video_{number * 15000:09d}" for number in range(20)]


@pytest.fixture
def commit(tmp_path: Path, samples: MakeSamples, commit_shard: CommitShard) -> Commit:
    return commit_shard(tmp_path, samples(20))


def _path(directory: Path, commit: Commit, kind: str) -> Path:
    assert commit.files is not None
    return directory / {"tar": commit.files.tar, "index": commit.files.index, "idx": f"{commit.files.tar}.idx"}[kind]


def _codes(directory: Path, commit: Commit) -> list[tuple[Code, str | None]]:
    return [(problem.code, problem.key) for problem in verify_shard(directory, commit)]


def test_a_fresh_shard_has_no_problems(tmp_path: Path, commit: Commit) -> None:
    assert verify_shard(tmp_path, commit) == []
    assert quick_check(tmp_path, commit) == []


def test_a_commit_of_failures_only_has_nothing_to_check(tmp_path: Path) -> None:
    commit = Commit("video", 0, "train", "00", None, (Failure("v", None, "source_missing", "gone"),))
    write_commit(tmp_path, commit)
    assert verify_shard(tmp_path, commit) == quick_check(tmp_path, commit) == []


@pytest.mark.parametrize("extension", ["mp4", "json", "latents.npy"])
@pytest.mark.parametrize("row", [0, 9, 19])
def test_one_flipped_byte_of_a_payload_names_its_key(
    tmp_path: Path, commit: Commit, flip: Flip, row: int, extension: str
) -> None:
    table = open_index(_path(tmp_path, commit, "index"))
    flip(_path(tmp_path, commit, "tar"), table.column(f"{extension}_offset")[row].as_py() + 2)
    (problem,) = verify_shard(tmp_path, commit)
    assert (problem.code, problem.key) == (Code.MEMBER_CHECKSUM, KEYS[row])
    assert extension in problem.message


@pytest.mark.parametrize("byte", [0, 20, 105, 130, 140, 150, 156, 260])
def test_one_flipped_byte_of_a_header_is_told_as_header_damage(
    tmp_path: Path, commit: Commit, flip: Flip, byte: int
) -> None:
    table = open_index(_path(tmp_path, commit, "index"))
    for row in (0, 7, 19):
        header = table.column("json_offset")[row].as_py() - 512
        flip(_path(tmp_path, commit, "tar"), header + byte)
        assert _codes(tmp_path, commit) == [(Code.TAR_ENTRIES_DIFFER, KEYS[row])]
        flip(_path(tmp_path, commit, "tar"), header + byte)
    assert verify_shard(tmp_path, commit) == []


def test_one_flipped_byte_of_padding_is_told_as_such(tmp_path: Path, commit: Commit, flip: Flip) -> None:
    tar = _path(tmp_path, commit, "tar")
    flip(tar, tar.stat().st_size - 1)
    (problem,) = verify_shard(tmp_path, commit)
    assert (problem.code, problem.key) == (Code.TAR_CHECKSUM, None)
    assert "padding" in problem.message


def test_a_cut_tar_names_every_lost_key(tmp_path: Path, commit: Commit) -> None:
    row = open_index(_path(tmp_path, commit, "index")).slice(12, 1).to_pylist()[0]
    os.truncate(_path(tmp_path, commit, "tar"), row["mp4_offset"] + 10)
    codes = _codes(tmp_path, commit)
    assert codes[0] == (Code.TAR_SIZE, None)
    assert [key for code, key in codes if code == Code.MEMBER_CHECKSUM] == KEYS[12:]
    assert codes[-1][0] == Code.TAR_ENTRIES_DIFFER


def test_a_tar_of_no_bytes_is_told(tmp_path: Path, commit: Commit) -> None:
    os.truncate(_path(tmp_path, commit, "tar"), 0)
    assert {Code.TAR_SIZE, Code.TAR_ENTRIES_DIFFER} <= {code for code, _ in _codes(tmp_path, commit)}


def test_missing_files_are_told(tmp_path: Path, commit: Commit) -> None:
    for kind, code in (("idx", Code.ENERGON_INDEX), ("index", Code.INDEX_MISSING), ("tar", Code.TAR_MISSING)):
        path = _path(tmp_path, commit, kind)
        path.rename(tmp_path / "away")
        assert _codes(tmp_path, commit) == [(code, None)]
        assert [problem.code for problem in quick_check(tmp_path, commit)] == [code]
        (tmp_path / "away").rename(path)
    assert verify_shard(tmp_path, commit) == []


def test_damage_to_the_indexes_is_told(tmp_path: Path, commit: Commit, flip: Flip) -> None:
    index = _path(tmp_path, commit, "index")
    flip(index, index.stat().st_size // 2)
    assert _codes(tmp_path, commit) == [(Code.INDEX_CHECKSUM, None)]
    os.truncate(index, 100)
    assert _codes(tmp_path, commit) == [(Code.INDEX_SIZE, None)]
    # Even without an index, damage to the tar is detected.
    flip(_path(tmp_path, commit, "tar"), 600)
    assert _codes(tmp_path, commit) == [(Code.INDEX_SIZE, None), (Code.TAR_CHECKSUM, None)]


def test_a_wrong_energon_index_is_told(tmp_path: Path, commit: Commit, flip: Flip) -> None:
    flip(_path(tmp_path, commit, "idx"), 9)
    assert _codes(tmp_path, commit) == [(Code.ENERGON_INDEX, None)]


def _commit_index_of(directory: Path, commit: Commit, rows: list[dict[str, Any]]) -> Commit:
    """Commit an index with matching checksums, as written by a program that broke the rules."""
    assert commit.files is not None
    path = _path(directory, commit, "index")
    content = index_bytes(pa.Table.from_pylist(rows, schema=open_index(path).schema))
    path.write_bytes(content)
    files = replace(commit.files, index_bytes=len(content), index_sha256=hashlib.sha256(content).hexdigest())
    return replace(commit, files=files)


def test_an_index_with_a_key_twice_or_a_row_too_few_is_told(tmp_path: Path, commit: Commit) -> None:
    rows = open_index(_path(tmp_path, commit, "index")).to_pylist()
    for wrong in (rows[:-1], [*rows[:-1], {**rows[-1], "key": KEYS[0]}]):
        assert _codes(tmp_path, _commit_index_of(tmp_path, commit, wrong)) == [(Code.INDEX_FORMAT, None)]


def test_samples_that_do_not_follow_in_order_are_told(tmp_path: Path, commit: Commit) -> None:
    rows = open_index(_path(tmp_path, commit, "index")).to_pylist()
    swapped = [*rows[:4], rows[5], rows[4], *rows[6:]]
    codes = _codes(tmp_path, _commit_index_of(tmp_path, commit, swapped))
    assert (Code.MEMBER_ORDER, KEYS[4]) in codes


def test_files_of_another_shard_under_this_name_are_told(
    tmp_path: Path, commit: Commit, samples: MakeSamples, commit_shard: CommitShard
) -> None:
    commit_shard(tmp_path / "other", samples(20, seed=5))
    for kind in ("tar", "index", "idx"):
        _path(tmp_path / "other", commit, kind).replace(_path(tmp_path, commit, kind))
    assert {code for code, _ in _codes(tmp_path, commit)} == {Code.INDEX_CHECKSUM, Code.TAR_CHECKSUM}


def test_a_damaged_commit_becomes_a_problem(tmp_path: Path, commit: Commit) -> None:
    commit_path(tmp_path, 0).write_text("{}")
    (error,) = read_commits(tmp_path).damaged
    problem = commit_problem(error)
    assert (problem.shard_id, problem.code) == (0, Code.COMMIT_DAMAGED)


@pytest.mark.parametrize(("kind", "code"), [("tar", Code.TAR_CHECKSUM), ("index", Code.INDEX_CHECKSUM)])
def test_the_quick_check_sees_a_byte_flipped_in_place(
    tmp_path: Path, commit: Commit, flip: Flip, kind: str, code: Code
) -> None:
    path = _path(tmp_path, commit, kind)
    flip(path, 700)
    newer_ns = commit_path(tmp_path, 0).stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(newer_ns, newer_ns))
    assert [problem.code for problem in quick_check(tmp_path, commit)] == [code]
    assert [problem.code for problem in quick_check(tmp_path, commit)] == [code]


def test_the_quick_check_sees_other_sizes(tmp_path: Path, commit: Commit) -> None:
    for kind in ("tar", "index", "idx"):
        path = _path(tmp_path, commit, kind)
        os.truncate(path, path.stat().st_size - 8)
    assert [problem.code for problem in quick_check(tmp_path, commit)] == [
        Code.TAR_SIZE,
        Code.INDEX_SIZE,
        Code.ENERGON_INDEX,
    ]


def test_a_copied_shard_is_read_once_and_then_known(tmp_path: Path, commit: Commit, flip: Flip) -> None:
    tar = _path(tmp_path, commit, "tar")
    later_ns = commit_path(tmp_path, 0).stat().st_mtime_ns + 10_000_000
    os.utime(tar, ns=(later_ns, later_ns))
    content = commit_path(tmp_path, 0).read_bytes()
    assert quick_check(tmp_path, commit) == []
    assert commit_path(tmp_path, 0).read_bytes() == content
    # A change that keeps the modification time shows that the file is not read a second time ...
    flip(tar, 700)
    os.utime(tar, ns=(later_ns, later_ns))
    assert quick_check(tmp_path, commit) == []
    # ... and a change of the modification time shows that the file is read.
    os.utime(tar, ns=(later_ns + 1, later_ns + 1))
    assert [problem.code for problem in quick_check(tmp_path, commit)] == [Code.TAR_CHECKSUM]
