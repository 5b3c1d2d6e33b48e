"""Tests of the table of commits, which readers use in place of the records only as long as it matches them."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.publish import publish_json
from clipmill.shards import commit_table as commit_table_module
from clipmill.shards.commit_table import CommitRecords, distrust_folder, read_commits, table_bytes
from clipmill.shards.commits import Commit, Failure, ShardFiles, commit_path, write_commit
from clipmill.shards.format import COMMIT_TABLE_FILE
from clipmill.shards.lists import damaged_lists, finish_run
from clipmill.shards.opening import DamagedCommit
from clipmill.shards.verify import Code, check_record, quick_problems
from tests.manifests.test_interrupted_writes import Killed, stop_at

IDS = (0, 1, 998, 999, 1000, 1001, 2500)


def make_commit(shard_id: int, *, num_samples: int = 2) -> Commit:
    """Return the commit of a shard whose files these tests do not read; shard 1 failed completely."""
    stem = f"{shard_id // 1000:03d}/" * (shard_id >= 1000) + f"{shard_id:06d}-01234567"
    files = ShardFiles(f"{stem}.tar", 10240, "a" * 64, f"{stem}.index.arrow", 100, "b" * 64, num_samples)
    failures = (Failure("v", None, "io_error", "cannot read \udcff.mp4"),) if shard_id == 1 else ()
    return Commit("video", shard_id, "train", f"{num_samples:064x}", None if failures else files, failures)


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "video" / "made"
    folder.mkdir(parents=True)
    for shard_id in IDS:
        write_commit(folder, make_commit(shard_id))
    publish_json(folder / "recipe.json", {"crf": 24})
    finish_run(folder, dropped_ids=(), planned_ids=IDS)
    return folder


def by_records(folder: Path) -> CommitRecords:
    """Return the commits without using the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_table_module, "open_commit_table", lambda *_, **__: None)
        return read_commits(folder)


def num_read(folder: Path) -> int:
    """Return the number of records that a reader opens; the commits must equal the records."""
    read, opened = commit_table_module.read_commit, list[Path]()

    def note_and_read(path: Path) -> Commit:
        opened.append(path)
        return read(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_table_module, "read_commit", note_and_read)
        commits = read_commits(folder)
    assert (commits.commits, list(map(str, commits.damaged))) == (
        by_records(folder).commits,
        list(map(str, by_records(folder).damaged)),
    )
    assert list(commits.commits) == sorted(commits.commits)
    return len(opened)


def test_no_record_is_opened_after_a_run(variant: Path) -> None:
    assert num_read(variant) == 0
    assert read_commits(variant).commits == {shard_id: make_commit(shard_id) for shard_id in IDS}
    before = {path: path.stat().st_mtime_ns for path in variant.rglob("*")}
    finish_run(variant, dropped_ids=(), planned_ids=IDS)
    assert {path: path.stat().st_mtime_ns for path in variant.rglob("*")} == before


CHANGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "replaced": (lambda folder: write_commit(folder, make_commit(1001, num_samples=3)), 2),
    "replaced, first folder": (lambda folder: write_commit(folder, make_commit(0, num_samples=3)), 4),
    "added": (lambda folder: write_commit(folder, make_commit(1002)), 3),
    "added, new folder": (lambda folder: write_commit(folder, make_commit(7000)), 5),  # which is an entry of `commits/`
    "removed": (lambda folder: commit_path(folder, 1000).unlink(), 1),
    "folder removed": (lambda folder: shutil.rmtree(folder / "commits" / "002"), 4),
    "all removed": (lambda folder: shutil.rmtree(folder / "commits"), 0),
    "damaged and replaced": (lambda folder: (folder / "recipe.json").replace(commit_path(folder, 1001)), 2),
    "in two places, of which one counts": (
        lambda folder: shutil.copy(commit_path(folder, 1000), folder / "commits" / "001000.json"),
        4,
    ),
    "in the folder of others": (
        lambda folder: shutil.copy(commit_path(folder, 1000), folder / "commits" / "002" / "001000.json"),
        1,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_that_changes_is_read(variant: Path, change: str) -> None:
    do, num_opened = CHANGES[change]
    do(variant)
    assert num_read(variant) == num_opened


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "not recorded", "of another run"])
def test_a_table_that_is_not_the_recorded_one_does_not_count_and_is_written_again(variant: Path, harm: str) -> None:
    path, content = variant / COMMIT_TABLE_FILE, (variant / COMMIT_TABLE_FILE).read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "not recorded":
        (variant / "contents.json").unlink()
    elif harm == "of another run":
        path.write_bytes(table_bytes(read_commits(variant).to_table(shard_seconds={0: 7.0})))
    else:
        at = content.index(b"train")
        path.write_bytes(content[:at] + b"vrain" + content[at + 5 :] if harm == "flipped" else content[:-200])
    assert num_read(variant) == len(IDS)
    damage_list = damaged_lists(variant, read_commits(variant).commits)
    assert [damage.path for damage in damage_list] == ([] if harm == "not recorded" else [path])
    finish_run(variant, dropped_ids=(), planned_ids=IDS)
    assert num_read(variant) == 0 and path.read_bytes() == content


