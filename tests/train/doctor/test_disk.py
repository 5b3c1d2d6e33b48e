"""Disks: their kind is recognized, and the measurement leaves no file."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clipmill.train.doctor.machine import examine_disk, file_system_of
from tests.tiers import nightly_beyond

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
    assert disk.speed and disk.speed.write_bytes_per_s and disk.speed.read_bytes_per_s and disk.speed.piece_ms > 0
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_is_only_read(tmp_path: Path) -> None:
    variant = tmp_path / "video" / "h264-1234"
    variant.mkdir(parents=True)
    tar = variant / "000000-1234.tar"
    tar.write_bytes(os.urandom(1 << 20))
    (tmp_path / "scores" / "cut27-1234").mkdir(parents=True)
    (tmp_path / "scores" / "cut27-1234" / "000000-1234.tar").write_bytes(bytes(10_240))  # too small to be measured
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    disk = examine_disk(tmp_path, is_data=True)
    assert disk.speed and disk.speed.read_bytes_per_s and disk.speed.write_bytes_per_s is None
    assert disk.problem is None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def problem(folder: Path, *, is_data: bool) -> tuple[str, str]:
    problem_found = examine_disk(folder, is_data=is_data).problem
    assert problem_found is not None
    return problem_found.level, problem_found.what


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    assert problem(tmp_path, is_data=True)[0] == "note"
    level, what = problem(tmp_path / "nowhere", is_data=True)
    assert level == "broken" and "cannot be read: No such file" in what


def _without_rights() -> list[str]:
    """Return a command prefix that removes root's permission to read any file."""
    if os.geteuid() != 0:
        return []
    command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if shutil.which("setpriv") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("root can read any file, and setpriv cannot drop this permission here")
    return command


@pytest.mark.parametrize(
    "closed",
    nightly_beyond(
        [".", "video/h264-1234/000000-1234.tar"], [".", "video", "video/h264-1234", "video/h264-1234/000000-1234.tar"]
    ),
)
def test_data_that_this_user_may_not_read_is_not_taken_for_none(tmp_path: Path, closed: str) -> None:
    data = tmp_path / "data"
    for variant in ("latents/sd-1234", "text/clip-1234", "video/h264-1234"):
        (data / variant).mkdir(parents=True)
    (data / "video/h264-1234/000000-1234.tar").write_bytes(bytes(1 << 20))
    (data / "lost+found").mkdir(mode=0)
    program = "import sys; from pathlib import Path; from clipmill.train.doctor.machine import examine_disk\n"
    program += (
        "found = examine_disk(Path(sys.argv[1]), is_data=True).problem; print(found and (found.what, found.hint))"
    )
    command = [*_without_rights(), sys.executable, "-c", program, str(data)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None\n"
    (data / closed).chmod(0)
    stdout = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (data / closed).chmod(0o700)
    what = f"cannot be read: Permission denied ({data / closed})"
    assert stdout == f"{(what, 'give this user read permission')}\n"


def test_a_disk_that_takes_no_file_is_told_from_one_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = ("warning", "the disk is full")
    for code, (level, words) in (
        *((errno.EDQUOT, full), (errno.ENOSPC, full)),
        (errno.EROFS, ("note", "not measured: Read-only")),
    ):
        error = OSError(code, os.strerror(code), str(tmp_path))

        def refuse(*, refusal: OSError = error, **_: object) -> None:
            raise refusal

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
        problem_found = problem(tmp_path, is_data=False)
        assert problem_found[0] == level and words in problem_found[1]
