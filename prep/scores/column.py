"""The column `scores`: its commands and its `ColumnSpec`."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.prep.core.column import ColumnSpec, changed_flags
from clipmill.prep.core.make import make_column, plan_column
from clipmill.prep.core.request import Data, Json, PartRequest, Request
from clipmill.prep.scores.recipe import SCORES, ScoresSettings, scores_recipe_from_dict

Settings = Annotated[ScoresSettings, Parameter(name="*")]
_DEFAULTS = ScoresSettings()


def scores(
    settings: Settings = _DEFAULTS,
    request: Annotated[PartRequest, Parameter(name="*")] = PartRequest(),  # noqa: B008 - frozen
) -> None:
    """Score the chunks: motion, sharpness, brightness, black and frozen shares, bars, cuts, speech, perceptual hash.

    It scores the chunks of the current video variant; each run scores only what is new, changed, missing or damaged.
    After the chunks have been re-encoded, run it again: until then, the existing scores are kept.

    Example:

        prep scores
    """
    make_column(COLUMN, settings, request)


def plan_scores(settings: Settings = _DEFAULTS, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep scores` would do with the same settings, and why (dry run).

    Example:

        prep plan scores
    """
    plan_column(COLUMN, settings, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = scores_recipe_from_dict(stored)
    make_column(COLUMN, recipe.settings, replace(request, only_variant=recipe.variant))


def _flags(stored: Mapping[str, Any]) -> list[str]:
    return changed_flags(asdict(scores_recipe_from_dict(stored).settings), asdict(_DEFAULTS))


COLUMN = ColumnSpec(
    name=SCORES,
    package="clipmill.prep.scores",
    work="clipmill.prep.scores.work:WORK",
    check_sample="clipmill.prep.scores.sample:check_scores",
    verb="score",
    has_hours=False,
    page="the distribution of each score, pictures along it, and what --where keeps and drops",
    make_command=scores,
    plan_command=plan_scores,
    flags=_flags,
    retry=_retry,
)
