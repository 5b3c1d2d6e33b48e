"""Every task on a machine that says it has GPUs (README.md): the files of `inside`, in a process of their own."""

from pathlib import Path

import pytest

from tests.simulated_gpu.runtime import run_simulated

INSIDE = Path(__file__).parent / "inside"
# The process ends at once: to collect what it holds takes seconds.
RUN_TESTS = """
import os, sys, pytest
status = pytest.main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
# With a driver that finds no GPU for torch.
CHOOSE = """
from clipmill.manifests.errors import UserError
from clipmill.train.device.precision import choose_device
print(choose_device("auto"))
try:
    choose_device("auto", needs_gpu=True)
except UserError as error:
    print(error)
"""
pytestmark = pytest.mark.timeout(900)


def test_the_simulated_gpu_is_used_as_a_gpu_must_be(tmp_path: Path) -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:unraisableexception")
    words = ("-c", RUN_TESTS, str(INSIDE), "-q", *plugins, "--timeout", "0")
    done = run_simulated(words, folder=tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout[-8000:]}{done.stderr[-3000:]}"


def test_the_cpu_is_not_taken_without_a_word(tmp_path: Path) -> None:
    done = run_simulated(("-c", CHOOSE), folder=tmp_path, num_gpus=0)
    device, refused = done.stdout.splitlines()
    assert device == "cpu" and "asked for by --require-gpu" in refused
    [line] = [line for line in done.stderr.splitlines() if line.startswith("note:")]
    assert "the CPU is used" in line and "needs driver 580.65.06" in line
