"""Selecting and downloading the kit's wheels: packages that the parts need and that a CUDA machine usually lacks.

Versions and hashes are those of requirements.lock, for Python 3.12 on Linux x86-64. Dependencies are read from
the packages of this environment, which `make setup` installs from the same lock.
"""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from manifests.errors import UserError
from scripts.gpu_kit.requirements import needs_of, normal

PYTHON = "3.12"
# Environment marker variables (PEP 508) of the target machine.
TARGET = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# A CUDA machine with a recent torch has these and their dependencies. They must match each other and the driver, so
# they are never included.
PRESENT = (
    *("torch", "torchvision", "transformers", "pyarrow", "numpy", "opencv-python-headless", "safetensors"),
    *("tokenizers", "pytest"),
)
# open_clip imports timm only for timm towers; leaving it out allows for more data.
EXCLUDED = frozenset({"timm"})
KIT_ITSELF = "packaging"  # parses version ranges before anything is unpacked
_GLIBC_MINORS = range(28, 4, -1)  # manylinux_2_28 and older: Ubuntu 20.04, RHEL 8 and newer
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A package of the lock: its version for the target, and the hashes of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]


def read_lock(lock: Path, *, target: Mapping[str, str] = TARGET) -> dict[str, Pin]:
    """Return the pins of a lock that apply to the target, by normalised name."""
    lines = "\n".join(line for line in lock.read_text().splitlines() if not line.startswith("#"))
    pins = {}
    for entry in re.split(r"\n(?=\S)", lines.replace("\\\n", " ").strip()):
        requirement = Requirement(entry.partition("--hash")[0].strip())
        if requirement.marker is None or requirement.marker.evaluate(dict(target)):
            (specifier,) = requirement.specifier
            name = normal(requirement.name)
            pins[name] = Pin(name=name, version=specifier.version, hashes=tuple(_HASH.findall(entry)))
    return pins


def with_their_needs(roots: Iterable[str], *, target: Mapping[str, str] = TARGET) -> set[str]:
    """Return the names of these packages and of their dependencies on the target, without optional extras."""
    found: set[str] = set()
    waiting = [normal(name) for name in roots]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in _requires(name):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({**target, "extra": ""}):
                waiting.append(normal(requirement.name))
    return found


def choose(pyproject: Path, lock: Path) -> list[Pin]:
    """Choose the packages to include in the kit, by name.

    Raises:
        UserError: a package is missing from the lock.
    """
    wanted = with_their_needs(need.name for need in needs_of(pyproject))
    names = wanted - with_their_needs(PRESENT) - EXCLUDED | {KIT_ITSELF}
    pins = read_lock(lock)
    if missing := sorted(names - pins.keys()):
        raise UserError(f"{lock.name} has no {', '.join(missing)}", hint="run `make lock` and `make setup`")
    return [pins[name] for name in sorted(names)]


def fetch(pins: Iterable[Pin], folder: Path) -> None:
    """Download the wheels of these packages for the target into `folder`, verifying the hashes of the lock.

    Raises:
        UserError: the package index does not answer, or has no such wheel.
    """
    folder.mkdir(parents=True)
    wanted = folder.parent / "wheels.txt"
    wanted.write_text(
        "".join(f"{pin.name}=={pin.version} {' '.join(f'--hash={one}' for one in pin.hashes)}\n" for pin in pins)
    )
    abi = f"cp{PYTHON.replace('.', '')}"
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS] + ["manylinux2014_x86_64"]
    download(
        ["--requirement", str(wanted), "--require-hashes", "--python-version", PYTHON, "--implementation", "cp"]
        + [word for one in (abi, "abi3", "none") for word in ("--abi", one)]
        + [word for platform in platforms for word in ("--platform", platform)],
        folder,
    )
    wanted.unlink()


def download(arguments: Iterable[str], folder: Path) -> None:
    """Run `pip download` for wheels only, without dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise UserError(
            f"pip cannot download the wheels: {errors[-1].removeprefix('ERROR: ')}",
            hint="build the kit on a machine with access to a package index, or set PIP_INDEX_URL to a mirror",
        )


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # for another Python or platform: downloaded without dependencies
