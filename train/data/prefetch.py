"""Batches are put together, and copied to the device on a stream of their own, while the model works on the one before.

Two batches exist at a time, the one that is used and the next: a loader whose buffers go round needs two of them.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from train.data.batch import TENSORS, to_device
from train.data.outcomes import LoadedBatch

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
