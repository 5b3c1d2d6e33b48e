"""Tests of scratch space: the leftovers of killed workers are removed, and nothing else is."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clipmill.prep.video.worker import scratch_folder
from tests.conftest import ROOT

HOLD = (
    "from clipmill.prep.video.worker import scratch_folder\nwith scratch_folder() as f: print(f, flush=True); input()"
)
# Program that forks a worker for each moment; the worker exits just before its n-th call that changes the file system.
# The first worker that completes is the last one.
KILLED = """
import os, pathlib, sys
from clipmill.prep.video.worker import remove_abandoned, scratch_folder

def work(left):
    def counted(event, arguments):
        nonlocal left
        flags = arguments[2] if event == "open" else 0
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in ("os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree", "fcntl.flock"):
            left -= 1
            if left < 0:
                os._exit(9)
    sys.addaudithook(counted)
    with scratch_folder() as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "bytes").write_bytes(b"1")
    os._exit(0)

for moment in range(100):
    if not (child := os.fork()):
        work(moment)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    remove_abandoned()
    assert os.listdir(sys.argv[1]) == [], f"killed at change {moment}"
    if status == 0:
        print(moment)
        break
    assert status == 9, status
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set $TMPDIR."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def root_of(place: Path) -> Path:
    return place / f"scratch-clipmill-{os.geteuid()}"


@contextmanager
def worker() -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    yield process, Path(process.stdout.readline().strip())
    process.communicate("\n")


def test_scratch_of_a_killed_worker_goes_and_that_of_a_living_one_stays(place: Path) -> None:
    foreign = place / "clipmill-notes"
    foreign.write_text("a file of somebody's")
    with worker() as (killed, killed_folder), worker() as (_, living_folder):
        assert killed_folder.is_dir() and living_folder.is_dir()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with scratch_folder() as folder:
            (folder / "bytes").write_bytes(b"1")
            assert not killed_folder.exists() and living_folder.is_dir()
            assert living_folder.parent == folder.parent == root_of(place)
            assert root_of(place).stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == [foreign]


def test_what_somebody_else_made_is_never_touched(place: Path) -> None:
    with worker() as (killed, folder):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        copied = root_of(place) / "0123456789ab"
        shutil.copytree(folder, copied)
    kept = {
        place / "clipmill-mine": None,
        place / "clipmill-demo" / "video": None,
        place / "clipmill-0123abcd" / "clipmill-scratch.json": folder_marker("clipmill-0123abcd"),
        root_of(place) / "aaaaaaaaaaaa" / "work": None,
        root_of(place) / "mine" / "clipmill-scratch.json": folder_marker("mine"),
        root_of(place) / "cccccccccccc" / "clipmill-scratch.json": json.dumps({"program": "another"}),
        root_of(place) / "dddddddddddd" / "clipmill-scratch.json": "[" * 100_000,
        root_of(place) / "eeeeeeeeeeee.json": "[1]",
        root_of(place) / "notes.json": "mine",
    }
    for path, content in kept.items():
        if content is None:
            path.mkdir(parents=True)
            (path / "bytes").write_bytes(b"1")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    (root_of(place) / "bbbbbbbbbbbb").symlink_to(place / "clipmill-mine")
    with scratch_folder():
        assert not folder.exists()
    assert all(path.exists() for path in kept)
    assert (copied / "clipmill-scratch.json").exists(), "a copy has the marker of another folder"
    assert (place / "clipmill-mine" / "bytes").exists() and (root_of(place) / "bbbbbbbbbbbb").is_symlink()


def folder_marker(name: str) -> str:
    return json.dumps({"program": "clipmill", "format": 1, "folder": name, "run": ""})


def test_a_worker_that_is_killed_at_any_moment_leaves_what_the_next_one_removes(place: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, place], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 10


@pytest.mark.parametrize("make", [lambda root: root.mkdir(mode=0o755), lambda root: root.symlink_to("/")])
def test_a_folder_that_others_can_reach_is_refused(place: Path, make: Callable[[Path], None]) -> None:
    make(root_of(place))
    with pytest.raises(OSError, match=r"scratch-clipmill"), scratch_folder():
        pass
