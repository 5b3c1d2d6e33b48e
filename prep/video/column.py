"""The column `video`: the flags of `prep chunk` and `prep plan`, and the `ColumnSpec`."""

from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.help_text import FIRST_RUN
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.recipe import KEPT, changed_flags
from clipmill.prep.core.request import PartRequest, PlanRequest, ScratchSize
from clipmill.prep.sources.detector import DEFAULT_DETECTOR
from clipmill.prep.video.recipe import NAMED_RECIPES, RECIPE_SCHEMA, Recipe, recipe_of, settings_line
from clipmill.prep.video.settings import SHOT_SETTINGS
from clipmill.shards.columns import VIDEO


@dataclass(frozen=True, kw_only=True)
class ChunkRequest(PartRequest):
    """The flags of `prep chunk` that are not settings; workers copy remote videos."""

    scratch_size: Annotated[ScratchSize, KEPT] = None


@dataclass(frozen=True, kw_only=True)
class ChunkPlanRequest(PlanRequest):
    """The flags of `prep plan` that are not settings."""

    explain: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(help="Chunk key or video ID to explain: its state in the plan, and the reason."),
    ] = None


def _flags(recipe: Recipe) -> list[str]:
    settings = recipe.settings()
    names = [name for name, values in NAMED_RECIPES.items() if values["codec"] == settings.codec]
    name, codec = (names[0], None) if names else (Recipe().recipe, settings.codec)
    # The defaults that depend on the GOP layout, and the default layout itself.
    defaults = asdict(Recipe(recipe=name, codec=codec, gop=settings.gop).settings())
    by_itself = Recipe(recipe=name, codec=codec).settings()
    defaults |= {"len": settings.len, "gop": by_itself.gop, "codec": by_itself.codec if names else None}
    if settings.cut == "shots":
        of_shots = Recipe(len=settings.len, fps=settings.fps, cut="shots", detector=settings.detector).settings()
        defaults |= {name: getattr(of_shots, name) for name in SHOT_SETTINGS} | {"detector": DEFAULT_DETECTOR}
    chosen = [] if name == Recipe().recipe else ["--recipe", name]
    return ["--len", settings.len, *chosen, *changed_flags(asdict(settings), defaults)]


COLUMN = ColumnSpec(
    name=VIDEO,
    package="clipmill.prep.video",
    work="clipmill.prep.video.work:WORK",
    check_sample="clipmill.prep.video.check:check_video",
    settings=Recipe,
    schema=RECIPE_SCHEMA,
    request="clipmill.prep.video.column:ChunkRequest",
    plan_request="clipmill.prep.video.column:ChunkPlanRequest",
    help="""Encode the videos of the manifest as chunks, and write them to WebDataset shards.

    Chunks have the length --len or, with --cut shots, begin and end at shot boundaries. Each run encodes only chunks
    that are new, changed, missing or damaged. Other settings create another variant, and the existing one is kept.

    Example:

        prep chunk --len 15s --crf 21
    """,
    plan_help="""Print what `prep chunk` would do with the same settings, why, and the estimated cost (dry run).

    Example:

        prep plan --bitrate 800k
    """,
    checked_noun="decoded frame",
    page="chunks that play in place, with totals, distributions, search and filters; clips that take "
    "more than 8 MB go to a folder beside it; --where leaves out the other chunks",
    read_settings=lambda stored, weights: recipe_of(stored),
    write_flags=_flags,
    settings_line=settings_line,
)
