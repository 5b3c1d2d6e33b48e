"""The column `latents`: its commands and its `ColumnSpec`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Range
from clipmill.prep.core.column import ColumnSpec, changed_flags, short_path
from clipmill.prep.core.make import make_column, plan_column
from clipmill.prep.core.request import EXECUTION, Data, Json, ModelRequest, Request
from clipmill.prep.core.selection import WEIGHTS
from clipmill.prep.latents.recipe import LATENTS, LatentsSettings, latents_recipe_from_dict

Settings = Annotated[LatentsSettings, Parameter(name="*")]
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class LatentsRequest(ModelRequest):
    """The flags of `prep latents` that are not settings: a VAE encodes frames in batches."""

    batch: Annotated[
        int, EXECUTION, FIRST_RUN, Range(least=1), Parameter(help="Batch size of the VAE in frames, 1 or more.")
    ] = BATCH


def latents(
    settings: Settings,
    request: Annotated[LatentsRequest, Parameter(name="*")] = LatentsRequest(),
) -> None:
    """Encode frames of the chunks with a VAE, and write the latents to shards.

    It encodes the chunks of the current video variant; each run encodes only what is new, changed, missing or damaged.
    It may run while `prep chunk` is running; a later run encodes the remaining chunks. After the chunks have been
    re-encoded, run it again: until then, the existing latents are kept.

    Example:

        prep latents --vae stabilityai/sd-vae-ft-mse --crop random
    """
    make_column(COLUMN, settings, request)


def plan_latents(settings: Settings, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep latents` would do with the same settings, and why (dry run).

    Example:

        prep plan latents --vae stabilityai/sd-vae-ft-mse
    """
    plan_column(COLUMN, settings, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = latents_recipe_from_dict(stored)
    settings = replace(recipe.settings, vae=weights or stored.get(WEIGHTS) or recipe.settings.vae)
    make_column(COLUMN, settings, replace(request, only_variant=recipe.variant))


def _flags(stored: Mapping[str, Any]) -> list[str]:
    settings = latents_recipe_from_dict(stored).settings
    vae = short_path(Path(stored[WEIGHTS])) if WEIGHTS in stored else settings.vae
    return ["--vae", vae, *changed_flags(asdict(settings), asdict(LatentsSettings(vae=settings.vae)))]


COLUMN = ColumnSpec(
    name=LATENTS,
    package="clipmill.prep.latents",
    work="clipmill.prep.latents.work:WORK",
    check_sample="clipmill.prep.latents.sample:check_latents",
    make_command=latents,
    plan_command=plan_latents,
    flags=_flags,
    retry=_retry,
)
