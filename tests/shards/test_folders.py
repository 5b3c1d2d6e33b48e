"""Folders of a thousand shards, and sets of an older version, which kept all shards in one folder.

`old_flat_shards.tar.xz` was made at commit e736ce2: shards 998 to 1003 of two samples, of which 1002 failed.
"""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from shards.commits import Commit, commit_path, read_commits, write_commit
from shards.format import ShardName, folder_of, in_folder
from shards.lists import damaged_lists, finish_run
from shards.quick_check import quick_problems
from shards.reader import Variant
from shards.verify import verify_shard
from shards.writer import Sample, ShardWriter

IDS = range(998, 1004)
FIELDS = ("video_id", "start_ms", "num_frames", "fps_num", "fps_den")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("old_flat_shards.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return next((tmp_path / "data" / "video").iterdir())


def make(variant: Path, shard_id: int, *, digit: str = "7") -> None:
    """Make and commit a shard with one sample more than the old ones."""
    schema = next(iter(Variant(variant).shards())).index.schema
    fields = [schema.field(name) for name in FIELDS]
    with ShardWriter(variant, shard_id=shard_id, extensions=("mp4", "json"), fields=fields) as writer:
        for number in range(3):
            values = dict(zip(FIELDS, (f"v{shard_id}", number * 15000, 450, 30, 1), strict=True))
            writer.add(Sample(f"v{shard_id}_{number * 15000:09d}", {"mp4": b"new", "json": b"{}"}, values))
        write_commit(variant, Commit("video", shard_id, "train", "cd" * 32, writer.publish(digit * 8), ()))


def is_sound(variant: Path) -> bool:
    found = read_commits(variant)
    commits = found.commits.values()
    verified = [problem for commit in commits for problem in verify_shard(variant, commit)]
    return not (found.damaged or verified or quick_problems(variant, commits) or damaged_lists(variant, found.commits))


@pytest.mark.parametrize(
    ("shard_id", "folder"), [(0, ""), (999, ""), (1000, "001"), (1999, "001"), (12345, "012"), (1234567, "1234")]
)
def test_a_folder_holds_a_thousand_shards(shard_id: int, folder: str) -> None:
    assert folder_of(shard_id) == folder
    assert ShardName(shard_id, "1f2e3d4c99").tar == in_folder(shard_id, f"{shard_id:06d}-1f2e3d4c.tar")


def test_a_set_of_an_older_version_is_read_and_a_run_leaves_it_as_it_is(flat: Path) -> None:
    assert is_sound(flat)
    opened = Variant(flat).whole()
    assert list(opened.commits) == list(IDS) and len(list(opened.iterate())) == 10
    assert opened.find("v1003_000015000")[0].tar_path == flat / "001003-01234567.tar"
    before = {path: path.read_bytes() for path in flat.rglob("*") if path.is_file()}
    finish_run(flat, dropped=(), wanted=IDS)
    assert {path: path.read_bytes() for path in flat.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("has_table", [False, True])
def test_it_grows_in_folders(flat: Path, has_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.lists.MIN_COMMITS", 4 if has_table else 100)
    finish_run(flat, dropped=(), wanted=IDS)
    make(flat, 1001)  # again, because its videos have changed
    make(flat, 1004)
    make(flat, 2000)
    assert is_sound(flat)
    finish_run(flat, dropped=(998,), wanted={*IDS, 1004, 2000} - {998})
    assert is_sound(flat)
    opened = Variant(flat).whole()
    assert list(opened.commits) == [999, 1000, 1001, 1002, 1003, 1004, 2000]
    # A record stays where it is, so that there is one of each shard.
    assert sorted(str(path.relative_to(flat)) for path in flat.glob("commits/**/*.json")) == [
        "commits/000999.json",
        "commits/001/001004.json",
        *(f"commits/00{shard_id}.json" for shard_id in (1000, 1001, 1002, 1003)),
        "commits/002/002000.json",
    ]
    listed = (flat / "shards.txt").read_text().split()
    assert listed == [
        "000999-01234567.tar",
        "001000-01234567.tar",
        "001/001001-77777777.tar",
        "001003-01234567.tar",
        "001/001004-77777777.tar",
        "002/002000-77777777.tar",
    ]
    keys = [sample["__key__"] for sample in opened.iterate()]
    assert len(keys) == 15 and len(set(keys)) == 15
    loaded = webdataset.WebDataset([str(flat / name) for name in listed], shardshuffle=False)
    assert [sample["__key__"] for sample in loaded] == keys
    for name in listed:
        energon = np.fromfile(flat / f"{name}.idx", "<u8")
        assert energon[0] == 0 and len(energon) == 1 + (2 if "0123" in name else 3)


def test_of_two_records_the_one_in_its_folder_counts(flat: Path) -> None:
    old = (flat / "commits" / "001001.json").read_bytes()
    (flat / "commits" / "001").mkdir()
    (flat / "commits" / "001" / "001001.json").write_bytes(old)
    make(flat, 1001)
    assert commit_path(flat, 1001) == flat / "commits" / "001" / "001001.json"
    assert (flat / "commits" / "001001.json").read_bytes() == old
    files = read_commits(flat).commits[1001].files
    assert files is not None and files.tar == "001/001001-77777777.tar" and is_sound(flat)


@pytest.mark.parametrize("name", ["002/001001-01234567.tar", "../001001-01234567.tar", "001/../001001-01234567.tar"])
def test_a_commit_that_names_files_elsewhere_is_damaged(flat: Path, name: str) -> None:
    commit = read_commits(flat).commits[1001]
    assert commit.files is not None
    write_commit(flat, Commit(**{**vars(commit), "files": type(commit.files)(**{**vars(commit.files), "tar": name})}))
    assert [damaged.shard_id for damaged in read_commits(flat).damaged] == [1001]


def test_many_files_are_checked_by_listing_as_by_looking_at_each(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard_id in (1001, 1004):
        make(flat, shard_id)
    finish_run(flat, dropped=(), wanted={*IDS, 1004})
    commits = list(read_commits(flat).commits.values())
    (flat / "001" / "001004-77777777.tar").unlink()
    (flat / "001000-01234567.index.arrow").write_bytes(b"short")
    (flat / "001003-01234567.tar.idx").unlink()
    one_by_one = quick_problems(flat, commits)
    monkeypatch.setattr("shards.quick_check._MIN_LISTED", 1)
    assert list(one_by_one) == [1000, 1003, 1004] and quick_problems(flat, commits) == one_by_one
