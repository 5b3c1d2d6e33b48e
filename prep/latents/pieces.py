"""Decoding ahead of the model: threads decode chunks and crop the frames, with a bounded number of frames in memory.

    chunk ──► thread: decode, crop ──► one short queue per chunk ──► consumer, which takes the chunks in order

The thread of a chunk blocks while its queue is full, so that memory use depends neither on the length of a chunk nor on
the speed of the model.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from queue import Full, Queue
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.prep.core.chunk_frames import decode_frames
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.latents.frames import Square

PIECE_FRAMES = 16
_PIECES_AHEAD = 4  # queue length per chunk: with 60 frames, the whole chunk
_RETRY_S = 0.2

C = TypeVar("C")


@dataclass(frozen=True)
class ChunkVideo:
    """What to decode of a chunk.

    Attributes:
        wanted: indices of the frames, ascending.
        squares: crop of each segment; a segment has `segment_frames` wanted frames.
    """

    content: bytes
    fps: Fraction
    packet_frame: list[int]
    packet_flags: list[int]
    wanted: list[int]
    segment_frames: int
    squares: list[Square]


@dataclass(frozen=True)
class Piece(Generic[C]):
    """Frames of one chunk, in order: crops uint8 [N, S, S, 3]. The last piece of a chunk has no crops, or a failure."""

    chunk: C
    crops: NDArray[np.uint8] | None
    failure: SourceFailure | None = None


def pieces_in_order(chunks: Iterable[C], *, read: Callable[[C], ChunkVideo], num_threads: int) -> Iterator[Piece[C]]:
    """Yield the pieces of all `chunks` in order; `num_threads` chunks are decoded in parallel.

    Args:
        read: read a chunk and return what to decode of it; may raise SourceFailure.

    Raises:
        Exception: any other exception that `read` raises.
    """
    waiting = iter(chunks)
    running: deque[_Decoding[C]] = deque()
    try:
        while True:
            running.extend(_Decoding(chunk, read) for chunk in islice(waiting, num_threads - len(running)))
            if not running:
                return
            yield from running[0].pieces()
            running.popleft()
    finally:
        for decoding in running:
            decoding.stop()


class _Decoding(Generic[C]):
    """A chunk that a thread is decoding."""

    def __init__(self, chunk: C, read: Callable[[C], ChunkVideo]) -> None:
        self._chunk, self._read = chunk, read
        self._queue: Queue[Piece[C] | Exception] = Queue(_PIECES_AHEAD)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def pieces(self) -> Iterator[Piece[C]]:
        while True:
            item = self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.crops is None:
                return

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for crops in cut(self._read(self._chunk)):
                if not self._put(Piece(self._chunk, crops)):
                    return
            self._put(Piece(self._chunk, None))
        except SourceFailure as failure:
            self._put(Piece(self._chunk, None, failure))
        except Exception as error:  # noqa: BLE001 - raised again by the consumer
            self._put(error)

    def _put(self, item: Piece[C] | Exception) -> bool:
        while not self._is_stopped.is_set():
            with suppress(Full):
                self._queue.put(item, timeout=_RETRY_S)
                return True
        return False


def cut(video: ChunkVideo) -> Iterator[NDArray[np.uint8]]:
    """Yield the crops of the wanted frames, up to PIECE_FRAMES at a time: uint8 [N, S, S, 3].

    S is the same for the whole chunk.
    """
    frames = decode_frames(
        video.content,
        video.wanted,
        fps=video.fps,
        packet_frame=video.packet_frame,
        packet_flags=video.packet_flags,
    )
    crops: list[NDArray[np.uint8]] = []
    for number, decoded in enumerate(frames):
        frame = np.asarray(decoded.to_ndarray(format="rgb24"), np.uint8)
        square = video.squares[number // video.segment_frames]
        crops.append(frame[square.top : square.top + square.side, square.left : square.left + square.side])
        if len(crops) == PIECE_FRAMES:
            yield np.stack(crops)
            crops = []
    if crops:
        yield np.stack(crops)
