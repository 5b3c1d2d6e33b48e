"""The CUDA runtime of the simulation, compiled once, and processes that torch starts with it."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("cuda_runtime.c")
LIBRARY = "libcuda.so.1"
NUM_GPUS = 4
_SIMULATED = "SIMULATED_GPUS"


def require_runtime() -> str:
    """The C compiler; skips the test where the simulation cannot be compiled or loaded."""
    torch = find_spec("torch")  # whose import takes longer than anything else in this process
    assert torch is not None and torch.origin is not None
    cuda = runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"]
    if sys.platform != "linux" or cuda is None or not cuda.startswith("13."):
        pytest.skip("the simulated runtime is of CUDA 13 on Linux, and torch is not")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to build the simulated CUDA runtime with")
    return compiler


def run_simulated(words: Sequence[str], *, folder: Path, num_gpus: int = NUM_GPUS) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on a machine with simulated GPUs.

    Args:
        words: Arguments of the interpreter.
        folder: Folder for the library and for temporary files.
    """
    compiler, library = require_runtime(), folder / LIBRARY
    if not library.exists():
        options = ("-shared", "-fPIC", "-O1", "-pthread", "-w")
        subprocess.run([compiler, *options, "-o", library, SOURCE], check=True, capture_output=True)
    environment = {**os.environ, _SIMULATED: str(num_gpus), "LD_PRELOAD": str(library), "TMPDIR": str(folder)}
    environment |= {"LD_LIBRARY_PATH": str(folder), "HF_HUB_OFFLINE": "1"}
    # Of a launcher of the tests; ranks are made by the tests themselves.
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, cwd=SOURCE.parents[2]
    )
