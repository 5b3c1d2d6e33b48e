"""Latents from plain tars that other tools wrote: no index, no commits, read from front to back by webdataset.

Much slower than `LatentLoader`, in the order of the tars, and without captions; the names in a batch are the same. A
tar that was cut short between two members cannot be told from a whole one: nothing says how long it should be.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.batch import Batch

_Segment = tuple[str, NDArray[Any]]


class LatentStream:
    """Batches from the `.npy` members of tars, [F, C, h, w] each; float16, or the bits of bfloat16 as uint16.

    Args:
        tars: paths or addresses that webdataset opens; `{000000..000099}` stands for many.
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
        for sample in _samples([str(tar) for tar in self._tars]):
            if self._extension not in sample:
                there = ", ".join(sorted(name for name in sample if not name.startswith("__")))
                raise UserError(
                    f"{sample['__url__']}: {sample['__key__']} has no member {self._extension}",
                    hint=f"give the extension of the latents; it has: {there}",
                )
            try:
                array = np.load(io.BytesIO(sample[self._extension]), allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise _unreadable(f"{sample['__url__']}: {sample['__key__']}", error) from error
            if not isinstance(array, np.ndarray) or array.ndim != 4 or array.dtype not in (np.float16, np.uint16):
                raise UserError(
                    f"{sample['__url__']}: {sample['__key__']} has {_described(array)}",
                    hint="latents are [frames, channels, height, width] of float16, or the bits of bfloat16 as uint16",
                )
            yield str(sample["__key__"]), array


def _samples(tars: list[str]) -> Iterator[dict[str, Any]]:
    import webdataset as wds

    expanded = [tar for pattern in tars for tar in wds.shardlists.expand_urls(pattern)]
    # No node splitter: webdataset would give whole tars to ranks, some more than others.
    samples = iter(wds.WebDataset(expanded, shardshuffle=False, nodesplitter=None, empty_check=False))
    while True:
        try:
            sample = next(samples, None)
        except (OSError, tarfile.TarError, ValueError, EOFError) as error:
            raise _unreadable(" ".join(tars), error) from error
        if sample is None:
            return
        yield sample


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


def _unreadable(what: str, error: Exception) -> UserError:
    return UserError(f"{what}: cannot be read: {error}", hint="give whole tars of .npy members")
