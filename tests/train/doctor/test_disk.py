"""Disks: of which kind they are, and that looking at one leaves nothing behind."""

import os
from pathlib import Path

import pytest

from train.doctor.disk import examine_disk, file_system_of

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
32 31 8:1 / /nets/team/scratch rw - xfs /dev/sdb1 rw
31 22 0:50 / /nets/team rw,relatime shared:5 - nfs4 server:/export rw
33 22 0:51 / /nets/with\\040space rw - fuse.sshfs me@host: rw
34 22 0:52 / /host rw - virtiofs host rw
35 22 0:53 / /odd rw - fuse.something x rw
a line that is cut
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/srv/data", ("local", "ext4")),
        ("/nets/team/data", ("network", "nfs4")),
        ("/nets/team", ("network", "nfs4")),
        ("/nets/teams", ("local", "ext4")),
        ("/nets/team/scratch/data", ("local", "xfs")),
        ("/nets/with space/data", ("network", "fuse.sshfs")),
        ("/dev/shm/data", ("memory", "tmpfs")),
        ("/host/data", ("host", "virtiofs")),
        ("/odd/data", ("unknown", "fuse.something")),
    ],
)
def test_a_folder_lies_on_the_file_system_mounted_nearest(folder: str, expected: tuple[str, str]) -> None:
    assert file_system_of(Path(folder), MOUNTS) == expected


def test_without_a_list_of_mounts_nothing_is_claimed() -> None:
    assert file_system_of(Path("/data"), "") == ("unknown", None)


def test_the_current_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    disk = examine_disk(tmp_path, is_data=False)
    assert disk.problem is None and disk.free_bytes and disk.file_system
    assert disk.write_bytes_per_s and disk.read_bytes_per_s and disk.piece_ms is not None
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_is_only_read(tmp_path: Path) -> None:
    variant = tmp_path / "video" / "h264-1234"
    variant.mkdir(parents=True)
    tar = variant / "000000-1234.tar"
    tar.write_bytes(os.urandom(1 << 20))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    disk = examine_disk(tmp_path, is_data=True)
    assert disk.read_bytes_per_s and disk.write_bytes_per_s is None and disk.problem is None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    assert "no shard" in (examine_disk(tmp_path, is_data=True).problem or "")
    assert "cannot be read" in (examine_disk(tmp_path / "nowhere", is_data=True).problem or "")
