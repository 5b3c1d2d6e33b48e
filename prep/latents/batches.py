"""Batches across chunks: the model always gets full batches, and each chunk gets its own frames back, in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from prep.failures import SourceFailure
from prep.latents.pieces import Piece

if TYPE_CHECKING:
    import torch

C = TypeVar("C")


@dataclass(frozen=True)
class EncodedChunk(Generic[C]):
    """The latents of one chunk, float32 [F, C, h, w], or why there are none."""

    chunk: C
    latents: NDArray[np.float32] | None
    failure: SourceFailure | None = None


@dataclass
class _Growing(Generic[C]):
    chunk: C
    parts: list[NDArray[np.float32]] = field(default_factory=list)
    num_frames: int = 0  # decoded so far
    num_waiting: int = 0  # of these, in no finished batch yet
    is_ended: bool = False
    failure: SourceFailure | None = None


def encoded_chunks(
    pieces: Iterable[Piece[C]],
    *,
    resized: Callable[[NDArray[np.uint8]], "torch.Tensor"],
    encode: Callable[["torch.Tensor", list[tuple[C, int, int]]], NDArray[np.float32]],
    batch: int,
) -> Iterator[EncodedChunk[C]]:
    """Runs the model over the pieces of many chunks, `batch` frames at a time; chunks come out in order.

    Args:
        pieces: of one chunk after another; the last of each has no crops.
        resized: crops [N, S, S, 3] as pictures of one size for all chunks.
        encode: latents of a batch of pictures; also gets whose they are, as (chunk, first frame, frames).
    """
    import torch

    growing: deque[_Growing[C]] = deque()
    waiting: list[tuple[_Growing[C], int, torch.Tensor]] = []
    for piece in pieces:
        if not growing or growing[-1].is_ended:
            growing.append(_Growing(piece.chunk))
        owner = growing[-1]
        if piece.crops is None:
            owner.is_ended, owner.failure = True, piece.failure
        else:
            pictures = resized(piece.crops)
            while len(pictures):
                room = batch - sum(len(part) for _, _, part in waiting)
                waiting.append((owner, owner.num_frames, pictures[:room]))
                owner.num_frames += len(pictures[:room])
                owner.num_waiting += len(pictures[:room])
                pictures = pictures[room:]
                if sum(len(part) for _, _, part in waiting) == batch:
                    _run(waiting, encode)
                    waiting = []
        yield from _finished(growing)
    if waiting:
        _run(waiting, encode)
    yield from _finished(growing)


def _run(
    waiting: list[tuple[_Growing[C], int, "torch.Tensor"]],
    encode: Callable[["torch.Tensor", list[tuple[C, int, int]]], NDArray[np.float32]],
) -> None:
    import torch

    latents = encode(
        torch.cat([pictures for _, _, pictures in waiting]),
        [(owner.chunk, first, len(pictures)) for owner, first, pictures in waiting],
    )
    begin = 0
    for owner, _, pictures in waiting:
        owner.parts.append(latents[begin : begin + len(pictures)])
        owner.num_waiting -= len(pictures)
        begin += len(pictures)


def _finished(growing: deque[_Growing[C]]) -> Iterator[EncodedChunk[C]]:
    while growing and growing[0].is_ended and not growing[0].num_waiting:
        done = growing.popleft()
        if done.failure is not None or not done.parts:
            yield EncodedChunk(done.chunk, None, done.failure)
        else:
            yield EncodedChunk(done.chunk, np.concatenate(done.parts))
