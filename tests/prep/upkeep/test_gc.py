"""Tests that `prep gc` removes only files that are no longer needed, and never unknown files."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.shards.commits import commit_path
from clipmill.shards.dataset import reading_variants
from clipmill.shards.marks import remove_unused_marks
from clipmill.shards.reader import Variant
from clipmill.train.data.data_folder import open_data_folder
from tests.prep.running import Ran, chunk, contents
from tests.prep.sets import LEN, ShardSet, rerun

Prep = Callable[..., Ran]


@pytest.fixture(scope="session")
def two_variants(made_set: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Create a data folder with a second, current variant; return it with the name of the first variant."""
    data = tmp_path_factory.mktemp("two") / "data"
    shutil.copytree(made_set, data)
    old = ShardSet(data).variant.name
    chunk(data, *LEN, "--crf", "40", status=1)
    return data, old


@pytest.fixture
def old_and_new(two_variants: tuple[Path, str], tmp_path: Path) -> tuple[ShardSet, Path]:
    """Return a set with a variant that is no longer current, and the folder of this variant."""
    shutil.copytree(two_variants[0], tmp_path / "two")
    return ShardSet(tmp_path / "two"), tmp_path / "two" / "video" / two_variants[1]


def test_the_end_of_a_run_says_what_gc_frees_and_then_what_is_next(
    prep: Prep, old_and_new: tuple[ShardSet, Path]
) -> None:
    shard_set, old = old_and_new
    earlier = shard_set.tar().with_name("000000-00000000.tar")
    shutil.copy(shard_set.tar(), earlier)
    old_bytes = sum(path.stat().st_size for path in old.rglob("*") if path.is_file())
    values = rerun(prep, shard_set, *LEN, "--crf", "40")
    assert values["freed_by_gc_bytes"] == old_bytes + earlier.stat().st_size
    assert values["next"] == f"train quickstart {shard_set.data}", "one video failed, but the others suffice"
    assert prep("gc", "--data", shard_set.data, "--json").summary["num_bytes"] == values["freed_by_gc_bytes"]
    assert rerun(prep, shard_set, *LEN, "--crf", "40")["freed_by_gc_bytes"] == 0


def test_strays_survive_wherever_they_are(prep: Prep, old_and_new: tuple[ShardSet, Path]) -> None:
    shard_set, old = old_and_new
    tar = next(old.glob("*.tar"))
    strays = [
        shard_set.data / "notes.txt",
        shard_set.data / ".tmp-mine",
        shard_set.data / "video" / "README",
        shard_set.data / "video" / "backup" / tar.name,
        shard_set.variant / "000000-copy.tar",
        shard_set.variant / "mine" / "000007-0123abcd.tar",
        old / "my results.csv",
        old / "commits" / "notes",
        old / "commits" / "mine" / "000000.json",
    ]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_text("mine")
    link = old / "000009-0123abcd.tar"
    link.symlink_to(shard_set.data / "notes.txt")
    copied = shard_set.data / "video" / f"h264-kept-{old.name[-8:-1]}x"
    shutil.copytree(old, copied)
    copy = contents(copied)
    ran = prep("gc", "--data", shard_set.data)
    assert all(stray.read_text() == "mine" for stray in strays)
    assert link.is_symlink() and contents(copied) == copy
    assert {path.name for path in old.rglob("*")} == {
        "my results.csv",
        "commits",
        "notes",
        "mine",
        "000000.json",
        link.name,
    }
    for name in ("my results.csv", "backup", "000000-copy.tar", "commits/notes", link.name, copied.name):
        assert f"{name}: not part of the data format" in ran.stdout


