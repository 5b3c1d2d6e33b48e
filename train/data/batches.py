"""`Batches`: the batches of the training commands' loaders as an iterable for Python users, one epoch per iteration."""

import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import wraps
from numbers import Integral
from typing import Any, NoReturn, TypeVar, cast

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.train.config.training import NEW_RUN
from clipmill.train.data.arguments import require_process
from clipmill.train.data.classes import ClassList
from clipmill.train.data.order import Cursor, LoaderState
from clipmill.train.data.outcomes import FailedSample, LoadedBatch, TooManyFailures, list_failures
from clipmill.train.data.prefetch import prefetch
from clipmill.train.distributed.world import World, joined_world


class Batches:
    """Batches of a split for one process, as `open_clips`, `read_clips` and `open_latents` return them.

    `for batch in batches` is an epoch: `len(batches)` batches of equal size, the same number on every rank. Samples
    that do not fill a batch come first in the next iteration, so no sample is dropped or repeated, as in the
    training commands. With `shuffle=False`, an iteration yields every sample once, in order, and the last batch may be
    smaller. A stream of tars has no length and, with `shuffle=True`, no end.

    A batch is a dictionary that contains lists of strings, and tensors (arrays if `device` is None; docs/python.md). A
    batch belongs to the caller and is never overwritten.

    Args:
        samples: Samples and loader of this rank.
        finish: Function that turns a loaded batch (of arrays if `device` is None) into the user's batch. The function
            is called in the caller's thread, because the prefetching thread is busier.
        classes: Classes of the labels; None without labels.
        world: Rank and number of ranks; None for `joined_world()`.
        batch: Number of samples in this rank's batch.
        shuffle, device, max_failures: See `open_clips`.

    Attributes:
        failures: Samples that have failed so far, with key, reason and detail (clipmill.train.data.outcomes). If there
            are more than `max_failures`, the iteration raises FailedWork.
        classes: Names of the classes, in the order of their indices; empty without labels.
    """

    def __init__(
        self,
        samples: Any,
        finish: Callable[[dict[str, Any]], dict[str, Any]],
        classes: ClassList | None,
        *,
        shuffle: bool,
        batch: int,
        world: World | None,
        device: str | torch.device | None,
        max_failures: int,
    ) -> None:
        self._samples, self._finish, self._shuffle, self._batch = samples, finish, shuffle, batch
        self._has_explicit_world, self._world = world is not None, world or joined_world()
        self._device, self._max_failures = device, max_failures
        self.classes: tuple[str, ...] = () if classes is None else classes.names
        self.failures: list[FailedSample] = []
        self._process, self._num_iterations = os.getpid(), 0
        self._running: Generator[LoadedBatch, None, None] | None = None
        self._cursor, self._num_taken, self._is_resumed = Cursor(0), 0, False
        if shuffle and self.num_samples is not None and self.num_samples < self._step:
            ranks = "" if self._world.size == 1 else f" in each of {self._world.size} processes"
            raise UserError(
                f"batch={batch}{ranks} is larger than the data, which contain {count_noun(self.num_samples, 'sample')}",
                hint="use a smaller batch, or shuffle=False",
            )

    @property
    def num_samples(self) -> int | None:
        """Number of samples per epoch, over all ranks; None for a stream of tars."""
        return self._samples.num_samples

    @property
    def _step(self) -> int:
        return self._batch * self._world.size

    def __len__(self) -> int:
        """Return the number of batches per iteration; raise TypeError for a stream of tars."""
        if self.num_samples is None:
            raise TypeError(f"{self._samples.variant_name} has no length")
        if self._shuffle:
            return self.num_samples // self._step
        return -(-len(range(self._world.rank, self.num_samples, self._world.size)) // self._batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        require_process(self._process, what="batches")
        if not self._has_explicit_world and (current_world := joined_world()) != self._world:
            raise UserError(
                f"the data were opened as rank {self._world.rank} of {self._world.size}, but are used as rank "
                f"{current_world.rank} of {current_world.size}",
                hint="open the data after creating the process group (docs/python.md), or pass rank= and world=",
            )
        return self._iterate()

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError("batches can be iterated, but not indexed; do not wrap them in a DataLoader")

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ranks = f"rank {self._world.rank} of {self._world.size}"
        return f"<Batches of {self._batch}, {ranks}: {self._samples.describe()}>"

    def close(self) -> None:
        """Stop the threads and discard prefetched batches. A shuffled iteration continues there later."""
        iterator, self._running = self._running, None
        if iterator is not None:
            iterator.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch as a JSON-serialisable dict.

        The state is the same on all ranks unless a sample has failed.
        """
        # "taken" is the number of samples that all ranks together have used in this iteration.
        state: dict[str, Any] = {**self._samples.state_dict(), "taken": self._num_taken, "shuffle": self._shuffle}
        return state | {"position": self._cursor.position, "ahead": list(self._cursor.ahead)}

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue after the batch at which the state was saved. The next iteration yields the rest of that epoch.

        The batch size and the number of ranks may have changed. A single state is enough if no sample had failed or if
        there was only one rank; otherwise pass the states of all ranks.

        Raises:
            UserError: The states belong to different data, or to a different split, seed or order; they were saved
                after different steps; a value is not a state; or no state is given.
        """
        entries = self.state_dict().keys()
        if not states:
            raise UserError("no state is given", hint="pass the value that state_dict() returned")
        for state in states:
            if not isinstance(state, Mapping) or not entries <= state.keys() or not _is_valid(state):
                raise UserError(
                    f"not a state of these batches: {quote_value(state)}",
                    hint="pass the value that state_dict() returned, as a separate argument for each rank",
                )
            if state["shuffle"] != self._shuffle:
                raise UserError(
                    f"the state belongs to batches with shuffle={state['shuffle']}, but these have "
                    f"shuffle={self._shuffle}",
                    hint=f"open the data with shuffle={state['shuffle']}",
                )
        self.close()
        try:
            self._samples.load_state_dict(*(cast(LoaderState, state) for state in states))
        except UserError as error:
            if NEW_RUN not in (error.hint or ""):
                raise
            raise UserError(str(error), hint=_SAME_DATA_HINT) from error
        self._cursor, self._num_taken, self._is_resumed = self._samples.cursor, states[0]["taken"], True

    def _iterate(self) -> Iterator[dict[str, Any]]:
        # A generator begins the iteration only when its first batch is requested. Lightning creates iterators that it
        # never uses.
        require_process(self._process, what="batches")
        self._num_iterations += 1
        iteration, num_taken = self._num_iterations, self._num_taken if self._is_resumed else 0
        if not self._shuffle:
            self.close()
            self._cursor = self._cursor if self._is_resumed else Cursor(0)
        self._is_resumed = False
        limit = len(self) * self._step if self._shuffle and self.num_samples is not None else None
        while limit is None or num_taken < limit:
            if iteration != self._num_iterations:
                raise UserError(
                    "another iteration over these batches has begun",
                    hint="open the data once for each of the simultaneous iterations",
                )
            loaded = self._next()
            if loaded is None:
                break
            num_taken += self._step
            self._num_taken = num_taken if limit is not None and num_taken < limit else 0
            self._cursor = loaded.cursor
            if not self._shuffle and self.num_samples is not None and self._cursor.position >= self.num_samples:
                self._cursor = Cursor(0)
            list_failures(self.failures, loaded.failed, max_failures=self._max_failures)
            if loaded.batch:
                batch = cast(dict[str, Any], loaded.batch)
                yield self._finish(batch if self._device is not None else _as_arrays(batch))
                require_process(self._process, what="batches")
        if not self._shuffle:
            self._cursor = Cursor(0)

    def _next(self) -> LoadedBatch | None:
        """Return the loader's next batch; None after the last batch. Start the loader if it is not running."""
        if self._running is None:
            self._samples.cursor = self._cursor
            loaded = (
                self._samples.batches(max_failures=self._max_failures - len(self.failures))
                if self._shuffle
                else self._samples.evaluation_batches(begin=self._cursor.position)
            )
            self._running = prefetch(loaded, torch.device(self._device or "cpu"))
        try:
            return next(self._running, None)
        except BaseException as error:
            self._running = None  # a generator that has raised an error cannot continue
            if isinstance(error, TooManyFailures):
                list_failures(self.failures, error.failed, max_failures=self._max_failures)
            raise


_TYPES = {
    "position": Integral,
    "taken": Integral,
    "seed": Integral,
    "ahead": list,
    "samples": str,
    "shuffle": bool,
}
_SAME_DATA_HINT = (
    "open the same data in the same order, with the split, where=, captions, segment= and seed= of the state"
)


def _is_valid(state: Mapping[str, Any]) -> bool:
    """Return True if the entries have the types and ranges of a state that `state_dict` returns."""
    if not all(isinstance(state[name], expected) for name, expected in _TYPES.items() if name in state):
        return False
    numbers = (state["position"], state["taken"], *state["ahead"])
    return all(isinstance(number, Integral) and int(number) >= 0 for number in numbers)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _complete_first(method: _Method) -> _Method:
    """Wrap a dict method so that it first makes the late entries of the batch and of batches in its arguments."""

    @wraps(method)
    def call(batch: "LateBatch", *values: Any, **names: Any) -> Any:
        for value in (batch, *values):
            if isinstance(value, LateBatch):
                value.make()
        return method(batch, *values, **names)

    return cast(_Method, call)


class LateBatch(dict[str, Any]):
    """Dictionary with late entries, which are made when any of them is first read.

    Most training steps need neither keys nor times. Making them for every batch would take several per cent of the time
    of a loader that only copies data. Copies and pickles of a `LateBatch`, and batches that frameworks derive from it,
    contain all entries.

    Args:
        entries: All other entries, by name.
        late_names: Names of the late entries.
        make: Function that makes the late entries.
    """

    __slots__ = ("_late_names", "_make")

    def __init__(
        self,
        entries: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        late_names: Collection[str] = (),
        make: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(entries, **dict.fromkeys(late_names))
        self._late_names, self._make = late_names, make

    def make(self) -> None:
        """Make the late entries now."""
        if self._make is not None:
            make, self._make = self._make, None
            super().update(make())

    def __getitem__(self, name: str) -> Any:
        if name in self._late_names:
            self.make()
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        # Without this method, dict(batch) and {**batch} would copy the dictionary's memory without the late entries.
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    get, items, values, copy = (
        _complete_first(dict.get),
        _complete_first(dict.items),
        _complete_first(dict.values),
        _complete_first(dict.copy),
    )
    pop, popitem, setdefault, update = (
        _complete_first(dict.pop),
        _complete_first(dict.popitem),
        _complete_first(dict.setdefault),
        _complete_first(dict.update),
    )
    clear, __setitem__, __delitem__ = (
        _complete_first(dict.clear),
        _complete_first(dict.__setitem__),
        _complete_first(dict.__delitem__),
    )
    __or__, __ror__, __ior__ = (
        _complete_first(dict.__or__),
        _complete_first(dict.__ror__),
        _complete_first(dict.__ior__),
    )
    __eq__, __ne__, __repr__ = (
        _complete_first(dict.__eq__),
        _complete_first(dict.__ne__),
        _complete_first(dict.__repr__),
    )


def _as_arrays(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with arrays instead of tensors. NumPy has no bfloat16, so bfloat16 becomes float32."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    arrays = {
        name: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()
    }
    return batch | arrays
