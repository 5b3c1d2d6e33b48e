"""Latents from plain tars that other tools wrote: no index, no commits, read from front to back.

Much slower than `LatentLoader`, in the order of the tars, and without captions; the names in a batch are the same.
Nothing compares checksums.
"""

import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.batch import Batch
from train.data.remote.files import local_copy
from train.data.streams.samples import MAX_SAMPLE_BYTES, TarSample, Unreadable, samples_of
from train.data.streams.tars import expand

_Segment = tuple[str, NDArray[Any]]


class LatentStream:
    """Batches from the `.npy` members of tars, [F, C, h, w] each; float16, or the bits of bfloat16 as uint16.

    Args:
        tars: paths or addresses; `{000000..000099}` stands for many.
        num_frames: of a segment; None makes one sample of each member.
        extension: of the members.
        rank, num_ranks: rank r takes every num_ranks-th segment; all ranks read everything.

    Attributes:
        num_tails: members that ended with fewer frames than a segment, which were left out, as of now.
    """

    def __init__(
        self,
        tars: Sequence[str | Path],
        *,
        batch: int = 32,
        num_frames: int | None = None,
        extension: str = "latents.npy",
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if batch < 1 or not 0 <= rank < num_ranks:
            raise ValueError(f"batch={batch}, rank={rank} of {num_ranks}: out of range")
        self._tars, self._batch, self._num_frames, self._extension = tars, batch, num_frames, extension
        self._rank, self._num_ranks = rank, num_ranks
        self.num_tails = 0

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the tars; the last batch may be smaller.

        Raises:
            UserError: a tar cannot be read, or a member is missing, is no array, or is unlike those before it.
        """
        self.num_tails = 0
        own = islice(enumerate(self._segments()), self._rank, None, self._num_ranks)
        while waiting := list(islice(own, self._batch)):
            yield _batch(waiting)

    def _segments(self) -> Iterator[_Segment]:
        first: _Segment | None = None
        for key, array in self._members():
            size = self._num_frames or len(array)
            if len(array) % size:
                self.num_tails += 1
            for begin in range(0, len(array) - size + 1, size):
                segment = (key, array[begin : begin + size])
                first = first or segment
                if (segment[1].shape, array.dtype) != (first[1].shape, first[1].dtype):
                    raise UserError(
                        f"latents differ: {first[0]} has {_described(first[1])}, {key} has {_described(segment[1])}",
                        hint="give num_frames, the frames of a segment, where only the lengths differ",
                    )
                yield segment

    def _members(self) -> Iterator[_Segment]:
        for tar in (tar for pattern in self._tars for tar in expand(str(pattern))):
            for sample in self._samples(tar):
                if isinstance(sample, Unreadable):
                    raise _unreadable(f"{tar}: {sample.key}", sample.detail)
                if self._extension not in sample.members:
                    raise UserError(
                        f"{tar}: {sample.key} has no member {self._extension}",
                        hint=f"give the extension of the latents; it has: {', '.join(sorted(sample.members)[:20])}",
                    )
                yield sample.key, _array(sample.members[self._extension], what=f"{tar}: {sample.key}")

    def _samples(self, tar: str) -> Iterator[TarSample | Unreadable]:
        try:
            path = local_copy(tar, cache=None)
            yield from samples_of(tar, path, limits={self._extension: MAX_SAMPLE_BYTES})
        except OSError as error:
            raise _unreadable(tar, error) from error


def _array(content: bytes, *, what: str) -> NDArray[Any]:
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:  # the last for a shape that is larger than its member
        raise _unreadable(what, error) from error
    if not isinstance(array, np.ndarray) or array.ndim != 4 or array.dtype not in (np.float16, np.uint16):
        raise UserError(
            f"{what} has {_described(array)}",
            hint="latents are [frames, channels, height, width] of float16, or the bits of bfloat16 as uint16",
        )
    return array


def _batch(numbered: list[tuple[int, _Segment]]) -> Batch:
    import torch

    latents = torch.from_numpy(np.stack([array for _, (_, array) in numbered]))
    return Batch(
        input="latents",
        position=torch.tensor([number for number, _ in numbered]),
        key=[key for _, (key, _) in numbered],
        latents=latents.view(torch.bfloat16) if latents.dtype == torch.uint16 else latents,
    )


def _described(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__


def _unreadable(what: str, error: object) -> UserError:
    return UserError(f"{what}: cannot be read: {error}", hint="give whole tars of .npy members")
