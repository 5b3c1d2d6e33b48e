"""Tests of SIGKILL at any moment: nothing is left over, and the next run ends with the bytes of an undisturbed run."""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from clipmill.prep.engines.ray import running_processes
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.dataset import current_variant
from tests.prep.running import (
    MARK,
    Process,
    Ran,
    chunk,
    contents,
    manifest,
    processes,
    running,
    start,
    wait_until,
    wait_until_none,
)
from tests.tiers import nightly_beyond

FIRST = ("--len", "500ms", "--preset", "ultrafast", "--short-side", 32)
# Settings of the variant whose run is killed. It has the same number of chunks.
SECOND = ("--len", "500ms", "--preset", "medium", "--fps", "60", "--short-side", 64)

NUM_CHUNKS = {"000000": 20, "000001": 8, "000002": 20, "000003": 8}

# ffmpeg wrapper whose encoder passes, one per shard, wait at a named pipe (gate) until the test opens it. No run can
# end before the test has inspected it, however busy the machine is.
GATED = """#!/bin/sh
case "$*" in *-progress*)
    mkfifo "{gates}/$$"
    read -r _ < "{gates}/$$";;
esac
exec "{ffmpeg}" "$@"
"""


@dataclass(frozen=True)
class Job:
    """Data folder with one complete variant, in which a second one is to be made."""

    videos: Path
    data: Path
    scratch: Path
    gates: Path
    mark: str
    first: str

    def start(self, engine: str) -> "subprocess.Popen[str]":
        arguments = ("chunk", "--data", self.data, "--json", "--engine", engine, "--workers", 2, *SECOND)
        environment = {"TMPDIR": str(self.scratch), "RAY_TMPDIR": "/tmp", MARK: self.mark}
        return start(*arguments, CLIPMILL_FFMPEG=str(self.gates / "ffmpeg"), **environment)

    def finish(self, process: "subprocess.Popen[str]") -> Ran:
        stdout, stderr = process.communicate(timeout=120)
        return Ran(process.returncode, stdout, stderr)

    def ffmpegs(self) -> list[Process]:
        """Return the encoder passes, including the ones that wait; each has created a gate."""
        workers = (running(int(path.name)) for path in self.gates.iterdir() if path.name.isdigit())
        return [process for process in workers if process is not None and "-progress" in process.arguments]

    def let_go(self, ffmpeg: Process) -> bool:
        """Open the gate of an encoder pass.

        Return False if the pass has not reached the gate yet, or is already past it.
        """
        try:
            with os.fdopen(os.open(self.gates / str(ffmpeg.pid), os.O_WRONLY | os.O_NONBLOCK), "wb", 0) as gate:
                gate.write(b"\n")
        except OSError:
            return False
        return True

    def workers(self) -> list[Process]:
        """Return the encoders and the processes that may start one."""
        names = ("-progress", "ray::chunk", "multiprocessing.spawn")
        all_processes = processes(self.mark)
        return [process for process in all_processes if any(name in " ".join(process.arguments) for name in names)]

    def agents(self) -> list[Path]:
        """Return the /proc folders of processes started by Ray's raylet.

        Ray's agents overwrite the mark in their environment.
        """
        raylets = {process.pid for process in processes(self.mark) if process.arguments[0].endswith("/raylet")}
        return [Path("/proc", str(pid)) for pid, parent, _ in running_processes() if parent in raylets]

    def commits(self) -> list[Path]:
        """Return the commits of the other variant.

        The temporary name of an unfinished commit starts with a dot.
        """
        commit_paths = self.data.glob("video/*/commits/[!.]*.json")
        return [path for path in commit_paths if path.parent.parent.name != self.first]


