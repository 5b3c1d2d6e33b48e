"""How the videos of a plan are cut into chunks, evenly or at shot boundaries: pure arithmetic on frame counts.

`shot_chunks` states the rule for shots that are too long or too short for a chunk.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.prep.core.table_file import as_array
from clipmill.prep.video.encode import Span, chunks_of, num_chunks_of, num_output_frames, span_of
from clipmill.prep.video.settings import SPAN_CHUNKS, ChunkSettings, ResolvedRecipe


@dataclass(frozen=True)
class ShotChunks:
    """The chunks of one video with `--cut shots`.

    Attributes:
        chunks: (first frame, number of frames) of each chunk, ascending.
        num_left_out: number of shots that are too short for a chunk of their own and fit nowhere else.
    """

    chunks: list[tuple[int, int]]
    num_left_out: int


def shot_chunks(cuts: Sequence[int], num_frames: int, *, max_frames: int, min_frames: int) -> ShotChunks:
    """Divide a video at its shot boundaries into chunks of `min_frames` to `max_frames` frames.

    1. A shot longer than `max_frames` is divided into the smallest number of chunks, whose lengths differ by at most
       one frame: equal parts, and not a long row of full chunks with a short rest.
    2. From the start of the video on, a shot shorter than `min_frames` is joined to the shorter one of the chunk before
       it and the shot after it, of those that leave the result within `max_frames`, until it is long enough.
    3. A shot that is still too short is left out.

    Args:
        cuts: first frame of every shot but the first one, ascending.
        min_frames: at most half of `max_frames`, rounded up, so that the parts of a long shot are long enough.
    """
    parts = list(_parts(cuts, num_frames, max_frames=max_frames))
    chunks: list[tuple[int, int]] = []
    num_left_out, number = 0, 0
    while number < len(parts):
        first, frames = parts[number]
        begin = number
        number += 1
        while frames < min_frames:
            # Nothing was left out in between: what follows a shot without room is longer than half of `max_frames`.
            before = chunks[-1][1] if chunks else max_frames
            after = parts[number][1] if number < len(parts) else max_frames
            if frames + min(before, after) > max_frames:
                break
            if before <= after:
                first, frames = chunks.pop()[0], before + frames
            else:
                frames += after
                number += 1
        if frames >= min_frames:
            chunks.append((first, frames))
        else:
            num_left_out += number - begin
    return ShotChunks(chunks, num_left_out)


def _parts(cuts: Sequence[int], num_frames: int, *, max_frames: int) -> Iterator[tuple[int, int]]:
    """Yield (first frame, number of frames) of each shot, and of each part of a shot that is too long."""
    for begin, end in zip([0, *cuts], [*cuts, num_frames], strict=True):
        num_parts = -(-(end - begin) // max_frames)
        borders = [begin + (end - begin) * part // num_parts for part in range(num_parts + 1)]
        yield from ((first, behind - first) for first, behind in pairwise(borders))


class Cutting(Protocol):
    """How all videos of a plan are cut; a video without chunks is unusable, or nothing is known of it yet."""

    @property
    def num_left_out(self) -> int:
        """Number of shots or tails that are in no chunk."""
        ...

    @property
    def frames_left_out(self) -> int:
        """Number of their frames."""
        ...

    @property
    def videos_left_out(self) -> Sequence[int]:
        """Videos with such shots or tails."""
        ...

    @property
    def num_chunks(self) -> np.ndarray:
        """Number of chunks of each video, int64."""
        ...

    def span(self, video: int, index: int) -> Span:
        """Return one span of a video."""
        ...

    def span_frames(self, videos: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the number of frames of spans, int64, for an estimate."""
        ...

    def identities(self, videos: np.ndarray) -> pa.Array:
        """Return a text for each of some videos, which may repeat, that identifies all of its chunks (string array).

        It is part of the fingerprints of shards.
        """
        ...


