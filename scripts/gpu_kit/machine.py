"""What is there on the machine with the GPU, and bringing what is missing; nothing needs to be installed for this."""

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

HERE, BROUGHT, MISSING = "this machine", "the kit", "missing"
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
    """A package that the parts need, as it is found.

    Attributes:
        version: None where it is missing, or does not tell.
        source: this machine, the kit, or missing.
        problem: what is wrong with it and which parts feel it; None where all is well.
    """

    need: Need
    version: str | None
    source: str
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The GPUs that torch sees; `problem` says why there are none."""

    torch: str | None
    names: tuple[str, ...]
    problem: str | None


def wheels_for(tags: Iterable[Tag], wheels: Iterable[Path]) -> dict[str, Path]:
    """The wheels that an interpreter with these tags can use, by the normalised name of what they hold."""
    supported = frozenset(tags)
    fitting = {}
    for wheel in wheels:
        name, _, _, offered = parse_wheel_filename(wheel.name)
        if offered & supported:
            fitting[str(name)] = wheel
    return fitting


def bring_missing(wheels: Iterable[Path], site: Path) -> None:
    """Unpacks those wheels into `site` whose package is not there in any version, and puts `site` on the path.

    A wheel is a zip file that needs no more than unpacking, so this does without pip.

    Raises:
        UserError: a wheel is damaged.
    """
    for name, wheel in wheels_for(sys_tags(), wheels).items():
        with opened(wheel) as archive:
            if not _is_there(name, archive.namelist()):
                archive.extractall(site)
    sys.path.append(str(site))
    importlib.invalidate_caches()


def find_packages(needs: Sequence[Need], *, site: Path) -> list[Package]:
    """What there is of the packages that the parts need, after `bring_missing`."""
    return [_find(need, site=site) for need in needs]


def conflicts(site: Path) -> list[str]:
    """What the packages in `site` want of others and do not find in a version that they accept."""
    found = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for line in distribution.requires or []:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = _version(wanted.name)
            if version is not None and not fits(version, wanted):
                found.append(
                    f"{distribution.name} {distribution.version} wants {wanted.name}{wanted.specifier}, "
                    f"here is {version}"
                )
    return sorted(found)


def fits(version: str, requirement: Requirement) -> bool:
    """Whether a version is in a range; a vendor's build (`2.11.0a0+nv26.3`) counts as the release that it is named for.

    A version that cannot be read does not fit.
    """
    try:
        return requirement.specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def find_devices() -> Devices:
    """Asks torch for its GPUs, in a process of its own: a driver that hangs must not take this one along."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=True
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Devices(torch=None, names=(), problem=f"torch did not answer within {_PROBE_LIMIT_S} s")
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
        problem = f"{need.name} is missing, and the kit has no wheel of it for this Python; lost: {need.loss}"
        return Package(need=need, version=None, source=MISSING, problem=problem)
    is_brought = spec.origin is not None and Path(spec.origin).is_relative_to(site)
    source = BROUGHT if is_brought else HERE
    # Of a package without metadata, such as an OpenCV built from source, only its presence is known.
    if version is None or fits(version, need.requirement):
        return Package(need=need, version=version, source=source)
    problem = f"{need.name} {version} is here, clipmill wants {need.requirement.specifier}; at risk: {need.loss}"
    return Package(need=need, version=version, source=source, problem=problem)


def _is_there(name: str, members: Iterable[str]) -> bool:
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
