"""Batches made one ahead: nothing changes but the time."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from train.data.batch import Batch
from train.data.filling import LoadedBatch
from train.data.place import Place
from train.data.prefetch import prefetch

CPU = torch.device("cpu")


def numbered(count: int, made: list[int]) -> Iterator[LoadedBatch]:
    for number in range(count):
        made.append(number)
        yield LoadedBatch(Batch(key=[str(number)]), (), Place(number + 1))


def test_all_batches_come_in_their_order() -> None:
    assert [loaded.next_position for loaded in prefetch(numbered(20, []), CPU)] == list(range(1, 21))


def test_no_more_than_one_batch_is_made_ahead() -> None:
    made: list[int] = []
    batches = prefetch(numbered(20, made), CPU)
    next(batches)
    time.sleep(0.05)
    assert made == [0, 1]
    next(batches)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    batches.close()


def test_an_error_comes_in_its_turn() -> None:
    def failing() -> Iterator[LoadedBatch]:
        yield from numbered(2, [])
        raise ZeroDivisionError

    batches = prefetch(failing(), CPU)
    assert [next(batches).next_position, next(batches).next_position] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_closing_ends_the_thread_and_the_source() -> None:
    is_closed = threading.Event()

    def endless() -> Iterator[LoadedBatch]:
        try:
            while True:
                yield from numbered(5, [])
        finally:
            is_closed.set()

    batches = prefetch(endless(), CPU)
    next(batches)
    batches.close()
    assert is_closed.is_set()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())
