"""Batches are put together, and copied to the device on a stream of their own, while the model works on the one before.

Two batches exist at a time, the one that is used and the next: a loader whose buffers go round needs two of them.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from train.data.batch import PICTURES, TENSORS, to_device
from train.data.outcomes import LoadedBatch
from train.distributed.world import World

if TYPE_CHECKING:
    import torch


_NUM_BATCHES = 2
_GOODBYE_S = 10.0


def prefetch(
    batches: Iterator[LoadedBatch], device: "torch.device", *, names: Sequence[str] = TENSORS
) -> Generator[LoadedBatch, None, None]:
    """`batches` with their tensors on `device`, made by a thread of its own that is one batch ahead.

    A batch is valid until the next one is asked for. Closing the generator closes `batches`.

    Args:
        names: of the tensors.

    Raises:
        Exception: what `batches` raised, when its turn comes.
    """
    ready: SimpleQueue[LoadedBatch | BaseException | None] = SimpleQueue()
    # Tokens in a queue, no semaphore: an interruption in the middle of a release would leave it locked for ever.
    free: SimpleQueue[None] = SimpleQueue()
    for _ in range(_NUM_BATCHES):
        free.put(None)
    is_over = False

    def run() -> None:
        try:
            transfer = _transfer_to(device, names)
            while True:
                free.get()
                if is_over or (loaded := next(batches, None)) is None:
                    break
                ready.put(transfer(loaded))
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whose it is
            ready.put(error)
        finally:
            if isinstance(batches, Generator):
                batches.close()

    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    thread.start()
    try:
        while (loaded := ready.get()) is not None:
            if isinstance(loaded, BaseException):
                raise loaded
            yield _at_hand(loaded, device)
            free.put(None)
    finally:
        is_over = True
        free.put(None)
        thread.join(_GOODBYE_S)  # longer only where the next batch waits for a file system that does not answer


def _transfer_to(device: "torch.device", names: Sequence[str]) -> Callable[[LoadedBatch], LoadedBatch]:
    if device.type != "cuda":
        return lambda loaded: replace(loaded, batch=to_device(loaded.batch, device, names=names))
    import torch

    stream = torch.cuda.Stream(device)

    def transfer(loaded: LoadedBatch) -> LoadedBatch:
        with torch.cuda.stream(stream):
            batch = to_device(loaded.batch, device, names=names)
        # The buffers of the batch may be filled again from here on.
        stream.synchronize()
        return replace(loaded, batch=batch)

    return transfer


def _at_hand(loaded: LoadedBatch, device: "torch.device") -> LoadedBatch:
    """Tells the allocator that tensors made on the copying stream are used on the model's."""
    if device.type == "cuda":
        import torch

        for value in loaded.batch.values():
            # Positions, ids and lengths stay on the CPU, whose tensors know no streams.
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(torch.cuda.current_stream(device))
    return loaded


# Batches on the stages of a pipeline: the first one loads and decodes them, the others are told what is small.


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
