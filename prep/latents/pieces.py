"""Decoding ahead of the model: threads decode chunks and crop the frames, with a bounded number of frames in memory.

    chunk ──► thread: decode, crop ──► one short queue per chunk ──► consumer, which takes the chunks in order

The thread of a chunk blocks while its queue is full, so that memory use depends neither on the length of a chunk nor on
the speed of the model.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice, repeat
from queue import Full, Queue
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.prep.core.chunk_input import decode_frames
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.latents.frames import Square

PIECE_FRAMES = 16
PIECES_AHEAD = 4  # queue length per chunk: with 60 frames, the whole chunk; of a video VAE, four segments
_RETRY_S = 0.2

C = TypeVar("C")


@dataclass(frozen=True)
class WantedFrames:
    """Frames to decode of an MP4 file: `wanted` has their indices, ascending; one may occur several times."""

    content: bytes
    fps: Fraction
    packet_frame: list[int]
    packet_flags: list[int]
    wanted: list[int]

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the wanted frames, uint8 [H, W, 3]."""
        counts = Counter(self.wanted)
        frames = decode_frames(
            self.content, [*counts], fps=self.fps, packet_frame=self.packet_frame, packet_flags=self.packet_flags
        )
        for decoded, count in zip(frames, counts.values(), strict=True):
            # One thread: to start others takes longer than to convert a picture of this size.
            yield from repeat(np.asarray(decoded.to_ndarray(format="rgb24", threads=1), np.uint8), count)


@dataclass(frozen=True)
class ChunkVideo:
    """What to decode of a chunk.

    Attributes:
        sources: the chunk, and perhaps the next one for a single frame.
        num_repeated: how often the last frame is repeated.
        segment_frames: number of frames in a segment.
        squares: crop of each segment.
        is_video: whether segments are encoded as a whole.
    """

    sources: list[WantedFrames]
    num_repeated: int
    segment_frames: int
    squares: list[Square]
    is_video: bool


@dataclass(frozen=True)
class Piece(Generic[C]):
    """Frames of one chunk, in order: crops uint8 [N, S, S, 3], or a segment, uint8 [1, F, S, S, 3].

    The last piece of a chunk has no crops, or a failure.
    """

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
        self._queue: Queue[Piece[C] | Exception] = Queue(PIECES_AHEAD)
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
    """Yield the crops of the wanted frames: uint8 [N, S, S, 3] with N up to PIECE_FRAMES, or segment by segment.

    S is the same for the whole chunk.
    """
    crops: list[NDArray[np.uint8]] = []
    size = video.segment_frames if video.is_video else PIECE_FRAMES
    for number, frame in enumerate(_pictures(video)):
        square = video.squares[number // video.segment_frames]
        crops.append(frame[square.top : square.top + square.side, square.left : square.left + square.side])
        if len(crops) == size:
            yield np.stack(crops)[None] if video.is_video else np.stack(crops)
            crops = []
    if crops:
        yield np.stack(crops)


def _pictures(video: ChunkVideo) -> Iterator[NDArray[np.uint8]]:
    shape, frame = None, None
    for frame in chain.from_iterable(source.pictures() for source in video.sources):
        if frame.shape != (shape := shape or frame.shape):
            raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the next chunk has frames of {frame.shape}, not {shape}")
        yield frame
    if frame is not None:
        yield from repeat(frame, video.num_repeated)
