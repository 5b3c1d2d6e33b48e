"""`prep retry`: what failed in one column, once more."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from prep.core.options import Data, Json
from prep.latents import command as latents_commands
from prep.text import command as text_commands
from prep.video import command as chunk_commands
from prep.video.command import Address, EngineName, MaxFailures, Workers

ColumnOfFailures = Annotated[Literal["video", "latents", "text"], Parameter(help="Column whose failures are meant.")]


def retry(
    *,
    column: ColumnOfFailures = "video",
    only: Annotated[
        list[str] | None, Parameter(help="Codes to try again, as `prep status` shows them.", negative="")
    ] = None,
    weights: Annotated[
        str | None,
        Parameter(help="Folder or file of the model's weights, where they are local: recipes have no paths."),
    ] = None,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    workers: Workers = None,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Try again what failed in the current variant of a column, for example after mending a source.

    Example: prep retry --only timeout
    """
    from prep.core.data_folder import LATENTS, VIDEO, require_data_folder
    from prep.core.failures import FailureCode
    from prep.latents.recipe import latents_recipe_from_dict
    from prep.text.recipe import TextRecipe, text_recipe_from_dict
    from prep.video.recipe import recipe_from_dict
    from shards.reader import Variant

    codes = frozenset(only or FailureCode)
    if unknown := sorted(codes - set(FailureCode)):
        raise UserError(f"unknown failure code: {', '.join(unknown)}", hint=f"codes are {', '.join(FailureCode)}")
    stored = Variant.open(require_data_folder(data), column=column).recipe
    again: dict[str, Any] = {
        "data": data,
        "engine": engine,
        "address": address,
        "workers": workers,
        "max_failures": max_failures,
        "json": json,
        "retry_codes": codes,
    }
    if column == VIDEO:
        chunk_commands.run_chunks(recipe_from_dict(stored), **again)
    elif column == LATENTS:
        recipe = latents_recipe_from_dict(stored)
        settings = replace(recipe.settings, vae=weights or recipe.settings.vae)
        latents_commands.run_latents(settings, only_variant=recipe.variant, **again)
    else:
        text = text_recipe_from_dict(stored)
        clip = text.clip if weights is None else f"{text.clip.partition(':')[0]}:{weights}"
        text_commands.run_texts(TextRecipe(clip=clip), only_variant=text.variant, **again)
