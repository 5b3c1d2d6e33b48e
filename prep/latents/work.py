"""The `ChunkWork` of the column `latents`."""

from pathlib import Path

from clipmill.manifests.plugins import import_late
from clipmill.manifests.store import num_captions_of
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.latents.recipe import (
    COMPRESSED,
    EXTENSION,
    Encoding,
    LatentsSettings,
    local_weights,
    resolve,
    variant_name,
)
from clipmill.shards.format import LATENTS_FIELDS


def _extension(recipe: Recipe[LatentsSettings]) -> str:
    return EXTENSION if recipe.settings.compression == "none" else COMPRESSED


def _next_command(data: Path) -> list[str]:
    task = "dual-encoder" if num_captions_of(data) else "mae"
    return ["train", task, "--shards", str(data), "--input", "latents", "--out", "runs/latents"]


WORK = ChunkWork(
    fields=LATENTS_FIELDS,
    extension=_extension,
    make=import_late("clipmill.prep.latents.worker:make_latents"),
    resolve=resolve,
    name=variant_name,
    weights=local_weights,
    workers=import_late("clipmill.prep.latents.run:choose_workers"),
    reads_next=lambda recipe: Encoding.of(recipe).is_video,
    has_sample=import_late("clipmill.prep.latents.frames:has_segment"),
    on_plan=import_late("clipmill.prep.latents.report:require_segments"),
    estimate=import_late("clipmill.prep.latents.report:estimate"),
    summary=import_late("clipmill.prep.latents.report:summary"),
    left_out=import_late("clipmill.prep.latents.report:left_out_lines"),
    next_command=_next_command,
)
