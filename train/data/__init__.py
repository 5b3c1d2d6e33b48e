"""From shards to batches: sample order, clip arithmetic, decoding, cropping, loading.

The names below are the public Python interface of the package (docs/python.md); they are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.data.batches import Batches
    from train.data.chunk_reader import Chunk, Chunks, read_chunks
    from train.data.interface import open_clips, open_latents

__all__ = ["Batches", "Chunk", "Chunks", "open_clips", "open_latents", "read_chunks"]
_MODULES = {"Batches": "batches", "Chunk": "chunk_reader", "Chunks": "chunk_reader", "read_chunks": "chunk_reader"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'interface')}"), name)
