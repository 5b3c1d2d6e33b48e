"""Ranks that are told to stop, and ranks that are killed: the others stop, and the run goes on to the same end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.distributed.conftest import launch, slurm_environment
from tests.train.test_latents_training import FLAGS, write_columns
from train.checkpoint import all_checkpoints
from train.run_folder import RunFolder, read_lines

TRAIN = ("dual-encoder", *FLAGS, "--batch", "8", "--warmup-steps", "2", "--device", "cpu", "--workers", "1")
# Long enough to be caught in the middle.
NUM_STEPS = 400
STEPS = ("--steps", str(NUM_STEPS), "--checkpoint-every", "20")


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_columns(tmp_path_factory.mktemp("columns"))


def wait_for(path: Path, *, num_lines: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and len(read_lines(path)) < num_lines:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def test_a_run_that_is_stopped_and_then_loses_a_rank_goes_on_by_one_process(
    repository: Path, columns: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    metrics, checkpoints = RunFolder(out).metrics, RunFolder(out).checkpoints
    program = [sys.executable, "-m", "train", *TRAIN, "--shards", str(columns), "--out", str(out)]

    ranks = launch([*program, *STEPS], repository=repository)
    wait_for(metrics, num_lines=5, process=ranks[1])
    ranks[1].send_signal(signal.SIGTERM)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [143, 143], said
    (stopped_at,) = all_checkpoints(checkpoints)
    assert stopped_at == read_lines(metrics)[-1]["step"]
    assert all(f"stopped: step {stopped_at} is saved, go on with --resume" in one for one in said)

    ranks = launch([*program, "--resume"], repository=repository)
    wait_for(metrics, num_lines=stopped_at + 25, process=ranks[1])
    ranks[1].kill()
    ranks[1].wait()
    killed_s = time.monotonic()
    _, error = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 1 and time.monotonic() - killed_s < 60
    assert "failed: rank 0 of 2 has lost another rank" in error and "--resume" in error
    assert "Traceback" not in error

    assert max(all_checkpoints(checkpoints)) > stopped_at
    subprocess.run([*program, "--resume"], cwd=repository, check=True, capture_output=True)
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, NUM_STEPS + 1))


def test_the_slurm_script_launches_one_torchrun_a_node(repository: Path, columns: Path, tmp_path: Path) -> None:
    """Its own line, under variables as SLURM sets them; SIGTERM to it saves, as a time limit that is near does."""
    out = tmp_path / "run"
    command = ["bash", "scripts/slurm.sh", *TRAIN, "--shards", str(columns), "--out", str(out), *STEPS]
    process = subprocess.Popen(
        command,
        cwd=repository,
        env=slurm_environment(tmp_path, job=4711),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(RunFolder(out).metrics, num_lines=5, process=process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    (stopped_at,) = all_checkpoints(RunFolder(out).checkpoints)
    assert f"stopped: step {stopped_at} is saved" in said
    assert '"processes": "2, ddp"' in RunFolder(out).facts.read_text()
