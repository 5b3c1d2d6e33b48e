"""The batches of an evaluation, whose samples are counted and shown where a command asks for it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from clipmill.manifests.progress import Activity

if TYPE_CHECKING:
    from clipmill.train.data.outcomes import LoadedBatch

_is_counting: ContextVar[bool] = ContextVar("is_counting", default=False)


@contextmanager
def counting_batches() -> Iterator[None]:
    """Let `counted_batches` show its progress within the block: a command shows it, and a training loop does not."""
    token = _is_counting.set(True)
    try:
        yield
    finally:
        _is_counting.reset(token)


def counted_batches(batches: "Iterable[LoadedBatch]", what: str, *, total: int | None) -> "Iterator[LoadedBatch]":
    """The batches; their samples are counted and shown within `counting_batches`.

    Args:
        what: is done with them, such as "embedding".
        total: number of samples in all batches; None if it is not known.
    """
    if not _is_counting.get():
        yield from batches
        return
    with Activity(what) as now:
        add = now.adder(total, unit="clip")
        add(0)
        for loaded in batches:
            yield loaded
            add(len(loaded.batch.get("position", ())) + len(loaded.failed))
