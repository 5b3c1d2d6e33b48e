"""The recipe of the `scores` column: the settings, the versions of the libraries, and the variant of video."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Checked, Range
from clipmill.prep.core.column import recipe_fingerprint

SCORES = "scores"
SCORES_SCHEMA = 3  # incremented when the same settings begin to produce other values: methods, frames, thresholds
_METHODS = Parameter(group=Group("Scores", sort_key=1))
_LIBRARIES = {  # by the names under which they are recorded: distributions, the first that is installed counts
    "av": ("av",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"),
    "scenedetect": ("scenedetect-headless", "scenedetect"),
    "webrtcvad": ("webrtcvad-wheels", "webrtcvad"),
}


@dataclass(frozen=True, kw_only=True)
class ScoresSettings(Checked):
    """Settings of `prep scores` that affect the values."""

    cut_threshold: Annotated[float, _METHODS, FIRST_RUN, Range(1, 255)] = 27.0
    """Threshold of PySceneDetect's ContentDetector for a shot cut, 1 to 255. A lower threshold finds more cuts, but
    also mistakes fast motion for cuts."""


@dataclass(frozen=True, kw_only=True)
class ScoresRecipe:
    """Everything that the scores depend on besides the chunks themselves.

    Attributes:
        libraries: versions of the libraries that decode and measure, on one line.
        video: name of the `video` variant whose chunks are scored.
    """

    settings: ScoresSettings
    libraries: str
    video: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of `as_dict` as canonical JSON."""
        return recipe_fingerprint(self.as_dict())

    @property
    def variant(self) -> str:
        """Folder name: the threshold of cuts, and the first 8 digits of the fingerprint."""
        return f"cut{self.settings.cut_threshold:g}-{self.fingerprint[:8]}".replace("+", "")

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return {
            **asdict(self.settings),
            "schema": SCORES_SCHEMA,
            "column": SCORES,
            "video": self.video,
            "libraries": self.libraries,
        }


def resolve(settings: ScoresSettings, *, video: str) -> ScoresRecipe:
    """Return the full recipe, with the libraries of this machine.

    Raises:
        UserError: a library is not installed.
    """
    return ScoresRecipe(settings=settings, libraries=installed_libraries(), video=video)


def installed_libraries() -> str:
    """Return the versions of the libraries whose methods make the scores.

    Raises:
        UserError: one of them is not installed.
    """
    return ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)


def version_mismatch(planned: str) -> str | None:
    """Return why this machine must not score chunks of a plan with the libraries `planned`, or None."""
    try:
        found = installed_libraries()
    except UserError as error:
        return str(error)
    return None if found == planned else f"its libraries are {found}; the plan requires {planned}"


def _version(name: str) -> str:
    for distribution in _LIBRARIES[name]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise UserError(f"{_LIBRARIES[name][0]} is not installed", hint="install clipmill[prep]")


def scores_recipe_from_dict(stored: Mapping[str, Any]) -> ScoresRecipe:
    """Return the recipe in a recipe.json written by `ScoresRecipe.as_dict`.

    Raises:
        UserError: the recipe was written with another version of the recipe schema.
    """
    if stored.get("schema") != SCORES_SCHEMA or stored.get("column") != SCORES:
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r}, but this version supports {SCORES_SCHEMA}",
            hint="run `prep scores` to create a new variant",
        )
    try:
        settings = ScoresSettings(cut_threshold=stored["cut_threshold"])
        return ScoresRecipe(settings=settings, libraries=stored["libraries"], video=stored["video"])
    except KeyError as error:
        raise UserError(f"the recipe lacks {error}", hint="run `prep scores` again to rewrite it") from None
