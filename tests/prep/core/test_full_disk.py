"""Tests of a full and of a read-only disk, with real file systems of a few megabytes."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipmill.shards.dataset import current_variant
from clipmill.shards.format import COMMIT_TABLE_FILE
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import Variant
from clipmill.shards.verify import verify_shard
from tests.prep.running import chunk, contents, manifest, prep_here

SETTINGS = ("--len", "1s", "--gop", "intra", "--crf", "1")
DISK_BYTES = 448 << 10


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for one shard but not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    """Write two videos, one per shard."""
    folder = tmp_path_factory.mktemp("videos")
    for number, name in enumerate("ab"):
        write_video(folder / f"{name}.mp4", seconds=20, first_number=1000 * number)
    return folder


@pytest.fixture(scope="module")
def undisturbed_files(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    data = tmp_path_factory.mktemp("undisturbed")
    manifest(data, videos)
    assert chunk(data, *SETTINGS)["num_shards"] == 2
    tars = [path.stat().st_size for path in data.glob("video/*/*.tar")]
    assert max(tars) + 100_000 < DISK_BYTES < sum(tars), "one shard must fit on the disk, but two must not"
    return contents(data)


def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_there_is_room(
    disk: Path, videos: Path, undisturbed_files: dict[str, str]
) -> None:
    data = disk / "data"
    manifest(data, videos)
    summary = chunk(data, *SETTINGS, status=1)
    assert summary["failures"] == {"disk_full": summary["num_failed_videos"]}
    folder = data / "video" / summary["variant"]
    committed = Variant(folder)
    assert len(committed.commits) < 2
    assert [p for commit in committed.commits.values() for p in verify_shard(folder, commit)] == []
    named = {name for shard in committed.shards() for name in (shard.tar_path.name, shard.index_path.name)}
    files = {path.name for path in folder.iterdir() if path.name.endswith((".tar", ".arrow"))}
    assert files - {CHUNKS_FILE, COMMIT_TABLE_FILE} == named
    assert list(folder.glob(".tmp-*")) == []
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    summary = chunk(data, *SETTINGS)
    assert summary["num_encoded"] == 40 - 20 * len(committed.commits) and summary["failures"] == {}
    assert contents(data) == undisturbed_files


def next_step(data: Path) -> str:
    return prep_here("status", "--data", data).stdout.splitlines()[-1]


def test_full_scratch_space_is_named_and_loses_nothing(
    disk: Path, videos: Path, tmp_path: Path, undisturbed_files: dict[str, str]
) -> None:
    data = tmp_path / "data"
    manifest(data, videos)
    (disk / "ballast").write_bytes(bytes(DISK_BYTES - 4096))
    summary = chunk(data, *SETTINGS, status=1, TMPDIR=str(disk))
    assert summary["failures"] == {"disk_full": 2} and summary["num_chunks"] == 0, summary
    assert next_step(data).startswith("next      prep chunk --len 1s ")
    assert [path.name for path in disk.iterdir()] == ["ballast"]
    summary = chunk(data, *SETTINGS)
    assert summary["num_encoded"] == 40
    assert contents(data) == undisturbed_files


def test_a_read_only_data_folder_is_the_users_to_mend(disk: Path, videos: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    data = disk / "data"
    manifest(data, videos)
    chunk(data, *SETTINGS)
    before, current = contents(data), current_variant(data, "video")
    shutil.rmtree(data / "layout")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    error = prep_here("chunk", "--data", data, *SETTINGS[:-1], "30", "--engine", "processes", status=2).error
    assert str(data) in error and "Read-only" in error
    assert current_variant(data, "video") == current
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert chunk(data, *SETTINGS)["num_encoded"] == 0
    assert contents(data) == before
