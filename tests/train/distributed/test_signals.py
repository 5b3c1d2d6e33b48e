"""Ranks that are asked to stop or are killed: the other ranks stop, and the resumed run has the same result."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.conftest import ROOT
from tests.forks import Forks
from tests.train.distributed.conftest import slurm_environment
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import run_command, run_command_of_two, run_impatient_command
from tests.train.latents.columns import FLAGS
from tests.train.running import train, weights_of

TRAIN = ("dual-encoder", *FLAGS, "--batch", "8", "--warmup-steps", "2", "--device", "cpu", "--workers", "1")
# The run is long enough to be interrupted in the middle.
STEPS = ("--steps", "120", "--checkpoint-every", "30")


def is_running(process: subprocess.Popen[str]) -> Callable[[], bool]:
    return lambda: process.poll() is None


def wait_for(path: Path, *, num_lines: int, runs: Callable[[], bool]) -> None:
    while runs() and len(read_lines(path)) < num_lines:
        time.sleep(0.05)
    assert runs(), "the run ended before it could be stopped"


def test_a_run_that_is_stopped_and_then_loses_a_rank_goes_on_by_one_process(columns: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    metrics, checkpoints = RunFolder(out).metrics, RunFolder(out).checkpoints
    command = [*TRAIN, "--shards", str(columns), "--out", str(out)]
    num_steps = 50  # the signals are sent at step 5 and 10 steps later

    steps = ["--steps", str(num_steps), "--checkpoint-every", "10"]
    first, second = fork_ranks(run_command, *command, *steps, size=2, folder=tmp_path)
    wait_for(metrics, num_lines=5, runs=second.process.is_alive)
    second.process.terminate()
    ends = [rank.end(within_s=60) for rank in (first, second)]
    stderr_texts = [errors for _, errors in ends]
    assert [status for status, _ in ends] == [143, 143], stderr_texts
    (stopped_at,) = all_checkpoints(checkpoints)
    assert stopped_at == read_lines(metrics)[-1]["step"]
    assert all(f"stopped: step {stopped_at} is saved, continue with --resume" in stderr for stderr in stderr_texts)

    first, second = fork_ranks(run_command, *command, "--resume", size=2, folder=tmp_path)
    wait_for(metrics, num_lines=stopped_at + 10, runs=second.process.is_alive)
    second.process.kill()
    second.process.join()
    killed_s = time.monotonic()
    status, error = first.end(within_s=60)
    assert status == 1 and time.monotonic() - killed_s < 60
    assert "failed: rank 0 of 2 has lost another rank" in error and "--resume" in error
    assert "Traceback" not in error

    assert max(all_checkpoints(checkpoints)) > stopped_at
    assert train("dual-encoder", "--resume", "--out", out) == 0
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, num_steps + 1))


def test_a_frozen_rank_0_is_noticed_though_it_keeps_the_store(columns: Path, tmp_path: Path) -> None:
    """No launcher starts the ranks, so rank 0 hosts the store, and calls to the store of a frozen rank never return."""
    out = tmp_path / "run"
    command = [*TRAIN, "--shards", str(columns), "--out", str(out), "--steps", "100000"]
    first, second = fork_ranks(run_impatient_command, *command, size=2, folder=tmp_path)
    wait_for(RunFolder(out).metrics, num_lines=3, runs=second.process.is_alive)
    pid = first.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        status, error = second.end(within_s=60)
        assert status == 1, error
        assert "failed: the machine of rank 0 has not responded for 2 s, or its process is suspended" in error
        assert error.count("failed: ") == 1 and "rank 1 stops too" in error and "--resume" in error
        assert "Traceback" not in error
    finally:
        os.kill(pid, signal.SIGCONT)
    status, error = first.end(within_s=60)
    assert status == 1 and "failed: " in error and "Traceback" not in error


def test_a_rank_that_dies_before_the_first_collective_is_noticed(columns: Path, tmp_path: Path) -> None:
    """No launcher starts the ranks, so no agent ends the other rank."""
    command = [*TRAIN, "--shards", str(columns), "--out", str(tmp_path / "run"), "--steps", "100000"]
    first, second = fork_ranks(run_command_of_two, *command, size=2, folder=tmp_path)
    status, error = first.end(within_s=60)
    assert second.end(within_s=60)[0] == -signal.SIGKILL
    assert status == 1 and "failed: rank 1 has sent no heartbeat for 2 s; rank 0 stops too" in error, error
    assert "Traceback" not in error


def rank_1_of(out: Path) -> int:
    """Return the id of the process that torchrun started as rank 1 of a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            is_of_run = str(out).encode() in (folder / "cmdline").read_bytes().split(b"\0")
            if is_of_run and b"RANK=1" in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise AssertionError("there is no rank 1")


# The installed program, with the same shrunk model as the other ranks.
_INSTALLED = """
import runpy, sys
sys.path.insert(0, {root!r})
from tests.small_tiny import shrink
shrink()
sys.argv[0] = {program!r}
runpy.run_path({program!r}, run_name="__main__")
"""


