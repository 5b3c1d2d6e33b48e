"""A column: the mean brightness of every n-th frame of each chunk.

Settings, commands and the spec are here, which `prep` loads whenever it starts; what it does is in `work.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.column import ColumnSpec, changed_flags, recipe_fingerprint
from clipmill.prep.core.make import make_column, plan_column
from clipmill.prep.core.request import Data, Json, PartRequest, Request

BRIGHTNESS = "brightness"
VERB = "measure"  # what the command does to a chunk, in its messages
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class BrightnessSettings:
    """What is measured."""

    every: int = 1
    """Frames from one that is measured to the next."""


@dataclass(frozen=True, kw_only=True)
class BrightnessRecipe:
    """Settings, and the variant of video whose chunks are measured."""

    settings: BrightnessSettings
    video: str

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "column": BRIGHTNESS, "video": self.video, **asdict(self.settings)}

    @property
    def variant(self) -> str:
        return f"mean-every{self.settings.every}-{recipe_fingerprint(self.as_dict())[:8]}"


def recipe_from_dict(stored: Mapping[str, Any]) -> BrightnessRecipe:
    if stored.get("schema") != SCHEMA:
        raise UserError("the recipe has another schema", hint="run `prep brightness` again")
    return BrightnessRecipe(settings=BrightnessSettings(every=stored["every"]), video=stored["video"])


Settings = Annotated[BrightnessSettings, Parameter(name="*")]


def brightness(
    settings: Settings = BrightnessSettings(),
    request: Annotated[PartRequest, Parameter(name="*")] = PartRequest(),  # noqa: B008 - frozen
) -> None:
    """Measure how bright the chunks are."""
    make_column(COLUMN, settings, request)


def plan_brightness(
    settings: Settings = BrightnessSettings(),
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Say what `prep brightness` would do."""
    plan_column(COLUMN, settings, data=data, json=json)


def _flags(stored: Mapping[str, Any]) -> list[str]:
    return changed_flags(asdict(recipe_from_dict(stored).settings), asdict(BrightnessSettings()))


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    make_column(COLUMN, recipe_from_dict(stored).settings, request)


COLUMN = ColumnSpec(
    name=BRIGHTNESS,
    package="clipmill_example",
    work="clipmill_example.brightness.work:WORK",
    checked_noun="checked frame",
    verb=VERB,
    make_command=brightness,
    plan_command=plan_brightness,
    flags=_flags,
    retry=_retry,
    check_sample="clipmill_example.brightness.work:check_sample",
)