@dataclass(frozen=True)
class EvenCutting:
    """Chunks of equal length.

    Attributes:
        num_frames: number of frames of each video, int64; 0 if it is unusable.
    """

    num_frames: np.ndarray
    chunk_frames: int
    tail: str
    span_chunks: int

    @property
    def num_chunks(self) -> np.ndarray:
        return num_chunks_of(self.num_frames, chunk_frames=self.chunk_frames, tail=self.tail)

    @property
    def num_left_out(self) -> int:
        return len(self.videos_left_out)

    @property
    def frames_left_out(self) -> int:
        return int(self._rests[self.videos_left_out].sum())

    @cached_property
    def videos_left_out(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self._rests).tolist() if self.tail == "drop" else []
        return rows

    @property
    def _rests(self) -> np.ndarray:
        return self.num_frames % self.chunk_frames

    def short_tails(self, *, max_frames: int) -> dict[int, int]:
        """Return the videos that end in a chunk of fewer than `max_frames` frames of its own, with its length."""
        rest = self._rests if self.tail == "keep" else np.zeros_like(self.num_frames)
        found = np.flatnonzero((rest > 0) & (rest < max_frames) & (self.num_frames > self.chunk_frames))
        return dict(zip(found.tolist(), rest[found].tolist(), strict=True))

    def span(self, video: int, index: int) -> Span:
        chunks = chunks_of(int(self.num_frames[video]), chunk_frames=self.chunk_frames, tail=self.tail)
        return span_of(chunks, index=index, span_chunks=self.span_chunks)

    def span_frames(self, videos: np.ndarray, index: np.ndarray) -> np.ndarray:
        frames_per_span = self.span_chunks * self.chunk_frames
        return np.minimum(self.num_frames[videos] - index * frames_per_span, frames_per_span)

    def identities(self, videos: np.ndarray) -> pa.Array:
        return pa.array(self.num_frames[videos]).cast(pa.string())


