"""The `latents` column: its flags and its `ColumnSpec`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Range
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.recipe import KEPT, settings_from
from clipmill.prep.core.request import EXECUTION, ModelRequest
from clipmill.prep.latents.recipe import LATENTS, LATENTS_SCHEMA, LatentsSettings, vae_of
from clipmill.shards.columns import VIDEO, command_for

BATCH = 16


@dataclass(frozen=True, kw_only=True)
class LatentsRequest(ModelRequest):
    """Flags of `prep latents` that are not part of the recipe: the batch size of the VAE."""

    batch: Annotated[
        int, EXECUTION, FIRST_RUN, KEPT, Range(least=1), Parameter(help="Batch size of the VAE in frames, 1 or more.")
    ] = BATCH


def _read_settings(stored: Mapping[str, Any], weights: str | None) -> LatentsSettings:
    settings = settings_from(stored, LatentsSettings, column=LATENTS, schema=LATENTS_SCHEMA)
    settings = settings if weights is None else replace(settings, vae=weights)
    vae_of(stored, source=settings.vae)  # raises an error if the recipe lacks values of the VAE
    return settings


COLUMN = ColumnSpec(
    name=LATENTS,
    package="clipmill.prep.latents",
    work="clipmill.prep.latents.work:WORK",
    check_sample="clipmill.prep.latents.worker:check_latents",
    settings=LatentsSettings,
    schema=LATENTS_SCHEMA,
    request="clipmill.prep.latents.column:LatentsRequest",
    help=f"""Encode frames of the chunks with a VAE, and write the latents to shards.

    The command encodes the chunks of the current variant of the column `video`. Each run encodes only chunks that are
    new or changed, or whose latents are missing or damaged. You can run the command while `prep {command_for(VIDEO)}`
    is running; a later run encodes the remaining chunks. After the chunks have been re-encoded, run the command again;
    until then, the existing latents are kept.

    Example:

        prep latents --vae stabilityai/sd-vae-ft-mse --crop random
    """,
    plan_help="""Print what `prep latents` would do with the same settings, and why (dry run).

    Example:

        prep plan latents --vae stabilityai/sd-vae-ft-mse
    """,
    read_settings=_read_settings,
)
