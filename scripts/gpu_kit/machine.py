"""Detecting the packages and GPUs of the machine, and adding missing packages without installing anything."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, sys_tags
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from scripts.gpu_kit.archives import opened
from scripts.gpu_kit.requirements import Need, normal

HERE, FROM_KIT, MISSING = "this machine", "the kit", "missing"
_PROBE_LIMIT_S = 120
_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Package:
    """An available or missing package that the parts need.

    Attributes:
        version: None if it is missing or unknown.
        source: this machine, the kit, or missing.
        problem: what is wrong with it and which parts are affected; None if it is usable.
    """

    need: Need
    version: str | None
    source: str
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The GPUs visible to torch; `problem` says why there are none."""

    torch: str | None
    names: tuple[str, ...]
    problem: str | None


def wheels_for(tags: Iterable[Tag], wheels: Iterable[Path]) -> dict[str, Path]:
    """Return the wheels that an interpreter with these tags can use, by normalised distribution name."""
    supported = frozenset(tags)
    fitting = {}
    for wheel in wheels:
        name, _, _, offered = parse_wheel_filename(wheel.name)
        if offered & supported:
            fitting[str(name)] = wheel
    return fitting


def unpack_missing(wheels: Iterable[Path], site: Path) -> None:
    """Unpack the wheels of packages that are not installed in any version into `site`, and add `site` to the path.

    A wheel is a zip file that only needs to be unpacked, so pip is not required.

    Raises:
        UserError: a wheel is damaged.
    """
    for name, wheel in wheels_for(sys_tags(), wheels).items():
        with opened(wheel) as archive:
            if not _is_installed(name, archive.namelist()):
                archive.extractall(site)
    sys.path.append(str(site))
    importlib.invalidate_caches()


def find_packages(needs: Sequence[Need], *, site: Path) -> list[Package]:
    """Look up the packages that the parts need, after `unpack_missing`."""
    return [_find(need, site=site) for need in needs]


def conflicts(site: Path) -> list[str]:
    """List the requirements of packages in `site` that are missing or have an incompatible version."""
    found = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for line in distribution.requires or []:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = _version(wanted.name)
            if version is not None and not fits(version, wanted):
                found.append(
                    f"{distribution.name} {distribution.version} requires {wanted.name}{wanted.specifier}, "
                    f"found {version}"
                )
    return sorted(found)


def fits(version: str, requirement: Requirement) -> bool:
    """Return True if a version is in a range; a vendor build (`2.11.0a0+nv26.3`) counts as its base release.

    A version that cannot be parsed does not fit.
    """
    try:
        return requirement.specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def find_devices() -> Devices:
    """Query torch for its GPUs in a separate process, so that a hanging driver does not block this one."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=True
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Devices(torch=None, names=(), problem=f"torch did not respond within {_PROBE_LIMIT_S} s")
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        return Devices(torch=None, names=(), problem=f"torch cannot be imported: {last}")
    problem = None
    if not found["gpus"]:
        built = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
        problem = f"torch {found['torch']} ({built}) finds no GPU"
    return Devices(torch=found["torch"], names=tuple(found["gpus"]), problem=problem)


def _find(need: Need, *, site: Path) -> Package:
    version = _version(need.name)
    spec = importlib.util.find_spec(need.import_name)
    if spec is None:
        problem = f"{need.name} is missing, and the kit has no wheel for this Python; affects {need.loss}"
        return Package(need=need, version=None, source=MISSING, problem=problem)
    is_from_kit = spec.origin is not None and Path(spec.origin).is_relative_to(site)
    source = FROM_KIT if is_from_kit else HERE
    # For a package without metadata, such as an OpenCV built from source, only its presence is known.
    if version is None or fits(version, need.requirement):
        return Package(need=need, version=version, source=source)
    problem = f"found {need.name} {version}, clipmill requires {need.requirement.specifier}; may affect {need.loss}"
    return Package(need=need, version=version, source=source, problem=problem)


def _is_installed(name: str, members: Iterable[str]) -> bool:
    if _version(name) is not None:
        return True
    tops = {member.partition("/")[0].removesuffix(".py") for member in members}
    modules = {top for top in tops if top.isidentifier()}
    return bool(modules) and all(importlib.util.find_spec(module) is not None for module in modules)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(normal(name))
    except importlib.metadata.PackageNotFoundError:
        return None