@dataclass(frozen=True)
class ShotCutting:
    """Chunks that begin and end at shot boundaries.

    Attributes:
        begins: index of the first chunk of each video, and the number of all chunks, int64 [videos + 1].
        first_frame: first frame of each chunk in its video, int64 [chunks].
        chunk_frames: number of frames of each chunk, int64 [chunks].
        num_left_out: number of shots of all videos that are in no chunk.
        frames_left_out: number of their frames.
        videos_left_out: videos with such shots.
    """

    begins: np.ndarray
    first_frame: np.ndarray
    chunk_frames: np.ndarray
    span_chunks: int
    num_left_out: int
    frames_left_out: int
    videos_left_out: Sequence[int]

    @property
    def num_chunks(self) -> np.ndarray:
        return np.diff(self.begins)

    def span(self, video: int, index: int) -> Span:
        begin, end = self._rows(video, index)
        first, frames = self.first_frame[begin:end].tolist(), self.chunk_frames[begin:end].tolist()
        ends = [start + length for start, length in zip(first, frames, strict=True)]
        gaps = (0, *(start - end for start, end in zip(first[1:], ends[:-1], strict=True)))
        return Span(
            index=index,
            first_frame=first[0],
            chunk_frames=tuple(frames),
            is_last=end == self.begins[video + 1],
            gaps=gaps if any(gaps) else (),
        )

    def span_frames(self, videos: np.ndarray, index: np.ndarray) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(self.chunk_frames)])
        begin, end = self._rows(videos, index)
        return before[end] - before[begin]

    def identities(self, videos: np.ndarray) -> pa.Array:
        distinct, positions = np.unique(videos, return_inverse=True)
        return pa.array(map(self.identity, distinct.tolist()), pa.string()).take(pa.array(positions))

    def identity(self, video: int) -> str:
        """Return the identity of one video; see `identities`."""
        mine = slice(self.begins[video], self.begins[video + 1])
        content = np.stack([self.first_frame[mine], self.chunk_frames[mine]]).astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()

    def left_out(self, video: int, *, num_frames: int) -> list[tuple[int, int]]:
        """Return (first frame, frame behind the last) of everything in a video that is in no chunk."""
        mine = slice(self.begins[video], self.begins[video + 1])
        begins = [*self.first_frame[mine].tolist(), num_frames]
        ends = [0, *(self.first_frame[mine] + self.chunk_frames[mine]).tolist()]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]

    def span_index(self, videos: np.ndarray, first_frame: np.ndarray) -> np.ndarray:
        """Return the span of the chunks that begin at these frames, int64; -1 if no chunk begins there."""
        from clipmill.shards.chunk_table import Moments

        owners = np.repeat(np.arange(len(self.begins) - 1), self.num_chunks)
        moments = Moments.of(owners, self.first_frame)
        codes, wanted = moments.numbers(owners, self.first_frame), moments.numbers(videos, first_frame)
        rows = np.minimum(np.searchsorted(codes, wanted), max(0, len(codes) - 1))
        is_found = codes[rows] == wanted if len(codes) else np.zeros(len(wanted), bool)
        return np.where(is_found, (rows - self.begins[videos]) // self.span_chunks, -1)

    def _rows(self, videos: Any, index: Any) -> tuple[Any, Any]:
        """Return the first chunk of spans and the one after their last, for one span or for arrays of them."""
        begin = self.begins[videos] + index * self.span_chunks
        return begin, np.minimum(begin + self.span_chunks, self.begins[videos + 1])


def shot_cutting(
    cuts: Sequence[Sequence[int] | None], num_frames: np.ndarray, *, max_frames: int, min_frames: int, span_chunks: int
) -> ShotCutting:
    """Cut all videos at their shots; see `shot_chunks`.

    Args:
        cuts: cuts of each video; None if they are unknown, and then it has no chunks.
        num_frames: number of frames of each video, int64.
    """
    chunks: list[tuple[int, int]] = []
    begins, num_left_out, frames_left_out = [0], 0, 0
    videos_left_out: list[int] = []
    for video, (of_video, frames) in enumerate(zip(cuts, num_frames.tolist(), strict=True)):
        if of_video is not None:
            made = shot_chunks(of_video, frames, max_frames=max_frames, min_frames=min_frames)
            chunks += made.chunks
            num_left_out += made.num_left_out
            videos_left_out += [video] if made.num_left_out else []
            frames_left_out += frames - sum(length for _, length in made.chunks)
        begins.append(len(chunks))
    table = np.array(chunks, np.int64).reshape(-1, 2)
    return ShotCutting(
        begins=np.array(begins, np.int64),
        first_frame=table[:, 0],
        chunk_frames=table[:, 1],
        span_chunks=span_chunks,
        num_left_out=num_left_out,
        frames_left_out=frames_left_out,
        videos_left_out=videos_left_out,
    )


@dataclass(frozen=True)
class VideoShots:
    """Known shots of videos.

    Attributes:
        cuts: list<int32> [videos]: first frame of every shot but the first; null if they are unknown.
        failures: row of a video -> (failure code, message) of its last detection.
        undetected: rows of the videos whose shots have to be detected, ascending.
    """

    cuts: pa.ListArray
    failures: dict[int, tuple[str, str]]
    undetected: np.ndarray

    @property
    def is_known(self) -> np.ndarray:
        """Whether the shots of each video are known, bool [videos]."""
        return np.asarray(pc.is_valid(self.cuts))


def frames_of(recipe: ResolvedRecipe, probes: pa.Table) -> np.ndarray:
    """Return the number of output frames of each video, int64; 0 if it is unusable.

    Args:
        probes: probes of the videos (clipmill.prep.sources.table.PROBES).
    """
    ends_s = probes["end_s"]  # null if the video is unusable, as is its fingerprint
    num_frames = num_output_frames(np.asarray(pc.fill_null(ends_s, 0.0)), fps=recipe.settings.fps_exact)
    return np.where(np.asarray(pc.is_valid(ends_s)), num_frames, 0)


def shots_of(
    recipe: ResolvedRecipe, probes: pa.Table, *, shots: pa.Table | None, retry_failed: bool
) -> VideoShots | None:
    """Look up the shots of videos; return None with `--cut even`.

    Args:
        probes: probes of the videos (clipmill.prep.sources.table.PROBES).
        shots: the stored shots (clipmill.prep.sources.shot_table.SHOTS); None with `--cut even`.
        retry_failed: whether a failed detection is to be tried again.
    """
    if shots is None:
        return None
    from clipmill.prep.sources.shot_table import shot_rows

    fingerprints = as_array(probes["fingerprint"])
    rows = shot_rows(shots, key=detector_key(recipe), fingerprints=fingerprints, num_frames=frames_of(recipe, probes))
    found = shots.take(pa.array(rows, mask=rows < 0))
    has_failed = np.asarray(pc.is_valid(found["code"]))
    is_undetected = np.asarray(pc.is_valid(fingerprints)) & ((rows < 0) | (has_failed & retry_failed))
    failed = np.flatnonzero(has_failed & ~is_undetected)
    names = found.select(["code", "message"]).take(pa.array(failed)).to_pylist()
    return VideoShots(
        cuts=as_array(found["cuts"]),
        failures={row: (name["code"], name["message"]) for row, name in zip(failed.tolist(), names, strict=True)},
        undetected=np.flatnonzero(is_undetected),
    )


def detector_key(recipe: ResolvedRecipe) -> str:
    """Return the key of a recipe's detector in the stored shots."""
    return recipe.settings.shot_detector.key(recipe.values["scenedetect"])


def cutting_of(settings: ChunkSettings, num_frames: np.ndarray, shots: VideoShots | None) -> Cutting:
    """Return the chunks of all videos.

    Args:
        num_frames: number of frames of each video, int64; 0 if it is unusable.
        shots: the known shots of the videos; required by `--cut shots`.
    """
    if settings.cut == "even":
        return EvenCutting(num_frames, settings.chunk_frames, settings.tail, SPAN_CHUNKS)
    assert shots is not None, "the shots of the videos are required"
    return shot_cutting(
        shots.cuts.to_pylist(),
        num_frames,
        max_frames=settings.chunk_frames,
        min_frames=settings.min_frames,
        span_chunks=SPAN_CHUNKS,
    )