def test_what_killed_commands_left_goes(prep: Prep, shard_set: ShardSet) -> None:
    before = contents(shard_set.data)
    left = [
        shard_set.data / ".tmp-0123456789ab-dataset.json",
        shard_set.data / "manifest" / ".tmp-0123456789ab-videos.parquet",
        shard_set.variant / ".tmp-0123456789ab-000000.tar",
        shard_set.variant / "commits" / ".tmp-0123456789ab-000000.json",
        shard_set.variant / ".tmp-running" / "000000.json",
        shard_set.variant / "000000-0123abcd.tar",
        shard_set.variant / "000000-0123abcd.tar.idx",
        shard_set.variant / "000000-0123abcd.index.arrow",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    ran = prep("gc", "--data", shard_set.data)
    assert f"{5 * len(left)} bytes freed" in ran.stdout
    assert "000000-0123abcd.tar (5 bytes): not referenced by a commit" in ran.stdout
    assert contents(shard_set.data) == before
    assert not (shard_set.variant / ".tmp-running").exists()


@pytest.mark.parametrize("loss", ["tar", "commit", "dataset", "folder"])
def test_nothing_goes_while_the_current_variant_is_not_whole(
    prep: Prep, old_and_new: tuple[ShardSet, Path], loss: str
) -> None:
    shard_set, old = old_and_new
    reason = {
        "tar": "000000 is missing",
        "commit": "000001.json: the commit record is missing",
        "dataset": "there is no current variant",
        "folder": "is missing",
    }
    {
        "tar": lambda: shard_set.tar(0).unlink(),
        "commit": lambda: commit_path(shard_set.variant, 1).unlink(),
        "dataset": lambda: (shard_set.data / "dataset.json").unlink(),
        "folder": lambda: shutil.rmtree(shard_set.variant),
    }[loss]()
    before = contents(shard_set.data)
    ran = prep("gc", "--data", shard_set.data)
    assert "kept       all variants and shards" in ran.stdout and reason[loss] in ran.stdout
    assert contents(shard_set.data) == before
    assert old.is_dir()


def kept_names(ran: Ran) -> list[str]:
    """Return the reasons at the end of the lines about what a dry run of `prep gc` keeps."""
    return [line.partition(": ")[2] for line in ran.stdout.splitlines() if line.startswith("kept ")]


def test_a_dry_run_says_why_each_variant_is_kept(prep: Prep, old_and_new: tuple[ShardSet, Path]) -> None:
    shard_set, old = old_and_new
    data = ("--data", shard_set.data)
    current = "the current variant"
    assert kept_names(prep("gc", "--dry-run", *data)) == [current]
    assert kept_names(prep("gc", "--dry-run", "--keep", old.name, *data)) == [current, "selected by --keep"]
    assert "there is no such variant" in prep("gc", "--keep", "h264-none", *data, status=2).error
    (young,) = kept_names(prep("gc", "--dry-run", "--older-than", "7d", *data))[1:]
    assert young.startswith("changed ") and young.endswith(" ago, less than --older-than")
    assert '"7 days" is not an age' in prep("gc", "--older-than", "7 days", *data, status=2).error
    # The disk's clock was an hour fast when it wrote.
    later_s = time.time() + 3600
    os.utime(next(old.glob("*.tar")), (later_s, later_s))
    assert len(kept_names(prep("gc", "--dry-run", "--older-than", "1h", *data))) == 2
    for path in old.rglob("*"):
        os.utime(path, (later_s - 8 * 86_400, later_s - 8 * 86_400))
    prep("gc", "--older-than", "7d", *data)
    assert not old.exists()


def test_what_readers_have_opened_stays(prep: Prep, old_and_new: tuple[ShardSet, Path]) -> None:
    shard_set, old = old_and_new
    replaced = shard_set.variant / "000000-0123abcd.tar"
    replaced.write_bytes(b"12345")
    with reading_variants({}):
        open_data_folder(str(shard_set.data), cache=None)
        readers = [Variant.open(shard_set.data, variant=name) for name in (old.name, None)]
    ran = prep("gc", "--data", shard_set.data)
    name = f"read by process {os.getpid()} on "
    assert f"kept       video/{old.name}: {name}" in ran.stdout
    assert f"kept       video/{shard_set.variant.name}: 1 file without a commit, {name}" in ran.stdout
    assert replaced.exists() and old.is_dir() and f"          {name}" in prep("status", "--data", shard_set.data).stdout
    assert rerun(prep, shard_set, *LEN, "--crf", "40")["freed_by_gc_bytes"] == 0, (
        "files that readers use must not be counted"
    )
    readers.clear()
    remove_unused_marks()
    assert rerun(prep, shard_set, *LEN, "--crf", "40")["freed_by_gc_bytes"] > 5
    prep("gc", "--data", shard_set.data)
    assert not replaced.exists() and not old.exists()


def test_a_variant_is_made_current_by_its_name(prep: Prep, old_and_new: tuple[ShardSet, Path]) -> None:
    shard_set, old = old_and_new
    new, data = shard_set.variant, ("--data", shard_set.data)
    assert f"current video: {old.name} (previously {new.name})" in prep("use", old.name, *data).stdout
    assert shard_set.variant == old
    assert f"there is no variant x in {shard_set.data}" in prep("use", "x", *data, status=2).error
    next(new.glob("*.tar")).unlink()
    error = prep("use", new.name, "--column", "video", *data, status=2).error
    assert f"{new.name} of video cannot be read: shard 00000" in error
    assert shard_set.variant == old
