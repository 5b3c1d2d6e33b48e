"""Environment of a run: machine, versions, and the packages other than clipmill that provide parts of the run.

The results page and `train doctor` show the machine and the versions. run.json lists the packages that a resumed run
needs, for example for a loss.
"""

import os
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.settings import Checked
from clipmill.train.config.fields import NamedPart, named_parts
from clipmill.train.run.folder import RunFolder

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
    """Return the versions of Python and of the packages that affect results."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _DISTRIBUTIONS}


@cache
def installed_version(distribution: str) -> str:
    """Return the version of a package, or "not installed". Each version is looked up once per process."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


PACKAGES_FACT = "packages"


def packages_of(parts: Iterable[NamedPart]) -> dict[str, str]:
    """Return the package and version of each part that does not come from clipmill, for run.json."""
    packages = {f"{part.parts.noun} {part.name}": part.parts.package_of(part.name) for part in parts}
    return {name: package for name, package in packages.items() if package is not None}


def require_parts(settings: Checked, run: RunFolder) -> None:
    """Raise a UserError if no installed package provides a part that a run was trained with."""
    for part in named_parts(settings):
        if part.name not in part.parts:
            title = f"{part.parts.noun} {part.name}"
            package = run.read_facts().get(PACKAGES_FACT, {}).get(title, "another package")
            raise UserError(
                f"{run.path} was trained with the {title} from {package}, which is not installed",
                hint="install that package; if only a loss is missing, the run can still be evaluated and exported",
            )