def torchrun(folder: Path, *flags: str, python: Path, is_installed: bool) -> "subprocess.Popen[str]":
    """Launch `train` as documented, from a folder that contains a train.py of the user.

    Args:
        python: Python that runs torchrun and the ranks.
        is_installed: True to use the installed torchrun, and the installed program as rank 0 until a rank is
            killed.
            The other ranks do not have to prove that it works.
    """
    (folder / "train.py").write_text("raise SystemExit('the train.py of the user was run')\n")
    bin_dir, programs = Path(sys.executable).parent, folder / "bin"
    programs.mkdir()
    installed = ""
    if is_installed:
        (programs / "installed.py").write_text(_INSTALLED.format(root=str(ROOT), program=str(bin_dir / "train")))
        installed = (
            f'[[ "$RANK $TORCHELASTIC_RESTART_COUNT" == "0 0" ]] && exec {sys.executable} {programs}/installed.py "$@"'
        )
    (programs / "train").write_text(f'#!/bin/bash\n{installed}\nexec {python} -m clipmill.train.cli "$@"\n')
    (programs / "train").chmod(0o755)
    launcher = [bin_dir / "torchrun"] if is_installed else [python, "-m", "torch.distributed.run"]
    return subprocess.Popen(
        [*launcher, "--no-python", *flags],
        cwd=folder,
        env={**os.environ, "PATH": os.pathsep.join([str(programs), str(bin_dir), os.environ["PATH"]])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("is_installed", [False, True], ids=["forked", "installed"])
def test_torchrun_restarts_a_run_that_lost_a_rank_and_it_ends_as_if_nothing_had_happened(
    columns: Path, tmp_path: Path, forks: Forks, is_installed: bool
) -> None:
    """The folder contains a train.py of the user."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    flags = [*TRAIN, "--shards", str(columns), "--steps", "12", "--checkpoint-every", "4", "--resume", "auto"]
    launch = ["--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "127.0.0.1:0", "train"]
    process = torchrun(
        tmp_path, *launch, *flags, "--out", str(killed), python=forks.python(), is_installed=is_installed
    )
    checkpoints = RunFolder(killed).checkpoints
    try:
        # The programs take seconds to start.
        while process.poll() is None and not checkpoints.exists():
            time.sleep(0.05)
        # Nearly always, this is in the middle of writing the second checkpoint.
        while process.poll() is None and not (all_checkpoints(checkpoints) and list(checkpoints.glob(".tmp-step_*"))):
            time.sleep(0.005)
        assert process.poll() is None, "the run ended before a rank could be killed"
        os.kill(rank_1_of(killed), signal.SIGKILL)
        stderr, _ = process.communicate(timeout=600)
    finally:
        process.terminate()  # ends its ranks, too
    assert process.returncode == 0, stderr
    assert stderr.count("done: 12 steps") == 1 and stderr.count("attention: ") == 2, "the run was not restarted"
    end_well(fork_ranks(run_command, *flags, "--out", str(whole), size=2, folder=tmp_path))
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(killed).items())
    assert {path.name for path in checkpoints.iterdir()} == {
        path.name for path in RunFolder(whole).checkpoints.iterdir()
    }
    assert [line["step"] for line in read_lines(RunFolder(killed).metrics)] == list(range(1, 13))


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGUSR1], pytest.param([signal.SIGTERM, signal.SIGUSR1], marks=pytest.mark.nightly)],
    ids=["requeued", "resumed"],
)
def test_the_slurm_script_launches_one_torchrun_a_node(
    repository: Path, columns: Path, tmp_path: Path, forks: Forks, signals: list[signal.Signals]
) -> None:
    """SIGTERM saves a checkpoint. Near the time limit, the script also requeues the job."""
    out = tmp_path / "run"
    command = ["bash", "scripts/slurm_train.sh", *TRAIN, "--shards", str(columns), "--out", str(out), *STEPS]
    environment, requeued = slurm_environment(tmp_path, job=4711, python=forks.python()), tmp_path / "bin" / "requeued"
    stopped_at = 0
    for number in signals:
        process = subprocess.Popen(
            command, cwd=repository, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        wait_for(RunFolder(out).metrics, num_lines=stopped_at + 5, runs=is_running(process))
        process.send_signal(number)
        stderr, _ = process.communicate(timeout=90)
        assert process.returncode != 0
        before, (*older, stopped_at) = stopped_at, all_checkpoints(RunFolder(out).checkpoints)
        assert stopped_at > before and (older == [] or number == signal.SIGUSR1)
        assert f"stopped: step {stopped_at} is saved, run the same command again to continue" in stderr
        assert "torchrun raises the SignalException above when it stops" in stderr
        assert '"processes": "2, ddp"' in RunFolder(out).facts.read_text()
        # SLURM itself requeues a job that was canceled or preempted.
        assert requeued.exists() == (number == signal.SIGUSR1)
    assert requeued.read_text() == "4711\n"
    assert [line["step"] for line in read_lines(RunFolder(out).metrics)] == list(range(1, stopped_at + 1))
