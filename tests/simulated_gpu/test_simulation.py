"""Every task on a machine that says it has GPUs (README.md): the files of `inside`, in a process of their own."""

import subprocess
from pathlib import Path

import pytest

from tests.simulated_gpu.runtime import run_simulated

INSIDE = Path(__file__).parent / "inside"
# Runs a program in a fork without GPUs, then tests. The process ends at once: to collect what it holds takes seconds.
RUN = """
import os, runpy, sys, pytest
from clipmill.train.device import precision  # with torch, whose import takes longer than the program
folder, *words = sys.argv[1:]
if not (pid := os.fork()):
    os.environ["SIMULATED_GPUS"] = "0"
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
    runpy.run_path(f"{folder}/choose.py")
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
status = pytest.main(words)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the simulated process."""
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture(scope="module")
def simulated_process(folder: Path) -> subprocess.CompletedProcess[str]:
    """The simulated process."""
    return simulate(folder, tests="not nightly")


def simulate(folder: Path, *, tests: str) -> "subprocess.CompletedProcess[str]":
    (folder / "choose.py").write_text(CHOOSE)
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:unraisableexception")
    words = ("-c", RUN, str(folder), str(INSIDE), "-q", "-m", tests, *plugins, "--timeout", "0")
    return run_simulated(words, folder=folder)


@pytest.mark.nightly
def test_long_tests_on_the_simulated_gpu(tmp_path: Path) -> None:
    done = simulate(tmp_path, tests="nightly")
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout[-8000:]}{done.stderr[-3000:]}"


def test_the_simulated_gpu_is_used_as_a_gpu_must_be(simulated_process: subprocess.CompletedProcess[str]) -> None:
    assert simulated_process.returncode == 0 and " passed" in simulated_process.stdout, (
        f"{simulated_process.stdout[-8000:]}{simulated_process.stderr[-3000:]}"
    )


def test_the_cpu_is_not_taken_without_a_word(simulated_process: subprocess.CompletedProcess[str], folder: Path) -> None:
    device, refused = (folder / "out").read_text().splitlines()
    assert device == "cpu" and "requested by --require-gpu" in refused
    [line] = [line for line in (folder / "err").read_text().splitlines() if line.startswith("note:")]
    assert "the CPU is used" in line and "needs driver 580.65.06" in line
