"""The environment of a run: machine and versions, for the results page and `train doctor`."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.formatting import count_noun

if TYPE_CHECKING:
    import torch

_DISTRIBUTIONS = ("clipmill", "torch", "xformers", "open_clip_torch", "av", "pyarrow", "numpy")


def machine(device: "torch.device") -> str:
    """Describe the processor, its cores and the GPU, if there is one."""
    import torch

    cores = len(os.sched_getaffinity(0))
    text = f"{processor()}, {count_noun(cores, 'core')}, {count_noun(torch.get_num_threads(), 'torch thread')}"
    return f"{text}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else text


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _DISTRIBUTIONS}


@cache
def installed_version(distribution: str) -> str:
    """Version of a package, or "not installed". It is read once per process."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
