"""The column `text`: its commands and its `ColumnSpec`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.make import make_column, plan_column
from clipmill.prep.core.request import EXECUTION, Data, Json, ModelRequest, Request
from clipmill.prep.text.recipe import TEXT, TextRecipe, text_recipe_from_dict

Settings = Annotated[TextRecipe, Parameter(name="*")]


@dataclass(frozen=True, kw_only=True)
class TextRequest(ModelRequest):
    """The flags of `prep text` that are not settings: a text encoder takes texts in batches."""

    batch: Annotated[
        int | None,
        EXECUTION,
        Parameter(help="Batch size of the text encoder, 1 or more. Default: 32 on a CPU, 256 on a GPU."),
    ] = None

    def check(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise UserError(f"--batch {self.batch} is out of range", hint="give 1 or more, or omit it")
        super().check()


def text(
    recipe: Settings,
    request: Annotated[TextRequest, Parameter(name="*")] = TextRequest(),
) -> None:
    """Encode each unique caption of the manifest once with an open_clip text encoder.

    Each run encodes only new captions. Only the manifest is needed, no chunks. Another text encoder creates another
    variant, and the existing one is kept.

    Example:

        prep text --clip ViT-B-32:laion2b_s34b_b79k
    """
    make_column(COLUMN, recipe, request)


def plan_text(recipe: Settings, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep text` would do with the same settings, and why (dry run).

    Example:

        prep plan text --clip ViT-B-32:laion2b_s34b_b79k
    """
    plan_column(COLUMN, recipe, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = text_recipe_from_dict(stored)
    clip = recipe.clip if weights is None else f"{recipe.clip.partition(':')[0]}:{weights}"
    make_column(COLUMN, TextRecipe(clip=clip, where=recipe.where), replace(request, only_variant=recipe.variant))


def _flags(stored: Mapping[str, Any]) -> list[str]:
    recipe = text_recipe_from_dict(stored)
    return ["--clip", recipe.clip, *(() if recipe.where is None else ("--where", recipe.where))]


COLUMN = ColumnSpec(
    name=TEXT,
    package="clipmill.prep.text",
    work="clipmill.prep.text.work:WORK",
    check_sample="clipmill.prep.text.check:check_text",
    sample="video",
    has_hours=False,
    make_command=text,
    plan_command=plan_text,
    flags=_flags,
    retry=_retry,
)
