import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import Commit, Failure, ShardFiles, commit_path, read_commit, write_commit
from clipmill.shards.opening import DamagedCommit

FILES = ShardFiles("000003-0123abcd.tar", 10240, "a" * 64, "000003-0123abcd.index.arrow", 2000, "b" * 64, 7)
COMMIT = Commit("video", 3, "train", "c" * 64, FILES, (Failure("v1", "v1_000015000", "truncated", "ends at 14.2 s"),))


def test_a_commit_is_read_as_it_was_written(tmp_path: Path) -> None:
    nothing_made = Commit("video", 4, "val", "d" * 64, None, (Failure("v\u00e9", None, "missing", "/a/\udcff/b.mp4"),))
    for commit in (COMMIT, nothing_made):
        write_commit(tmp_path, commit)
        assert read_commit(commit_path(tmp_path, commit.shard_id)) == commit
    assert read_commits(tmp_path).commits == {3: COMMIT, 4: nothing_made}


def test_equal_commits_are_equal_bytes(tmp_path: Path) -> None:
    for name, commit in (("one", COMMIT), ("two", replace(COMMIT))):
        (tmp_path / name).mkdir()
        write_commit(tmp_path / name, commit)
    assert commit_path(tmp_path / "one", 3).read_bytes() == commit_path(tmp_path / "two", 3).read_bytes()


def test_any_flipped_byte_and_any_cut_is_seen(tmp_path: Path, flip: Callable[[Path, int], None]) -> None:
    write_commit(tmp_path, COMMIT)
    path = commit_path(tmp_path, 3)
    content = path.read_bytes()
    for offset in range(len(content)):
        flip(path, offset)
        with pytest.raises(DamagedCommit):
            read_commit(path)
        path.write_bytes(content)
    for size_bytes in range(len(content) - 1):  # without the final newline, the record is still complete
        path.write_bytes(content[:size_bytes])
        with pytest.raises(DamagedCommit):
            read_commit(path)


def _sign(record: dict[str, object]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return json.dumps({**record, "sha256": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize("change", ["shard id", "tar of another shard", "tar elsewhere", "a field is missing"])
def test_a_record_that_is_whole_but_not_of_this_shard_is_refused(tmp_path: Path, change: str) -> None:
    write_commit(tmp_path, COMMIT)
    path = commit_path(tmp_path, 3)
    record = json.loads(path.read_text())
    del record["sha256"]
    match change:
        case "shard id":
            record["shard_id"] = 5
            record["files"] = None
        case "tar of another shard":
            record["files"]["tar"] = "000004-0123abcd.tar"
        case "tar elsewhere":
            record["files"]["tar"] = "000003-0123abcd/../../000003-0123abcd.tar"
        case _:
            del record["split"]
    path.write_text(_sign(record))
    with pytest.raises(DamagedCommit):
        read_commit(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '"text"', "7", '{"shards": 3}'])
def test_foreign_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "000000.json"
    path.write_text(content)
    with pytest.raises(DamagedCommit, match=r"000000\.json"):
        read_commit(path)


def test_a_newer_format_is_the_users_business_and_not_damage(tmp_path: Path) -> None:
    write_commit(tmp_path, COMMIT)
    path = commit_path(tmp_path, 3)
    record = json.loads(path.read_text())
    del record["sha256"]
    path.write_text(_sign({**record, "clipmill_format": 3}))
    with pytest.raises(UserError, match="format 3") as raised:
        read_commit(path)
    assert raised.value.hint


def test_all_commits_are_read_and_the_damaged_named(tmp_path: Path) -> None:
    assert not read_commits(tmp_path).commits
    for shard_id in (0, 7, 999_999, 1_000_000):
        write_commit(tmp_path, Commit("video", shard_id, "train", "c" * 64, None, ()))
    commit_path(tmp_path, 7).write_text("{")
    (tmp_path / "commits" / ".tmp-0123-000009.json").write_text("{")
    (tmp_path / "commits" / "notes.json").write_text("{")
    commits = read_commits(tmp_path)
    assert list(commits.commits) == [0, 999_999, 1_000_000]
    assert [error.path.name for error in commits.damaged] == ["000007.json"]
