"""Batches prefetched one step ahead: only the time changes."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from clipmill.train.data import prefetch as prefetch_module
from clipmill.train.data.batch import Batch
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.prefetch import prefetch

CPU = torch.device("cpu")


def numbered_batches(count: int, made: list[int]) -> Iterator[LoadedBatch]:
    for number in range(count):
        made.append(number)
        yield LoadedBatch(Batch(key=[str(number)]), (), Cursor(number + 1))


def test_all_batches_come_in_their_order() -> None:
    assert [loaded.cursor.position for loaded in prefetch(numbered_batches(20, []), CPU)] == list(range(1, 21))


def test_no_more_than_one_batch_is_made_ahead() -> None:
    made: list[int] = []
    batches = prefetch(numbered_batches(20, made), CPU)
    next(batches)
    time.sleep(0.05)
    assert made == [0, 1]
    next(batches)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    batches.close()


def test_an_error_comes_in_its_turn() -> None:
    def failing() -> Iterator[LoadedBatch]:
        yield from numbered_batches(2, [])
        raise ZeroDivisionError

    batches = prefetch(failing(), CPU)
    assert [next(batches).cursor.position, next(batches).cursor.position] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_closing_ends_the_thread_and_the_source() -> None:
    is_closed = threading.Event()

    def endless() -> Iterator[LoadedBatch]:
        try:
            while True:
                yield from numbered_batches(5, [])
        finally:
            is_closed.set()

    batches = prefetch(endless(), CPU)
    next(batches)
    batches.close()
    assert is_closed.is_set()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_what_stays_on_the_cpu_is_told_of_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors have no CUDA stream to record, and every batch contains some."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    loaded = LoadedBatch(Batch(key=["a"], position=torch.tensor([3]), caption_id=torch.tensor([5])), (), Cursor(1))
    assert prefetch_module._record_stream(loaded, torch.device("cuda", 0)) is loaded


def test_the_lengths_of_captions_are_known_where_they_came_from() -> None:
    tokens = torch.zeros(3, 77, dtype=torch.int64)
    for row, length in enumerate((2, 77, 9)):
        tokens[row, 0], tokens[row, length - 1] = 49406, 49407
    targets = torch.full((2, 2, 6), -100)
    targets[0, 0, :3], targets[0, 1, :5], targets[1, 1, :1] = 1, 2, 0
    batches = [
        Batch(key=[""], tokens=tokens),
        Batch(key=[""], targets=targets),
        Batch(key=[""], text=torch.zeros(1, 4)),
    ]
    loaded = prefetch((LoadedBatch(batch, (), Cursor(0)) for batch in batches), CPU)
    lengths = [loaded_batch.batch.get("length") for loaded_batch in loaded]
    assert [None if length is None else length.tolist() for length in lengths] == [[2, 77, 9], [5, 1], None]
