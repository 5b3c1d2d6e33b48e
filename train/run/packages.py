"""The packages besides clipmill whose parts a run was trained with: run.json has them, and resuming needs them."""

from collections.abc import Iterable

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import Checked
from clipmill.train.config.fields import NamedPart, named_parts
from clipmill.train.run.folder import RunFolder

PACKAGES_FACT = "packages"


def packages_of(parts: Iterable[NamedPart]) -> dict[str, str]:
    """The packages besides clipmill that parts are of, with their versions, as run.json has them."""
    found = {f"{one.parts.noun} {one.name}": one.parts.package_of(one.name) for one in parts}
    return {part: package for part, package in found.items() if package is not None}


def require_parts(settings: Checked, run: RunFolder) -> None:
    """Raise a UserError for a part that a run was trained with and that no installed package has."""
    for one in named_parts(settings):
        if one.name not in one.parts:
            part = f"{one.parts.noun} {one.name}"
            package = run.read_facts().get(PACKAGES_FACT, {}).get(part, "another package")
            raise UserError(
                f"{run.path} was trained with the {part} of {package}, which is not installed",
                hint="install that package; a run of which only the loss is missing can be evaluated and exported",
            )
