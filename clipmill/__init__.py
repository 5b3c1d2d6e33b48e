"""clipmill: turns long videos into training shards, once; then trains video-language models from them.

The names below are the public Python interface (docs/python.md). They are imported when first used, so that a machine
that only prepares data needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipmill.manifests.errors import FailedWork, UserError
    from clipmill.train.data.batches import Batches
    from clipmill.train.data.chunk_reader import Chunk, Chunks, chunks_table, read_chunks
    from clipmill.train.data.interface import open_clips, open_latents, read_clips
    from clipmill.train.inference import LoadedModel, load_model

__all__ = [
    "Batches",
    "Chunk",
    "Chunks",
    "FailedWork",
    "LoadedModel",
    "UserError",
    "chunks_table",
    "load_model",
    "open_clips",
    "open_latents",
    "read_chunks",
    "read_clips",
]
_MODULES = {
    "manifests.errors": ("FailedWork", "UserError"),
    "train.data.batches": ("Batches",),
    "train.data.chunk_reader": ("Chunk", "Chunks", "chunks_table", "read_chunks"),
    "train.data.interface": ("open_clips", "open_latents", "read_clips"),
    "train.inference": ("LoadedModel", "load_model"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
