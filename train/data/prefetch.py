"""Prefetching: during a step, a thread collates the next batch and copies it to the device on a separate CUDA stream.

Two batches exist at a time, the current and the next one, so a loader that reuses buffers needs two buffers. The second
half of this module broadcasts batches to all stages of a pipeline: only the first stage loads and decodes samples.
"""

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch

from clipmill.train.data.batch import PICTURES, TENSORS, to_device
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.distributed.world import World

_NUM_BATCHES = 2
_JOIN_TIMEOUT_S = 10.0


def prefetch(
    batches: Iterator[LoadedBatch], device: torch.device, *, names: Sequence[str] = TENSORS
) -> Generator[LoadedBatch, None, None]:
    """Yield batches with the tensors in `names` on `device`. A thread prepares the next batch in advance.

    A batch is valid until the next batch is requested. Closing the generator closes `batches`.

    Raises:
        Exception: `batches` raised this error. All batches that precede the error have been yielded.
    """
    if device == torch.device("cuda"):
        # "cuda" without an index means the current GPU of the thread, which is GPU 0 in a new thread.
        device = torch.device("cuda", torch.cuda.current_device())
    results: SimpleQueue[LoadedBatch | BaseException | None] = SimpleQueue()
    # Use a queue of tokens, because an interrupt during the release of a semaphore would leave the semaphore locked.
    tokens: SimpleQueue[None] = SimpleQueue()
    for _ in range(_NUM_BATCHES):
        tokens.put(None)
    is_over = False

    def run() -> None:
        try:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            while True:
                tokens.get()
                if is_over or (loaded := next(batches, None)) is None:
                    break
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    batch = to_device(loaded.batch, device, names=names)
                if stream is not None:
                    stream.synchronize()  # the model's stream does not wait for the copy stream
                results.put(loaded._replace(batch=batch))
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            results.put(error)
        finally:
            if isinstance(batches, Generator):
                batches.close()

    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    thread.start()
    try:
        while (loaded := results.get()) is not None:
            if isinstance(loaded, BaseException):
                raise loaded
            yield _record_stream(loaded, device)
            tokens.put(None)
    finally:
        is_over = True
        tokens.put(None)
        thread.join(_JOIN_TIMEOUT_S)  # the timeout expires only if a read is stuck in a file system


def _record_stream(loaded: LoadedBatch, device: torch.device) -> LoadedBatch:
    """Tell the allocator that the model's stream uses the tensors, which were created on the copy stream."""
    if device.type == "cuda":
        for value in loaded.batch.values():
            # Skip CPU tensors (positions, IDs and lengths), which have no streams.
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(torch.cuda.current_stream(device))
    return loaded


def broadcast_batch(loaded: LoadedBatch | None, stages: World) -> LoadedBatch | None:
    """Broadcast the first stage's batch. Other stages receive the batch without pictures, and ignore `loaded`."""
    if stages.size == 1:
        return loaded
    received = stages.first(lambda: None if loaded is None else _without_pictures(loaded))
    return loaded if stages.is_first else received


def broadcast_batches(batches: Iterable[LoadedBatch], stages: World) -> Iterator[LoadedBatch]:
    """Broadcast the first stage's batches, as `broadcast_batch` does. Other stages never start their own `batches`.

    Raises:
        ClipmillError: `batches` of the first stage raised this error. All stages raise it.
    """
    iterator = iter(batches)
    loaded: LoadedBatch | None = None  # stays None on all stages except the first

    def next_batch() -> LoadedBatch | None:
        nonlocal loaded
        loaded = next(iterator, None)
        return loaded if loaded is None or stages.size == 1 else _without_pictures(loaded)

    while (received := stages.first(next_batch)) is not None:
        yield loaded or received


def _without_pictures(loaded: LoadedBatch) -> LoadedBatch:
    batch = loaded.batch.copy()
    for name in PICTURES:
        batch.pop(name, None)  # type: ignore[misc]
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.cpu()  # type: ignore[literal-required]
    return loaded._replace(batch=batch)
