"""Tests of folders with a thousand shards."""

import json
from pathlib import Path

import numpy as np
import pytest
import webdataset

from clipmill.manifests.publish import publish_bytes
from clipmill.shards.commit_table import distrust_folder, read_commits
from clipmill.shards.commits import Commit, commit_path, write_commit
from clipmill.shards.format import RECIPE_FILE, VIDEO_FIELDS, ShardName, folder_of, shard_path
from clipmill.shards.lists import damaged_lists, finish_run
from clipmill.shards.reader import Variant
from clipmill.shards.verify import quick_problems, verify_shard
from clipmill.shards.writer import Sample, ShardWriter

IDS = range(998, 1004)
FAILED = 1002
FIELDS = ("video_id", "start_ms", "num_frames", "fps_num", "fps_den")


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    """Create shards 998 to 1003 as a run leaves them, with two samples each. The failed shard has no samples."""
    folder = tmp_path / "data" / "video" / "h264-01234567"
    folder.mkdir(parents=True)
    (folder / RECIPE_FILE).write_text("{}")
    for shard_id in IDS:
        make(folder, shard_id, num_samples=0 if shard_id == FAILED else 2, digit="0")
    finish_run(folder, dropped_ids=(), planned_ids=IDS)
    return folder


def make(folder: Path, shard_id: int, *, num_samples: int = 3, digit: str = "7") -> None:
    """Make and commit a shard."""
    fields = [field for field in VIDEO_FIELDS if field.name in FIELDS]
    if not num_samples:
        write_commit(folder, Commit("video", shard_id, "train", "cd" * 32, None, ()))
        return
    with ShardWriter(folder, shard_id=shard_id, extensions=("mp4", "json"), fields=fields) as writer:
        for number in range(num_samples):
            values = dict(zip(FIELDS, (f"v{shard_id}", number * 15000, 450, 30, 1), strict=True))
            writer.add(Sample(f"v{shard_id}_{number * 15000:09d}", {"mp4": b"new", "json": b"{}"}, values))
        write_commit(folder, Commit("video", shard_id, "train", "cd" * 32, writer.publish(digit * 8), ()))


def is_sound(variant: Path) -> bool:
    listing = read_commits(variant)
    commits = listing.commits.values()
    verified = [problem for commit in commits for problem in verify_shard(variant, commit)]
    return not (
        listing.damaged or verified or quick_problems(variant, commits) or damaged_lists(variant, listing.commits)
    )


@pytest.mark.parametrize(
    ("shard_id", "folder"), [(0, ""), (999, ""), (1000, "001"), (1999, "001"), (12345, "012"), (1234567, "1234")]
)
def test_a_folder_holds_a_thousand_shards(shard_id: int, folder: str) -> None:
    assert folder_of(shard_id) == folder
    assert ShardName(shard_id, "1f2e3d4c99").tar == shard_path(shard_id, f"{shard_id:06d}-1f2e3d4c.tar")


@pytest.mark.parametrize("has_table", [False, True])
def test_a_set_grows_in_folders(variant: Path, has_table: bool) -> None:
    finish_run(variant, dropped_ids=(), planned_ids=IDS)
    for shard_id in () if has_table else IDS:
        distrust_folder(commit_path(variant, shard_id))
    make(variant, 1001)  # the shard is made again, because its videos have changed
    make(variant, 1004)
    make(variant, 2000)
    assert is_sound(variant)
    finish_run(variant, dropped_ids=(998,), planned_ids={*IDS, 1004, 2000} - {998})
    assert is_sound(variant)
    opened = Variant(variant).require_complete()
    assert list(opened.commits) == [999, 1000, 1001, 1002, 1003, 1004, 2000]
    assert sorted(str(path.relative_to(variant)) for path in variant.glob("commits/**/*.json")) == [
        "commits/000999.json",
        *(f"commits/001/00{shard_id}.json" for shard_id in range(1000, 1005)),
        "commits/002/002000.json",
    ]
    listed = (variant / "shards.txt").read_text().split()
    assert listed == [
        "000999-00000000.tar",
        "001/001000-00000000.tar",
        "001/001001-77777777.tar",
        "001/001003-00000000.tar",
        "001/001004-77777777.tar",
        "002/002000-77777777.tar",
    ]
    keys = [sample["__key__"] for sample in opened.iterate()]
    assert len(keys) == 15 and len(set(keys)) == 15
    loaded = webdataset.WebDataset([str(variant / name) for name in listed], shardshuffle=False)
    assert [sample["__key__"] for sample in loaded] == keys
    for name in listed:
        energon = np.fromfile(variant / f"{name}.idx", "<u8")
        assert energon[0] == 0 and len(energon) == 1 + (2 if "0000000.tar" in name else 3)


def test_a_record_in_another_folder_than_its_own_is_missing(variant: Path) -> None:
    (variant / "commits" / "001" / "001001.json").rename(variant / "commits" / "001001.json")
    commits = read_commits(variant)
    assert [damaged.shard_id for damaged in commits.damaged] == [1001]
    assert "commits/001/001001.json" in str(commits.damaged[0])


def test_a_record_without_a_checksum_is_damaged(variant: Path) -> None:
    path = commit_path(variant, 1001)
    record = json.loads(path.read_bytes())
    del record["sha256"]
    publish_bytes(path, json.dumps(record).encode())
    (damaged,) = read_commits(variant).damaged
    assert damaged.shard_id == 1001 and "it has no checksum" in str(damaged)


@pytest.mark.parametrize(
    "name", ["001001-00000000.tar", "002/001001-00000000.tar", "../001001-00000000.tar", "001/../001001-00000000.tar"]
)
def test_a_commit_that_names_files_elsewhere_is_damaged(variant: Path, name: str) -> None:
    commit = read_commits(variant).commits[1001]
    assert commit.files is not None
    files = type(commit.files)(**{**vars(commit.files), "tar": name})
    write_commit(variant, Commit(**{**vars(commit), "files": files}))
    assert [damaged.shard_id for damaged in read_commits(variant).damaged] == [1001]


def test_many_files_are_checked_by_listing_as_by_looking_at_each(
    variant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(variant, 1004)
    finish_run(variant, dropped_ids=(), planned_ids={*IDS, 1004})
    commits = list(read_commits(variant).commits.values())
    (variant / "001" / "001004-77777777.tar").unlink()
    (variant / "001" / "001000-00000000.index.arrow").write_bytes(b"short")
    (variant / "001" / "001003-00000000.tar.idx").unlink()
    one_by_one = quick_problems(variant, commits)
    monkeypatch.setattr("clipmill.shards.verify._MIN_LISTED", 1)
    assert list(one_by_one) == [1000, 1003, 1004] and quick_problems(variant, commits) == one_by_one
