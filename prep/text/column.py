"""The column `text`: its commands and its `ColumnSpec`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.settings import Range
from clipmill.prep.core.column import ColumnSpec, changed_flags, short_path
from clipmill.prep.core.make import make_column, plan_column
from clipmill.prep.core.request import EXECUTION, Data, Json, ModelRequest, Request
from clipmill.prep.core.selection import WEIGHTS
from clipmill.prep.text.recipe import T5, TEXT, TextRecipe, text_recipe_from_dict

Settings = Annotated[TextRecipe, Parameter(name="*")]
NO_ENCODER = TextRecipe()  # the command asks for one


@dataclass(frozen=True, kw_only=True)
class TextRequest(ModelRequest):
    """The flags of `prep text` that are not settings: a text encoder takes texts in batches."""

    batch: Annotated[
        int | None,
        EXECUTION,
        Range(least=1),
        Parameter(help="Batch size of the text encoder, 1 or more. Default: 32; 256 for --clip on a GPU."),
    ] = None


def text(
    recipe: Settings = NO_ENCODER,
    request: Annotated[TextRequest, Parameter(name="*")] = TextRequest(),
) -> None:
    """Encode each unique caption of the manifest once: with a CLIP text tower of open_clip, or with a T5.

    --clip stores an embedding per text, --encoder t5:NAME a sequence of one vector per token, without padding. Each
    run encodes only new captions. Only the manifest is needed, no chunks. Another text encoder creates another variant,
    and the existing one is kept.

    Example:

        prep text --clip ViT-B-32:laion2b_s34b_b79k
    """
    make_column(COLUMN, recipe, request)


def plan_text(recipe: Settings = NO_ENCODER, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep text` would do with the same settings, and why (dry run).

    Example:

        prep plan text --clip ViT-B-32:laion2b_s34b_b79k
    """
    plan_column(COLUMN, recipe, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    given = _given(stored, weights or stored.get(WEIGHTS))
    make_column(COLUMN, given, replace(request, only_variant=text_recipe_from_dict(stored).variant))


def _given(stored: Mapping[str, Any], weights: str | None) -> TextRecipe:
    """Return the settings that make a variant again, with weights at a path in place of those that have a name."""
    recipe = text_recipe_from_dict(stored)
    if recipe.max_tokens is None:
        clip = recipe.encoder if weights is None else f"{recipe.encoder.partition(':')[0]}:{weights}"
        return TextRecipe(clip=clip, where=recipe.where)
    return TextRecipe(
        encoder=recipe.encoder if weights is None else f"{T5}{weights}",
        max_tokens=recipe.max_tokens,
        precision="bfloat16" if recipe.precision == "bfloat16" else "float32",
        where=recipe.where,
    )


def _flags(stored: Mapping[str, Any]) -> list[str]:
    values = asdict(_given(stored, short_path(Path(stored[WEIGHTS])) if WEIGHTS in stored else None))
    return changed_flags(values, {field.name: field.default for field in fields(TextRecipe)})


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
