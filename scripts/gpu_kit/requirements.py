"""Python requirements of the kit: the version ranges of pyproject.toml, and the effect of each missing package."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("train", "columns")  # used by all parts
# From other extras: the packages that part A and the peers of part B need.
FURTHER = ("pytest", "pytest-timeout")
# Import names that differ from the distribution name.
IMPORT_NAMES = {
    "open-clip-torch": "open_clip",
    "opencv-python-headless": "cv2",
    "pyyaml": "yaml",
}
# What fails if a package is missing or incompatible; any package not listed here is required by everything.
LOSSES = {
    "diffusers": "`prep latents` in part A, VAE encoding in part B",
    "open-clip-torch": "training from text and `prep text` in part A, the rows of open_clip in part B",
    "pytest": "part A",
    "pytest-timeout": "part A",
    "transformers": "weights in Hugging Face's formats in part A, the rows of transformers in part B",
    "xformers": "attention by xformers in parts A and B",
}
EVERYTHING = "parts A, B and C"


@dataclass(frozen=True, kw_only=True)
class Need:
    """A package that the parts use.

    Attributes:
        name: normalised distribution name.
        requirement: with the version range of pyproject.toml.
        import_name: top-level module.
        loss: what fails without it.
    """

    name: str
    requirement: Requirement
    import_name: str
    loss: str


def normal(name: str) -> str:
    """Normalise a distribution name according to PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs_of(pyproject: Path) -> list[Need]:
    """Return the packages that the parts need according to pyproject.toml, by name."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    asked += [line for lines in extras.values() for line in lines if normal(Requirement(line).name) in FURTHER]
    found = {}
    for line in asked:
        requirement = Requirement(line)
        name = normal(requirement.name)
        found[name] = Need(
            name=name,
            requirement=requirement,
            import_name=IMPORT_NAMES.get(name, name.replace("-", "_")),
            loss=LOSSES.get(name, EVERYTHING),
        )
    return [found[name] for name in sorted(found)]