@pytest.fixture(scope="module")
def begun_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two shards of video a and two of video b, with the chunks in `NUM_CHUNKS`."""
    root = tmp_path_factory.mktemp("killed")
    for number, name in enumerate("ab"):
        FrameNumberVideo(num_frames=420, fps=Fraction(30), width=160, height=120, first_number=1000 * number).write(
            root / f"videos/{name}.mp4"
        )
    manifest(root / "begun", root / "videos")
    chunk(root / "begun", *FIRST)
    return root / "begun"


@pytest.fixture(scope="module")
def undisturbed_files(begun_data: Path) -> dict[str, str]:
    """Return the digests of the complete data folder after an undisturbed run."""
    data = begun_data.with_name("undisturbed")
    shutil.copytree(begun_data, data)
    assert chunk(data, *SECOND)["num_encoded"] == 56
    return contents(data)


@pytest.fixture
def job(begun_data: Path, tmp_path: Path) -> Iterator[Job]:
    data, scratch, gates = tmp_path / "data", tmp_path / "scratch", tmp_path / "gates"
    shutil.copytree(begun_data, data)
    scratch.mkdir()
    gates.mkdir()
    (gates / "ffmpeg").write_text(GATED.format(gates=gates, ffmpeg=find_ffmpeg().path))
    (gates / "ffmpeg").chmod(0o755)
    first = current_variant(data, "video")
    assert first is not None
    job = Job(begun_data.parent / "videos", data, scratch, gates, secrets.token_hex(8), first)
    yield job
    for left in processes(job.mark):
        left.kill()


ENGINES = {"processes": "processes", "processes at all moments": "processes", "ray": "ray"}


@pytest.mark.parametrize("name", nightly_beyond(["processes"], ENGINES))
def test_a_killed_run_leaves_no_process_and_a_task_of_the_next_outlives_its_worker_but_not_each_of_its_workers(
    name: str, job: Job, undisturbed_files: dict[str, str]
) -> None:
    """In the next run, the workers of video a are killed every time, and one worker of video b is killed once."""
    engine = ENGINES[name]
    for num_passes, moment in moments(job, name):
        process = job.start(engine)
        _await(moment, job, process, num_passes=num_passes)
        assert process.poll() is None, f"the run ended before it could be killed: {process.communicate()}"
        for ffmpeg in job.ffmpegs():
            with suppress(ProcessLookupError):
                os.kill(ffmpeg.pid, signal.SIGSTOP)  # so that it cannot finish
        agents = job.agents()
        assert bool(agents) == (engine == "ray")
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        wait_until_none(job.workers, seconds=40)
        wait_until_none(partial(_still_there, agents), seconds=30)  # Ray itself would stop them only after a minute
        assert current_variant(job.data, "video") == job.first, "an unfinished variant became the current one"
    assert job.commits()
    for path in job.commits():
        if path.stem in {"000001", "000003"}:  # as after an earlier kill: each video has a shard left to make
            path.unlink()
    done = {path.stem for path in job.commits()}
    a, b = {"000000", "000001"} - done, {"000002", "000003"} - done

    process = job.start(engine)
    killed: list[str] = []
    while process.poll() is None:
        for ffmpeg in job.ffmpegs():
            video = next((name for name in "ab" if f"file:{job.videos}/{name}.mp4" in ffmpeg.arguments), None)
            if video == "a" or (video == "b" and "b" not in killed):
                killed.append(video)
                os.kill(ffmpeg.parent, signal.SIGKILL)
                wait_until(partial(_has_gone, ffmpeg, job))
            else:
                job.let_go(ffmpeg)
        time.sleep(0.02)
    ran = job.finish(process)
    assert ran.status == 1, ran.stderr
    assert killed.count("a") == 3 * len(a) and killed.count("b") == 1, (killed, a, b, ran)
    assert ran.summary["failures"] == {"worker_lost": len(a)}
    assert ran.summary["num_encoded"] == sum(map(NUM_CHUNKS.__getitem__, b))
    assert {path.stem for path in job.commits()} == done | b
    assert list(job.data.glob("video/*/.tmp-*")) == []
    assert list(job.scratch.glob("clipmill-*")) == []
    assert current_variant(job.data, "video") == job.first
    assert chunk(job.data, *SECOND)["num_encoded"] == sum(map(NUM_CHUNKS.__getitem__, a))
    assert contents(job.data) == undisturbed_files
    assert current_variant(job.data, "video") != job.first


def moments(job: Job, name: str) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield the conditions for killing the run, each with the number of encoders that may pass the gate before."""
    if name == "ray":
        yield 1, job.commits
        return
    yield 0, job.workers  # workers that have a task and are still importing
    if name != "processes":
        yield 0, job.ffmpegs
        # By the time of the first commit, the third chunk may have appeared and disappeared between two checks.
        yield 1, lambda: job.commits() or any(Path(f"/proc/{p.pid}/cwd/000002.mp4").exists() for p in job.ffmpegs())
    yield 1, lambda: job.commits() and job.ffmpegs()


def _still_there(folders: list[Path]) -> list[Path]:
    return [folder for folder in folders if folder.exists()]


def _await(moment: Callable[[], object], job: Job, process: "subprocess.Popen[str]", *, num_passes: int) -> None:
    passed: list[Process] = []

    def has_come_or_ended() -> bool:
        if len(passed) < num_passes:
            passed.extend(islice((ffmpeg for ffmpeg in job.ffmpegs() if job.let_go(ffmpeg)), 1))
        return bool(moment()) or process.poll() is not None

    wait_until(has_come_or_ended, seconds=120)


def _has_gone(process: Process, job: Job) -> bool:
    return process.pid not in {other.pid for other in job.ffmpegs()}


def test_an_interrupted_run_says_that_nothing_is_lost_and_leaves_no_process(
    job: Job, undisturbed_files: dict[str, str]
) -> None:
    process = job.start("processes")
    wait_until(job.ffmpegs)
    process.send_signal(signal.SIGINT)
    ran = job.finish(process)
    assert ran.status == 130 and "finished work is kept; this run has finished " in ran.stderr
    wait_until_none(job.workers, seconds=40)
    chunk(job.data, *SECOND)
    assert contents(job.data) == undisturbed_files
