"""A run on the device that is killed without warning, and goes on."""

import signal
import time
from pathlib import Path

import pytest
import torch

from clipmill.train.run.checkpoint import latest_checkpoint
from tests.gpu.commands import train_alone
from tests.gpu.processes import start
from tests.gpu.runs import Runs, deviation
from tests.gpu.test_tasks import ALL, Record
from tests.train.running import losses, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

SHOWN = "caption"  # the task of the dry run


@pytest.mark.parametrize("task", ["dual-encoder", SHOWN])
def test_a_killed_run_goes_on_with_the_losses_of_an_undisturbed_one(
    task: str, runs: Runs, device: torch.device, is_dry_run: bool, tmp_path: Path, record_property: Record
) -> None:
    if is_dry_run and task != SHOWN:
        pytest.skip(f"not in the dry run, which runs {SHOWN} alone")
    flags = ("--steps", "8" if is_dry_run else "40", "--checkpoint-every", "2" if is_dry_run else "5")
    out = tmp_path / "killed"
    killed = start(train_alone, runs.command(task, device, *flags, out=out), stderr_path=tmp_path / "said.txt")
    until = time.monotonic() + 100
    while killed.process.is_alive() and latest_checkpoint(out / "checkpoints") is None and time.monotonic() < until:
        time.sleep(0.02)
    assert killed.process.pid is not None
    killed.process.kill()
    status, stderr = killed.end(within_s=20)
    assert status == -signal.SIGKILL, f"it ended before it could be killed, with {status}: {stderr[-2000:]}"
    num_taken = len(losses(out))
    assert not train(task, "--resume", "--out", out)
    undisturbed = losses(runs.make(task, device, *flags))
    # A CPU makes the same bits again; a GPU may, and then the run that was killed must.
    again = undisturbed if is_dry_run else losses(runs.make(task, device, *flags, again=1))
    values = losses(out)
    record_property("killed", f"after step {num_taken} of {len(undisturbed)}")
    record_property("relative_difference", f"{deviation(values, undisturbed):.2g}")
    record_property("is_deterministic", undisturbed == again)
    assert num_taken < len(undisturbed)
    if undisturbed == again:
        assert values == undisturbed
    else:
        assert deviation(values, undisturbed) <= ALL