@pytest.mark.parametrize("keeps_times", [True, False])
def test_a_copied_folder_is_read_with_or_without_its_times(variant: Path, tmp_path: Path, keeps_times: bool) -> None:
    write_commit(variant, make_commit(1001, num_samples=5))  # the copy is made during a run
    copy = tmp_path / "copy"
    shutil.copytree(variant, copy)
    if not keeps_times:
        for path in [copy, *copy.rglob("*")]:
            path.touch()
    assert num_read(copy) == (2 if keeps_times else len(IDS))
    finish_run(copy, dropped_ids=(), planned_ids=IDS)
    assert num_read(copy) == 0 and not quick_problems(copy, [make_commit(1)])


def test_a_record_that_is_damaged_in_place_harms_no_reader_and_is_found(variant: Path) -> None:
    path = commit_path(variant, 1001)
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"train", b"brain"))
    commit = read_commits(variant).commits[1001]
    assert commit == make_commit(1001)
    assert [problem.code for problem in check_record(variant, commit)] == [Code.COMMIT_DAMAGED]
    # The time of a record reveals later changes; only a complete read reveals the others.
    long_after = (state.st_mtime_ns + 10**11,) * 2
    os.utime(path, ns=long_after)
    assert quick_problems(variant, [commit])[1001][0].code == Code.COMMIT_DAMAGED
    os.utime(path, ns=(state.st_mtime_ns,) * 2)
    assert Code.COMMIT_DAMAGED not in {problem.code for problem in quick_problems(variant, [commit])[1001]}
    distrust_folder(path)
    assert isinstance(read_commits(variant).damaged[0], DamagedCommit) and num_read(variant) == 2
    finish_run(variant, dropped_ids=(), planned_ids=IDS)
    assert read_commits(variant).damaged[0].shard_id == 1001, "a folder with damage must not be confirmed"


def test_a_run_that_is_killed_at_its_end_leaves_a_table_that_is_right_or_does_not_count(
    variant: Path, tmp_path: Path
) -> None:
    write_commit(variant, make_commit(1001, num_samples=3))
    write_commit(variant, make_commit(7000))
    expected = {*IDS, 7000} - {998, 2500}
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(variant, undisturbed)
    finish_run(undisturbed, dropped_ids=(998, 2500), planned_ids=expected)
    content = (undisturbed / COMMIT_TABLE_FILE).read_bytes()
    for point in itertools.count():
        folder = tmp_path / str(point)
        shutil.copytree(variant, folder)
        with pytest.MonkeyPatch.context() as patch:
            stop_at(point, patch, Killed())
            try:
                finish_run(folder, dropped_ids=(998, 2500), planned_ids=expected)
                break
            except Killed:
                pass
        num_read(folder)
        commits = read_commits(folder)
        assert not commits.damaged and not damaged_lists(folder, commits.commits), f"killed at point {point}"
        finish_run(folder, dropped_ids={998, 2500} & commits.commits.keys(), planned_ids=expected)
        assert num_read(folder) == 0 and (folder / COMMIT_TABLE_FILE).read_bytes() == content
    assert point > 12


def test_a_lost_worker_that_commits_at_the_end_of_a_run_is_not_overlooked(
    variant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_commit(variant, make_commit(0, num_samples=9))

    def confirm_late(folder: Path, **options: Any) -> None:
        write_commit(folder, make_commit(1001, num_samples=4))
        confirm_folders(folder, **options)

    from clipmill.shards.lists import confirm_folders

    monkeypatch.setattr("clipmill.shards.lists.confirm_folders", confirm_late)
    finish_run(variant, dropped_ids=(), planned_ids=IDS)
    assert num_read(variant) == 2 and read_commits(variant).commits[1001] == make_commit(1001, num_samples=4)


def test_a_variant_of_one_shard_has_a_table_too(variant: Path) -> None:
    finish_run(variant, dropped_ids=IDS[1:], planned_ids=IDS[:1])
    assert num_read(variant) == 0 and read_commits(variant).commits == {0: make_commit(0)}


def test_folders_that_cannot_be_dated_are_read_record_by_record(variant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_commit(variant, make_commit(1001, num_samples=3))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("clipmill.shards.commit_table.os.utime", refuse)
    finish_run(variant, dropped_ids=(), planned_ids=IDS)
    assert num_read(variant) == len(IDS)
