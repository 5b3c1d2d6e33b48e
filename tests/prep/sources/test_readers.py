"""Tests of the processes that read sources: a kill, a delay or a memory shortage affects only the source at fault."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.engines import MAX_TRIES
from clipmill.prep.engines.processes import ProcessEngine
from clipmill.prep.sources import access, probe_processes
from clipmill.prep.sources.access import SourceFacts, current_fingerprint
from clipmill.prep.sources.probe import probe
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan_inputs import PlanWithInputs, add_missing_shots, make_plan
from clipmill.shards.reader import Variant
from tests.conftest import ROOT
from tests.prep.running import chunk, manifest, wait_until
from tests.prep.scenes import RECIPE, write_scenes
from tests.prep.sources.test_sources import failures

# Program that holds a lease on a file: `open` in other processes waits until the lease is released (after 45 s at
# most).
HOLD = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def lease(path: Path) -> Iterator[None]:
    """Prevent other processes from opening a file within the block."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        yield
    finally:
        holder.kill()
        holder.communicate()


@pytest.fixture
def leasable(tmp_path: Path) -> Path:
    """Return a folder on a file system that supports leases."""
    path = tmp_path / "leasable"
    path.touch()
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            pytest.skip("this file system does not support leases")
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return tmp_path


def test_a_source_that_cannot_be_opened_holds_up_no_other_and_is_tried_again(
    leasable: Path, write_video: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    videos, data = leasable / "videos", leasable / "data"
    for number, name in enumerate(("a", "held", "z")):
        write_video(videos / f"{name}.mp4", seconds=1, first_number=100 * number)
    manifest(data, videos)
    monkeypatch.setattr(probe_processes, "SILENCE_LIMIT_S", 4.0)
    with lease(videos / "held.mp4"):
        chunk(data, "--len", "1s", status=1)
        assert failures(data) == {"held": "timeout"}
        assert {sample["__key__"] for sample in Variant.open(data).iterate()} == {"a_000000000", "z_000000000"}
    assert chunk(data, "--len", "1s")["num_encoded"] == 1


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGKILL, signal.SIGSEGV], None),
        ([signal.SIGKILL] * 3, FailureCode.WORKER_LOST),
        pytest.param([signal.SIGSEGV] * 3, FailureCode.PROBE_FAILED, marks=pytest.mark.nightly),
    ],
)
def test_a_source_whose_reader_is_killed_is_read_again_alone_and_fails_when_it_is_killed_there_too(
    signals: list[signal.Signals], code: FailureCode | None, leasable: Path, write_video: Callable[..., Path]
) -> None:
    paths = [write_video(leasable / f"{number}.mp4", seconds=1) for number in range(3)]
    outcomes: dict[int, SourceFacts | SourceFailure] = {}

    def read() -> None:
        outcomes.update(probe_processes.probe_each([*map(str, paths)], max_processes=2))

    with lease(paths[0]):
        reading = threading.Thread(target=read)
        reading.start()
        for signal_number in signals:
            end_waiting(signal_number, lambda: readers(os.getpid()))
    reading.join(timeout=60)
    assert isinstance(outcomes[1], SourceFacts) and isinstance(outcomes[2], SourceFacts)
    assert list(outcomes)[-1] == 0, "the source is read again after all other sources"
    outcome = outcomes[0]
    if code is None:
        assert isinstance(outcome, SourceFacts)
    else:
        assert isinstance(outcome, SourceFailure) and outcome.code == code and not outcome.is_lasting
        assert f"signal {signals[-1]}" in outcome.message


def test_a_killed_reader_does_not_change_the_shards_of_videos(leasable: Path, write_video: Callable[..., Path]) -> None:
    """In earlier versions, the run continued without the video, and a later run appended it in an additional shard."""
    for name in ("a", "b"):
        write_video(leasable / f"videos/{name}.mp4", seconds=1)
    recipe = resolve(Recipe(len="1s"), ffmpeg_version=find_ffmpeg().version)
    layouts: list[pa.Table] = []
    for data in (leasable / "undisturbed", leasable / "killed"):
        manifest(data, leasable / "videos")
        planning = threading.Thread(target=lambda data=data: layouts.append(make_plan(data, recipe).plan.layout))
        if data.name == "killed":
            with lease(leasable / "videos/a.mp4"):
                planning.start()
                end_waiting(signal.SIGKILL, lambda: readers(os.getpid()))
        else:
            planning.start()
        planning.join(timeout=60)
    assert len(layouts[0]) == 2 and layouts[0].equals(layouts[1])


