"""Tests of files that do not respond: only their readers get an error, and no other reader waits."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipmill.shards import opening
from clipmill.shards.index import open_index
from clipmill.shards.opening import DamagedIndex, open_regular, scan
from clipmill.shards.tars import LocalTars

LEASE_HOLDER = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
for path in sys.argv[1:]:
    fcntl.fcntl(os.open(path, os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a program with leases on files:

    `open` blocks until the program ends, as on a dead mount.
    """
    holders: list[subprocess.Popen[str]] = []

    def start(*paths: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", LEASE_HOLDER, *map(str, paths)]
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != "held\n":
            pytest.skip("this file system does not support leases")
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def make_files(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    return paths


def test_a_pipe_is_no_tar(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.tar")
    with pytest.raises(OSError, match="not a regular file"):
        LocalTars().read(tmp_path / "0.tar", 0, 1)
    with pytest.raises(OSError, match="not a regular file"):
        scan(tmp_path / "0.tar")
    with pytest.raises(DamagedIndex, match="not a regular file"):
        open_index(tmp_path / "0.tar")
    with pytest.raises(OSError, match="this path is a folder"):
        LocalTars().read(tmp_path, 0, 1)


def test_others_are_read_while_one_open_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    dead, alive, late = make_files(tmp_path, "dead", "alive", "late")
    tars = LocalTars()
    holder = hold(dead, late)
    monkeypatch.setattr(opening, "OPEN_LIMIT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"opening timed out after 0\.2 s"):
        tars.read(late, 0, 4)
    # A later read does not wait again while the thread of the file is blocked, and no second thread is started.
    monkeypatch.setattr(opening, "OPEN_LIMIT_S", 3600.0)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            tars.read(late, 0, 4)
    assert sum(thread.name == "open late" for thread in threading.enumerate()) == 1
    outcomes: list[object] = []

    def want(path: Path) -> None:
        try:
            outcomes.append(tars.read(path, 0, 4))
        except OSError as error:
            outcomes.append(error)

    waiting = [threading.Thread(target=want, args=(dead,), daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    while not any(thread.name == "open dead" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert tars.read(alive, 0, 5) == b"alive" and not outcomes
    assert sum(thread.name == "open dead" for thread in threading.enumerate()) == 1
    holder.kill()
    for thread in waiting:
        thread.join(60)
    assert outcomes == [b"dead"] * 3
    while late in opening._blocked:
        time.sleep(0.01)
    assert tars.read(late, 0, 4) == b"late"


def test_a_folder_keeps_no_more_than_a_few_threads_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    for name in ("dead", "alive"):
        (tmp_path / name).mkdir()
    paths = make_files(tmp_path / "dead", *map(str, range(20)))
    [other] = make_files(tmp_path / "alive", "x")
    hold(*paths)
    monkeypatch.setattr(opening, "OPEN_LIMIT_S", 0.05)
    before = threading.active_count()
    for path in paths:
        with pytest.raises(TimeoutError):
            open_regular(path)
    assert threading.active_count() - before <= opening._MAX_BLOCKED
    os.close(open_regular(other))


def test_a_blocked_open_does_not_keep_the_program_from_ending(
    tmp_path: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    [dead] = make_files(tmp_path, "dead")
    hold(dead)
    script = (
        "import sys; from pathlib import Path; from shards import opening\n"
        "opening.OPEN_LIMIT_S = 0.1\n"
        "try:\n    opening.open_regular(Path(sys.argv[1]))\n"
        "except TimeoutError as error:\n    print(error.strerror)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(dead)], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0 and "does not respond" in ran.stdout, ran.stderr
