"""The keys of a batch's chunks, made when they are asked for: a training step does not look at them."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from train.data.latents.segment_set import SegmentSet


class Keys(Sequence[str]):
    """Keys of `chunks`, in their order; equal to any sequence of the same strings."""

    __slots__ = ("_chunks", "_set")

    def __init__(self, chunks: NDArray[np.int64], samples: SegmentSet) -> None:
        self._chunks = chunks
        self._set = samples

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._set.key(chunk) for chunk in self._chunks[index].tolist()]
        return self._set.key(int(self._chunks[index]))

    def __iter__(self) -> Iterator[str]:
        return (self._set.key(chunk) for chunk in self._chunks.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
