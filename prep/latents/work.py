"""The `ChunkWork` of the column `latents`."""

from clipmill.manifests.plugins import import_late
from clipmill.manifests.store import num_captions_of
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.latents.recipe import COMPRESSED, EXTENSION, Encoding, local_weights, resolve, variant_name
from clipmill.shards.format import LATENTS_FIELDS

WORK = ChunkWork(
    fields=LATENTS_FIELDS,
    extension=lambda recipe: EXTENSION if recipe.settings.compression == "none" else COMPRESSED,
    make=import_late("clipmill.prep.latents.worker:make_latents"),
    resolve=resolve,
    name=variant_name,
    weights=local_weights,
    workers=import_late("clipmill.prep.latents.run:choose_workers"),
    reads_next=lambda recipe: Encoding.from_recipe(recipe).is_video,
    has_sample=import_late("clipmill.prep.latents.frames:has_segment"),
    on_plan=import_late("clipmill.prep.latents.run:require_segments"),
    estimate=import_late("clipmill.prep.latents.run:estimate"),
    summary=import_late("clipmill.prep.latents.run:summary"),
    left_out=import_late("clipmill.prep.latents.run:omission_lines"),
    next_command=lambda data: [
        *("train", "dual-encoder" if num_captions_of(data) else "mae", "--shards", str(data)),
        *("--input", "latents", "--out", "runs/latents"),
    ],
)
