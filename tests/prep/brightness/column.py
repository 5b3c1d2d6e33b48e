"""A column from outside of clipmill: the mean brightness of every n-th frame of each chunk.

It is what CONTRIBUTING's recipe "add a column" comes to: settings and a spec here, plan and worker in `work.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.column import VIDEO, ColumnSpec, Pending, changed_flags, recipe_fingerprint
from clipmill.prep.core.make import (
    Data,
    EngineName,
    Json,
    MaxFailures,
    PartOf,
    Request,
    Workers,
    make_column,
    plan_column,
)

if TYPE_CHECKING:
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.run import Summary
    from clipmill.shards.reader import Variant
    from tests.prep.brightness.work import BrightnessPlan

BRIGHTNESS = "brightness"
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
    *,
    data: Data = Path("data"),
    engine: EngineName = "processes",
    workers: Workers = None,
    part: PartOf = None,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Measure how bright the chunks are."""
    request = Request(data=data, engine=engine, workers=workers, part=part, max_failures=max_failures, json=json)
    make_column(COLUMN, settings, request)


def plan_brightness(
    settings: Settings = BrightnessSettings(),
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Say what `prep brightness` would do."""
    plan_column(COLUMN, settings, data=data, json=json)


def _plan(data_dir: Path, settings: BrightnessSettings, request: Request) -> "BrightnessPlan":
    from clipmill.shards.dataset import current_variant
    from tests.prep.brightness.work import make_plan

    recipe = BrightnessRecipe(settings=settings, video=str(current_variant(data_dir, VIDEO)))
    request.require_variant(recipe.variant, command="prep brightness")
    return make_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: "BrightnessPlan", settings: BrightnessSettings, request: Request) -> "Summary":
    from clipmill.prep.core.run import execute
    from clipmill.prep.engines.choice import open_engine
    from tests.prep.brightness.work import brightness_job

    engine = open_engine(request.engine, address=None, workers=request.workers)
    return execute(brightness_job(plan), engine, part_run=request.part_run)


def _plan_report(plan: "BrightnessPlan") -> "Report":
    from clipmill.prep.core.report import Report, states_lines, states_values

    return Report("\n".join(states_lines(plan.shards)), states_values(plan.shards))


def _summary_report(summary: "Summary", settings: BrightnessSettings, listed: Path) -> "Report":
    from clipmill.prep.core.report import summary_report

    return summary_report(summary, listed=listed)


def _flags(stored: Mapping[str, Any]) -> list[str]:
    return changed_flags(asdict(recipe_from_dict(stored).settings), asdict(BrightnessSettings()))


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    make_column(COLUMN, recipe_from_dict(stored).settings, request)


def _pending(data_dir: Path, variant: "Variant") -> Pending:
    from clipmill.prep.core.plan import pending_of
    from clipmill.shards.dataset import current_variant
    from tests.prep.brightness.work import make_plan

    recipe = recipe_from_dict(variant.recipe)
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return Pending(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    return pending_of(make_plan(data_dir, recipe).shards)


COLUMN = ColumnSpec(
    name=BRIGHTNESS,
    package="tests.prep.brightness",
    checked_noun="checked frame",
    make_command=brightness,
    plan_command=plan_brightness,
    plan=_plan,
    run=_run,
    plan_report=_plan_report,
    summary_report=_summary_report,
    flags=_flags,
    retry=_retry,
    pending=_pending,
    check_sample="tests.prep.brightness.work:check_sample",
)
