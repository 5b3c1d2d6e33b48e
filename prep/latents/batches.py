"""Form batches across chunks. Threads decode chunks ahead of the model, and crop the frames.

    chunk ──► thread: decode, crop ──► one short queue per chunk ──► batches, in the order of the chunks ──► model

The thread of a chunk blocks while its queue is full. Therefore memory use depends neither on the length of a chunk nor
on the speed of the model.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, islice, repeat
from queue import Full, Queue
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.prep.core.chunk_content import ChunkContent
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.latents.frames import Square, frames_on_screen, segment_squares, segments_of
from clipmill.prep.latents.recipe import Encoding

BLOCK_FRAMES = 16
# Maximum number of blocks in the queue of a chunk: 64 frames, more than a chunk has by default, or four segments.
BLOCKS_AHEAD = 4
_RETRY_S = 0.2  # interval at which a thread with a full queue checks whether it must stop

C = TypeVar("C")


@dataclass(frozen=True)
class FrameSelection:
    """Frames of a chunk to decode.

    Attributes:
        content: Content of the chunk.
        indices: Indices of the frames, in ascending order; an index may be repeated.
    """

    content: ChunkContent
    indices: list[int]

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the selected frames, uint8 [H, W, 3]."""
        counts = Counter(self.indices)
        for frame, count in zip(self.content.frames([*counts]), counts.values(), strict=True):
            # Use a single thread: starting threads takes longer than converting a picture of this resolution.
            yield from repeat(np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8), count)


@dataclass(frozen=True)
class ChunkVideo:
    """The frames of a chunk to decode, and their crops.

    Attributes:
        sources: Frames of the chunk, and one frame of the next chunk if the last segment ends with that frame.
        num_repeated: Number of repetitions of the last frame.
        segment_frames: Number of frames in a segment.
        squares: Crop of each segment.
        is_video: True if each segment is encoded as a unit.
    """

    sources: list[FrameSelection]
    num_repeated: int
    segment_frames: int
    squares: list[Square]
    is_video: bool


@dataclass(frozen=True)
class FrameBlock(Generic[C]):
    """Consecutive frames of one chunk: crops, uint8 [N, S, S, 3], or a segment, uint8 [1, F, S, S, 3].

    The last block of a chunk has no crops. If the chunk failed, this block contains the failure.
    """

    chunk: C
    crops: NDArray[np.uint8] | None
    failure: SourceFailure | None = None


def decode_blocks(chunks: Iterable[C], *, read: Callable[[C], ChunkVideo], num_threads: int) -> Iterator[FrameBlock[C]]:
    """Decode `num_threads` chunks in parallel, and yield the blocks of all chunks in order.

    Args:
        read: Function that reads a chunk and returns its frames and crops. It may raise SourceFailure.

    Raises:
        Exception: Reading or decoding a chunk raised an exception other than SourceFailure.
    """
    queue = iter(chunks)
    decoders: deque[_ChunkDecoder[C]] = deque()
    try:
        while True:
            decoders.extend(_ChunkDecoder(chunk, read) for chunk in islice(queue, num_threads - len(decoders)))
            if not decoders:
                return
            yield from decoders[0].blocks()
            decoders.popleft()
    finally:
        for decoder in decoders:
            decoder.stop()


class _ChunkDecoder(Generic[C]):
    """Thread that decodes one chunk."""

    def __init__(self, chunk: C, read: Callable[[C], ChunkVideo]) -> None:
        self._chunk, self._read = chunk, read
        self._queue: Queue[FrameBlock[C] | Exception] = Queue(BLOCKS_AHEAD)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def blocks(self) -> Iterator[FrameBlock[C]]:
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
            for crops in crop_frames(self._read(self._chunk)):
                if not self._put(FrameBlock(self._chunk, crops)):
                    return
            self._put(FrameBlock(self._chunk, None))
        except SourceFailure as failure:
            self._put(FrameBlock(self._chunk, None, failure))
        except Exception as error:  # noqa: BLE001 - raised again by the consumer
            self._put(error)

    def _put(self, item: FrameBlock[C] | Exception) -> bool:
        while not self._is_stopped.is_set():
            with suppress(Full):
                self._queue.put(item, timeout=_RETRY_S)
                return True
        return False


