"""Batches on the stages of a pipeline: the first one loads and decodes them, the others are told what is small."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from train.data.batch import PICTURES
from train.data.outcomes import LoadedBatch
from train.distributed.world import World


def on_all_stages(loaded: LoadedBatch | None, stages: World) -> LoadedBatch | None:
    """The first stage's batch: as it is there, and without its pictures on the others, whose own are not looked at."""
    if stages.size == 1:
        return loaded
    small = stages.first(lambda: None if loaded is None else _without_pictures(loaded))
    return loaded if stages.is_first else small


def batches_on_all_stages(batches: Iterable[LoadedBatch], stages: World) -> Iterator[LoadedBatch]:
    """The first stage's batches, likewise; on the others `batches` is not begun.

    Raises:
        ClipmillError: what the first stage's raised, on all.
    """
    iterator = iter(batches)
    own: LoadedBatch | None = None

    def following() -> LoadedBatch | None:
        nonlocal own
        own = next(iterator, None)
        return own if own is None or stages.size == 1 else _without_pictures(own)

    while (shared := stages.first(following)) is not None:
        yield own or shared


def _without_pictures(loaded: LoadedBatch) -> LoadedBatch:
    batch = loaded.batch.copy()
    for name in PICTURES:
        batch.pop(name, None)  # type: ignore[misc]
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.cpu()  # type: ignore[literal-required]
    return replace(loaded, batch=batch)
