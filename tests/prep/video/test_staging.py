"""Tests of copies of remote sources: a node fetches each once, within a limit, and removes copies that nobody needs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.video import staging
from clipmill.prep.video.span_task import StagedSources
from tests.conftest import ROOT
from tests.object_storage.faults import Fault, Faults
from tests.prep.running import wait_until

# Program that reads URLs from its input, uses these sources one after another, and prints the paths.
USE = """
import sys
from clipmill.prep.video.span_task import StagedSources
with StagedSources(limit_bytes=int(sys.argv[1])) as sources:
    for line in sys.stdin:
        print(sources.path_of(line.strip()), flush=True)
"""
SIZE = 100_000


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a node's copies."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(staging, "_WAIT_S", 0.02)
    yield tmp_path / f"sources-clipmill-{os.geteuid()}"
    leave()


def leave() -> None:
    """Stop using the copies, as a process does when it exits."""
    if staging._locked_root is not None:
        os.close(staging._locked_root[2])
        staging._locked_root = None


@pytest.fixture
def urls(bucket: str) -> list[str]:
    """Upload three objects of SIZE bytes."""
    objects = open_objects(bucket)
    for number in range(3):
        objects.write(f"{number}.mp4", bytes([number]) * SIZE)
    return [f"{bucket}/{number}.mp4" for number in range(3)]


@contextmanager
def other_worker(limit_bytes: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", USE, str(limit_bytes)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def ask(process: "subprocess.Popen[str]", url: str) -> Path:
    assert process.stdin is not None and process.stdout is not None
    print(url, file=process.stdin, flush=True)
    return Path(process.stdout.readline().strip())


def copies(root: Path) -> set[int]:
    """Return the first byte of every copy."""
    return {path.read_bytes()[0] for path in root.glob("objects/*") if len(path.name) == 32}


def test_a_copy_is_fetched_once_and_shared_by_processes(root: Path, urls: list[str], faults: Faults) -> None:
    with other_worker(10 * SIZE) as worker, StagedSources(limit_bytes=10 * SIZE) as sources:
        second_path = ask(worker, urls[1])
        faults.set()
        here = sources.path_of(urls[1])
        assert here == second_path and here.read_bytes() == b"\1" * SIZE
        assert sources.path_of(urls[1]) == here
        assert faults.seen().methods() == {"HEAD": 1}, "one check for changes, and no second download"
        assert root.stat().st_mode & 0o777 == 0o700


def test_waiting_for_the_fetch_of_another_worker(root: Path, urls: list[str], faults: Faults) -> None:
    faults.set(Fault("delay", method="GET", delay_s=1.0))
    paths_opened: list[Path] = []

    def fetch() -> None:
        with StagedSources(limit_bytes=10 * SIZE) as sources:
            paths_opened.append(sources.path_of(urls[1]))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths_opened)) == 1 and faults.seen().methods()["GET"] == 1


def test_unused_copies_make_room_the_oldest_first(root: Path, urls: list[str]) -> None:
    with StagedSources(limit_bytes=2 * SIZE) as sources, StagedSources(limit_bytes=2 * SIZE) as others:
        held = others.path_of(urls[0])
        sources.path_of(urls[1])
        sources.path_of(urls[2])
        assert copies(root) == {0, 2} and held.exists(), "the oldest copy is in use"
        others.release()
        sources.path_of(urls[1])
        assert copies(root) == {1, 2}


def test_a_worker_waits_for_room_and_holds_none_meanwhile(root: Path, urls: list[str]) -> None:
    with StagedSources(limit_bytes=SIZE) as holding, StagedSources(limit_bytes=SIZE) as waiting:
        holding.path_of(urls[0])
        thread = threading.Thread(target=waiting.path_of, args=(urls[1],))
        thread.start()
        time.sleep(0.2)
        assert copies(root) == {0}
        holding.release()
        thread.join(timeout=30)
        assert copies(root) == {1}


def test_a_source_larger_than_the_limit_is_a_failure_that_names_both(urls: list[str]) -> None:
    with StagedSources(limit_bytes=SIZE - 1) as sources, pytest.raises(SourceFailure) as caught:
        sources.path_of(urls[0])
    assert caught.value.code == "source_too_large" and not caught.value.is_lasting
    assert "100,000 bytes" in caught.value.message and "99,999" in caught.value.message
    assert "--scratch-size" in caught.value.message


def test_what_a_killed_worker_leaves_is_taken_over_or_removed(root: Path, urls: list[str], faults: Faults) -> None:
    with other_worker(10 * SIZE) as worker:
        ask(worker, urls[0])
        faults.set(Fault("hang", method="GET"))
        assert worker.stdin is not None
        print(urls[1], file=worker.stdin, flush=True)
        wait_until(lambda: list(root.glob("objects/.tmp-*")))
        with StagedSources(limit_bytes=10 * SIZE) as sources:
            sources.path_of(urls[0])
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            faults.set()
            assert sources.path_of(urls[1]).read_bytes() == b"\1" * SIZE, (
                "the reservation of a killed worker must expire"
            )
            assert not list(root.glob("locks/room-*")) and not list(root.glob("objects/.tmp-*"))
            (root / "notes.txt").touch()
    leave()
    wait_until(lambda: [path.name for path in root.iterdir()] == ["notes.txt"])


@pytest.mark.parametrize("is_killed", [False, True])
def test_copies_go_when_the_last_process_has_ended(root: Path, urls: list[str], is_killed: bool) -> None:
    with other_worker(10 * SIZE) as worker:
        ask(worker, urls[0])
        with StagedSources() as sources:
            sources.path_of(urls[1])
        leave()
        time.sleep(0.2)
        assert copies(root) == {0, 1}, "another process may need them"
        assert worker.stdin is not None
        if is_killed:
            worker.kill()
        else:
            worker.stdin.close()
        worker.wait()
        wait_until(lambda: not root.exists())


def test_without_a_sweeper_the_next_process_removes_them(root: Path, urls: list[str]) -> None:
    with StagedSources() as sources:
        sources.path_of(urls[0])
    staging._sweepers[-1].kill()
    staging._sweepers.pop().wait()
    leave()
    with StagedSources() as sources:
        sources.path_of(urls[1])
        assert copies(root) == {1}


def test_a_folder_of_somebody_else_is_refused(root: Path, urls: list[str]) -> None:
    root.mkdir(mode=0o755)
    with StagedSources() as sources, pytest.raises(SourceFailure, match="not a private folder"):
        sources.path_of(urls[0])
    root.rmdir()
    (private := root.with_name("elsewhere")).mkdir(mode=0o700)
    root.symlink_to(private)
    with StagedSources() as sources, pytest.raises(SourceFailure, match="not a private folder"):
        sources.path_of(urls[0])


@pytest.mark.usefixtures("few_retries")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("error", method="HEAD", path="0.mp4", status=404, code="NoSuchKey"), "source_missing"),
        (Fault("error", method="GET", path="0.mp4", status=403, code="AccessDenied"), "access_refused"),
        (Fault("cut", method="GET", path="0.mp4"), "io_error"),
    ],
)
def test_a_fetch_that_fails_leaves_nothing(
    root: Path, urls: list[str], faults: Faults, fault: Fault, code: str
) -> None:
    staging.objects_of.__globals__["_open_bucket"].cache_clear()
    faults.set(fault)
    with StagedSources() as sources:
        with pytest.raises(SourceFailure) as caught:
            sources.path_of(urls[0])
        assert caught.value.code == code
        assert not list(root.glob("objects/*")) and not list(root.glob("locks/room-*"))
        faults.set()
        assert sources.path_of(urls[0]).stat().st_size == SIZE


def test_an_object_that_changes_while_it_is_fetched_is_not_mixed(
    bucket: str, urls: list[str], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_RANGE_BYTES", SIZE // 4)
    faults.set(Fault("delay", method="GET", delay_s=0.5))
    results: list[object] = []

    def fetch() -> None:
        with StagedSources() as sources:
            try:
                results.append(sources.path_of(urls[0]).read_bytes())
            except SourceFailure as failure:
                results.append(str(failure.code))

    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: faults.seen().methods()["GET"])
    open_objects(bucket).write("0.mp4", b"\7" * SIZE)
    thread.join()
    assert results == ["source_changed"]


def test_a_full_disk_is_named(root: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with StagedSources() as sources:
        with monkeypatch.context() as patched, pytest.raises(SourceFailure) as caught:
            patched.setattr(os, "pwrite", full)
            sources.path_of(urls[0])
        assert caught.value.code == "disk_full"
        assert not list(root.glob("objects/*")) and not list(root.glob("locks/room-*"))
