"""Out of memory names a `--microbatch`, which then fits."""

import re
from pathlib import Path

import pytest
import torch

from clipmill.train.engine.failures import available_bytes
from tests.gpu.commands import train_and_say_peak, train_within
from tests.gpu.processes import start
from tests.gpu.runs import Runs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

# Clips of 8 x 224 x 224 pixels: a hundred megabytes of activations each in a tiny tower.
LARGE = ("--size-px", "224", "--num-frames", "8", "--batch", "32", "--steps", "2", "--workers", "8")
FITTING = 16


@pytest.mark.parametrize("task", ["dual-encoder", "classify"])
def test_out_of_memory_names_a_microbatch_that_then_fits(
    task: str, runs: Runs, cuda: torch.device, tmp_path: Path
) -> None:
    def command(name: str, *more: str) -> list[str]:
        return runs.command(task, cuda, *LARGE, *more, out=tmp_path / name)

    measured = start(
        train_and_say_peak, command("measured", "--microbatch", str(FITTING)), stderr_path=tmp_path / "measured.txt"
    )
    status, stderr = measured.end(within_s=60)
    assert status == 0, stderr[-2000:]
    match = re.search(r"peak_bytes=(\d+)", stderr)
    assert match is not None, stderr[-2000:]
    limit_bytes = round(1.3 * int(match[1]))
    status, stderr = start(train_within, command("large"), limit_bytes, stderr_path=tmp_path / "large.txt").end(
        within_s=60
    )
    assert status == 2, f"32 samples fit as well, or it ended otherwise: {status}: {stderr[-2000:]}"
    assert f"needs more than {limit_bytes / 1e9:.1f} GB" in stderr, stderr[-2000:]
    named = re.search(r"--microbatch (\d+) would probably fit", stderr)
    assert named is not None, stderr[-2000:]
    assert 1 <= int(named[1]) <= FITTING
    again = start(
        train_within, command("fits", "--microbatch", named[1]), limit_bytes, stderr_path=tmp_path / "fits.txt"
    )
    status, stderr = again.end(within_s=60)
    assert status == 0, stderr[-2000:]


def test_what_a_process_may_have_is_what_it_was_given(cuda: torch.device) -> None:
    total_bytes = torch.cuda.get_device_properties(cuda).total_memory
    before = torch.cuda.get_per_process_memory_fraction(cuda)
    try:
        torch.cuda.set_per_process_memory_fraction(0.25, cuda)
        assert available_bytes(cuda) <= 0.25 * total_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(before, cuda)
    assert torch.cuda.memory_reserved(cuda) <= available_bytes(cuda) <= total_bytes