def test_a_killed_detector_does_not_change_the_chunks_of_a_video(leasable: Path) -> None:
    path = write_scenes(leasable / "videos/video.mp4", [40, 50])
    manifest(leasable / "data", path.parent)
    plan = make_plan(leasable / "data", RECIPE)
    plans: list[PlanWithInputs] = []
    with lease(path):
        detecting = threading.Thread(target=lambda: plans.append(add_missing_shots(plan, ProcessEngine(num_workers=1))))
        detecting.start()
        for _ in range(MAX_TRIES):  # the number of times that an engine tries a task next to others
            end_waiting(signal.SIGKILL, lambda: [int(child.pid or 0) for child in multiprocessing.active_children()])
    detecting.join(timeout=60)
    assert plans[0].plan.num_chunks == 2 and not plans[0].plan.num_unusable


def end_waiting(by: signal.Signals, among: Callable[[], Iterable[int]]) -> None:
    """Kill one of some processes as soon as it waits for a lease."""
    waiting: list[int] = []

    def is_waiting() -> bool:
        waiting.extend(filter(waits_for_lease, among()))  # not every check finds the process
        return bool(waiting)

    wait_until(is_waiting)
    os.kill(waiting[0], by)
    wait_until(lambda: _has_ended(waiting[0]))


def readers(parent: int) -> list[int]:
    """Return the readers among the children of a process."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    children = [int(child) for task in tasks for child in _read_if_it_lives(task / "children").split()]
    return [child for child in children if b"probe_processes" in _read_if_it_lives(Path(f"/proc/{child}/cmdline"))]


def _read_if_it_lives(path: Path) -> bytes:
    """Read a file of a process or thread; return nothing if it has ended since it was listed."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def waits_for_lease(pid: int) -> bool:
    """Return True if a thread of a process waits inside the kernel for the release of a lease."""
    try:
        return any("break_lease" in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan"))
    except OSError:  # the process has ended
        return False


def test_a_reader_has_only_so_much_memory(
    tmp_path: Path, write_video: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = probe_processes._PROGRAM.replace(
        "serve()",
        "import clipmill.prep.sources.probe_processes as reader; reader.MEMORY_LIMIT_BYTES = 260 << 20; serve()",
    )
    monkeypatch.setattr(probe_processes, "_PROGRAM", program)
    wide, good = tmp_path / "wide.avi", write_video(tmp_path / "good.mp4", seconds=1)
    size = ["-f", "lavfi", "-i", "color=size=12000x12000:rate=1", "-frames:v", "1"]
    subprocess.run([find_ffmpeg().path, "-v", "error", *size, "-c:v", "mjpeg", wide], check=True)
    outcomes = dict(probe_processes.probe_each([str(wide), str(good)], max_processes=1))
    failed = outcomes[0]
    assert isinstance(failed, SourceFailure) and failed.code == FailureCode.OUT_OF_MEMORY, failed
    assert isinstance(outcomes[1], SourceFacts)


def test_a_span_whose_source_cannot_be_opened_any_more_is_given_up(
    leasable: Path, write_video: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(leasable / "v.mp4", seconds=1)
    fingerprint = current_fingerprint(path)
    assert fingerprint == probe(path).fingerprint
    monkeypatch.setattr(access, "STAT_LIMIT_S", 0.3)
    with lease(path), pytest.raises(SourceFailure) as caught:
        current_fingerprint(path)
    assert caught.value.code == FailureCode.TIMEOUT


def test_readers_do_not_outlive_the_driver(leasable: Path, write_video: Callable[..., Path]) -> None:
    path = write_video(leasable / "v.mp4", seconds=1)
    begin = "from clipmill.prep.sources.probe_processes import probe_each"
    program = f"{begin}; list(probe_each([{str(path)!r}], max_processes=1))"
    with lease(path):
        driver = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        wait_until(lambda: any(map(waits_for_lease, readers(driver.pid))))
        (reader,) = readers(driver.pid)
        driver.kill()
        assert driver.wait() == -signal.SIGKILL
        wait_until(lambda: _has_ended(reader))


def _has_ended(pid: int) -> bool:
    """Return True if a process has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
