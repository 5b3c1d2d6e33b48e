"""Batching across chunks: the model gets full batches, and each chunk gets its own latents back, in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.latents.pieces import Piece

C = TypeVar("C")
P = TypeVar("P", bound="Pictures")


class Pictures(Protocol):
    """Pictures of the same size, or segments of equally many of them, in memory or on a device."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


@dataclass(frozen=True)
class EncodedChunk(Generic[C]):
    """The latents of one chunk, float32 [F, C, h, w] or [S, C, T', h, w], or the reason why there are none."""

    chunk: C
    latents: NDArray[np.float32] | None
    failure: SourceFailure | None = None


@dataclass
class _Growing(Generic[C]):
    chunk: C
    latents: list[NDArray[np.float32]] = field(default_factory=list)
    num_decoded: int = 0  # number of pictures decoded so far
    num_waiting: int = 0  # number of these that are not in a finished batch yet
    is_ended: bool = False
    failure: SourceFailure | None = None


@dataclass(frozen=True)
class PicturesOfChunk(Generic[C, P]):
    """The pictures in a batch that belong to one chunk, starting with its number `first`."""

    owner: _Growing[C]
    first: int
    pictures: P

    @property
    def chunk(self) -> C:
        return self.owner.chunk


Encode = Callable[[list[PicturesOfChunk[C, P]]], NDArray[np.float32]]


def encoded_chunks(
    pieces: Iterable[Piece[C]],
    *,
    resized: Callable[[NDArray[np.uint8]], P],
    encode: Encode[C, P],
    batch: int,
) -> Iterator[EncodedChunk[C]]:
    """Run the model over the pieces of many chunks, `batch` pictures at a time, and yield the chunks in order.

    Args:
        pieces: pieces of one chunk after another; the last piece of each chunk has no crops.
        resized: convert crops [N, S, S, 3] to N pictures of the same size for all chunks, or [N, F, S, S, 3] to N
            segments.
        encode: return the latents of the pictures of all parts, concatenated.
    """
    growing: deque[_Growing[C]] = deque()
    waiting: list[PicturesOfChunk[C, P]] = []
    for piece in pieces:
        if not growing or growing[-1].is_ended:
            growing.append(_Growing(piece.chunk))
        owner = growing[-1]
        if piece.crops is None:
            owner.is_ended, owner.failure = True, piece.failure
        else:
            pictures = resized(piece.crops)
            while len(pictures):
                room = batch - sum(len(part.pictures) for part in waiting)
                part = PicturesOfChunk(owner, owner.num_decoded, pictures[:room])
                waiting.append(part)
                owner.num_decoded += len(part.pictures)
                owner.num_waiting += len(part.pictures)
                pictures = pictures[room:]
                if len(part.pictures) == room:
                    _run(waiting, encode)
                    waiting = []
        yield from _finished(growing)
    if waiting:
        _run(waiting, encode)
    yield from _finished(growing)


def _run(parts: list[PicturesOfChunk[C, P]], encode: Encode[C, P]) -> None:
    latents = encode(parts)
    for part in parts:
        own, latents = latents[: len(part.pictures)], latents[len(part.pictures) :]
        part.owner.latents.append(own)
        part.owner.num_waiting -= len(own)


def _finished(growing: deque[_Growing[C]]) -> Iterator[EncodedChunk[C]]:
    while growing and growing[0].is_ended and not growing[0].num_waiting:
        done = growing.popleft()
        if done.failure is not None or not done.latents:
            yield EncodedChunk(done.chunk, None, done.failure)
        else:
            yield EncodedChunk(done.chunk, np.concatenate(done.latents))