def crop_frames(video: ChunkVideo) -> Iterator[NDArray[np.uint8]]:
    """Yield the crops of the selected frames.

    Yields:
        Up to BLOCK_FRAMES crops, uint8 [N, S, S, 3], or one segment, uint8 [1, F, S, S, 3]. S is the same for all crops
        of a chunk.
    """
    crops: list[NDArray[np.uint8]] = []
    size = video.segment_frames if video.is_video else BLOCK_FRAMES
    for index, frame in enumerate(_pictures(video)):
        square = video.squares[index // video.segment_frames]
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
            message = f"the next chunk has frames of shape {frame.shape}, but this chunk has frames of shape {shape}"
            raise SourceFailure(FailureCode.FRAMES_DIFFER, message)
        yield frame
    if frame is not None:
        yield from repeat(frame, video.num_repeated)


def read_chunk_video(chunk: Chunk, encoding: Encoding) -> ChunkVideo:
    """Read a chunk, and determine its frames and crops for encoding.

    Raises:
        SourceFailure: chunk_damaged, if the chunk or the next chunk does not match its committed checksum;
            frames_differ, if an exact crop is larger than the frames.
    """
    segments, fps = segments_of(chunk.length, encoding), encoding.settings.fps_exact
    sources = [FrameSelection(chunk.read(), segments.frames)]
    if segments.has_next_frame and chunk.next is not None:
        # The next chunk provides the frame at the first sampling time after this chunk.
        num_shown = len(frames_on_screen(chunk["num_frames"], chunk_fps=chunk.fps, fps=fps))
        offset_s = num_shown / fps - Fraction(chunk.next["start_ms"] - chunk["start_ms"], 1000)
        sources.append(FrameSelection(chunk.next.read(), [int(max(Fraction(0), offset_s) * chunk.next.fps)]))
    return ChunkVideo(
        sources=sources,
        num_repeated=segments.num_repeated,
        segment_frames=encoding.segment_frames,
        squares=chunk_squares(chunk, encoding),
        is_video=encoding.is_video,
    )


def chunk_squares(chunk: Chunk, encoding: Encoding) -> list[Square]:
    """Return the crop of each segment of a chunk.

    Raises:
        SourceFailure: frames_differ, if an exact crop is larger than the frames.
    """
    segments = segments_of(chunk.length, encoding)
    num_segments = len(segments.lengths) or -(-len(segments.frames) // encoding.segment_frames)
    size = {"width": chunk["width"], "height": chunk["height"]}
    return segment_squares(num_segments, content=chunk.content, settings=encoding.settings, **size)


@dataclass(frozen=True)
class EncodedChunk(Generic[C]):
    """Latents of N frames, float32 [N, C, h, w], or N segments, [N, C, T', h, w], of a chunk; or its failure."""

    chunk: C
    latents: NDArray[np.float32] | None
    failure: SourceFailure | None = None


@dataclass
class _UnfinishedChunk(Generic[C]):
    chunk: C
    latents: list[NDArray[np.float32]] = field(default_factory=list)
    num_decoded: int = 0  # number of pictures decoded so far
    num_waiting: int = 0  # number of decoded pictures that are not encoded yet
    is_ended: bool = False  # True once the last block of the chunk has arrived
    failure: SourceFailure | None = None


@dataclass(frozen=True)
class BatchPart(Generic[C]):
    """Consecutive pictures of one chunk in a batch.

    Attributes:
        first: Index of the first picture among the pictures of the chunk.
        pictures: Array or tensor of N pictures of the same size, or of N segments, on the CPU or a GPU.
    """

    owner: _UnfinishedChunk[C]
    first: int
    pictures: Any

    @property
    def chunk(self) -> C:
        return self.owner.chunk


Encode = Callable[[list[BatchPart[C]]], NDArray[np.float32]]


def encode_chunks(
    blocks: Iterable[FrameBlock[C]],
    *,
    resize: Callable[[NDArray[np.uint8]], Any],
    encode: Encode[C],
    batch: int,
) -> Iterator[EncodedChunk[C]]:
    """Encode the blocks of many chunks, `batch` pictures or segments at a time, and yield the chunks in order.

    Args:
        blocks: Blocks of one chunk after another; the last block of each chunk has no crops.
        resize: Function that converts crops [N, S, S, 3] to N pictures, or [N, F, S, S, 3] to N segments. The
            pictures of all chunks have the same resolution.
        encode: Function that returns the latents of the pictures in all parts, concatenated.
    """
    unfinished: deque[_UnfinishedChunk[C]] = deque()
    batch_parts: list[BatchPart[C]] = []
    for block in blocks:
        if not unfinished or unfinished[-1].is_ended:
            unfinished.append(_UnfinishedChunk(block.chunk))
        owner = unfinished[-1]
        if block.crops is None:
            owner.is_ended, owner.failure = True, block.failure
        else:
            pictures = resize(block.crops)
            while len(pictures):
                num_free = batch - sum(len(part.pictures) for part in batch_parts)
                part = BatchPart(owner, owner.num_decoded, pictures[:num_free])
                batch_parts.append(part)
                owner.num_decoded += len(part.pictures)
                owner.num_waiting += len(part.pictures)
                pictures = pictures[num_free:]
                if len(part.pictures) == num_free:
                    _encode_batch(batch_parts, encode)
                    batch_parts = []
        yield from _pop_complete(unfinished)
    if batch_parts:
        _encode_batch(batch_parts, encode)
    yield from _pop_complete(unfinished)


def _encode_batch(parts: list[BatchPart[C]], encode: Encode[C]) -> None:
    """Encode a batch, and distribute the latents to the chunks."""
    latents = encode(parts)
    for part in parts:
        num_pictures = len(part.pictures)
        part.owner.latents.append(latents[:num_pictures])
        part.owner.num_waiting -= num_pictures
        latents = latents[num_pictures:]


def _pop_complete(unfinished: deque[_UnfinishedChunk[C]]) -> Iterator[EncodedChunk[C]]:
    """Remove and yield the chunks at the front of the queue whose pictures are all encoded."""
    while unfinished and unfinished[0].is_ended and not unfinished[0].num_waiting:
        owner = unfinished.popleft()
        if owner.failure is not None or not owner.latents:
            yield EncodedChunk(owner.chunk, None, owner.failure)
        else:
            yield EncodedChunk(owner.chunk, np.concatenate(owner.latents))
