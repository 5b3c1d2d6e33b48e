"""Tests of the interposer: the operations it detects, and the faults it injects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.torture.commands import INTERPOSER
from tests.torture.interposer import watch
from tests.torture.watched import not_yet_on_the_disk

# The programs cover all kinds of writes. One write is in a child process, which must detect that it is watched.
PROGRAM = """
import os, shutil, subprocess, sys, tempfile
from pathlib import Path
from clipmill.manifests.publish import publish_bytes

os.chdir(sys.argv[1])
Path("folder").mkdir()
Path("folder").mkdir(exist_ok=True)
publish_bytes(Path("folder/published"), b"whole")
with open("lines.txt", "a", encoding="utf-8") as file:
    file.write("one line\\n")
descriptor = os.open("raw", os.O_RDWR | os.O_CREAT)
os.pwrite(descriptor, b"some", 0)
os.ftruncate(descriptor, 2)
os.close(descriptor)
shutil.copyfile("raw", "copied")
os.link("raw", "linked")
shutil.rmtree(Path(tempfile.mkdtemp(dir="folder")))
Path("missing").unlink(missing_ok=True)
subprocess.run([sys.executable, "-c", "open('child', 'wb').write(b'of a child')"], check=True)
os.remove("linked")
"""
TABLE_PROGRAM = """
import os, sys
import pyarrow as pa, pyarrow.parquet as pq
os.chdir(sys.argv[1])
pq.write_table(pa.table({"a": [1]}), "table.parquet")
assert pq.read_table("table.parquet")["a"].to_pylist() == [1]
"""
POINTS = """
driver mkdir:folder#1
driver open:folder/.tmp-*-published#1
driver write:folder/.tmp-*-published#1
driver fsync:folder/.tmp-*-published#1
driver rename:folder/published#1 < folder/.tmp-*-published
driver fsync:folder#1
driver open:lines.txt#1
driver write:lines.txt#1
driver open:raw#1
driver write:raw#1
driver truncate:raw#1
driver open:copied#1
driver write:copied#1
driver link:linked#1 < raw
driver mkdir:folder/tmp*#1
driver rmdir:folder/tmp*#1
worker open:child#1
worker write:child#1
driver unlink:linked#1
"""


def run(folder: Path, program: str = PROGRAM, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run the program in a watched folder."""
    for name in ("watched", "flags"):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{INTERPOSER}{os.pathsep}{ROOT}",
        watch.WATCH: f"={folder / 'watched'}",
        watch.FLAGS: str(folder / "flags"),
        watch.LOG: str(folder / "log"),
        **settings,
    }
    words = [sys.executable, "-c", program, str(folder / "watched")]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


def test_every_operation_on_a_watched_folder_is_seen(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "log").read_text() == POINTS.lstrip()


def test_arrows_writes_of_tables_are_seen(tmp_path: Path) -> None:
    ran = run(tmp_path, TABLE_PROGRAM)
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:2] == ["driver open:table.parquet#1", "driver write:table.parquet#1"] and len(lines) > 3


@pytest.mark.parametrize("point", ["write:raw#1", "fsync:folder#1", "mkdir:folder/tmp*#1"])
def test_an_operation_fails_once_as_the_system_has_it(tmp_path: Path, point: str) -> None:
    ran = run(tmp_path, **{watch.POINT: point, watch.FAULT: "enospc"})
    assert ran.returncode == 1
    assert "OSError: [Errno 28] No space left on device" in ran.stderr
    assert (tmp_path / "flags" / "fault").exists()


@pytest.mark.parametrize(
    ("point", "fault", "left"),
    [
        ("write:raw#1", "cut", {"raw": b"so"}),
        ("write:raw#1", "kill", {"raw": b""}),
        ("write:raw#1", "kill-after", {"raw": b"some"}),
        ("rename:folder/published#1", "kill-after", {"folder/published": b"whole"}),
        ("write:child#1", "kill", {"child": b""}),
    ],
)
def test_a_process_is_killed_there(tmp_path: Path, point: str, fault: str, left: dict[str, bytes]) -> None:
    assert run(tmp_path, **{watch.POINT: point, watch.FAULT: fault}).returncode == -9
    for name, content in left.items():
        assert (tmp_path / "watched" / name).read_bytes() == content
    assert (tmp_path / "log").read_text().splitlines()[-1].split(" < ")[0].endswith(point)


def test_only_the_worker_is_killed_where_that_is_asked_for(tmp_path: Path) -> None:
    ran = run(tmp_path, **{watch.POINT: "write:child#1", watch.FAULT: "kill-worker"})
    assert ran.returncode == 1 and "CalledProcessError" in ran.stderr


def test_a_short_write_is_gone_on_with(tmp_path: Path) -> None:
    ran = run(tmp_path, **{watch.POINT: "write:folder/.tmp-*-published#1", watch.FAULT: "short"})
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "watched" / "folder" / "published").read_bytes() == b"whole"
    assert "driver write:folder/.tmp-*-published#2" in (tmp_path / "log").read_text().splitlines()


def test_a_name_that_is_given_before_the_bytes_are_on_the_disk_is_found() -> None:
    lines = ["driver write:a#1", "driver write:b/c#1", "driver fsync:a#1", "driver rename:d#1 < a"]
    assert not_yet_on_the_disk(lines) == []
    assert not_yet_on_the_disk([*lines, "worker rename:e#1 < b"]) == ["e (written as b/c)"]
    assert not_yet_on_the_disk([*lines, "worker fsync:b/c#1", "worker rename:e#1 < b"]) == []
