"""Sample set of whole chunks of a split, or of segments of them: frames alone, without captions."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.quoting import counted
from clipmill.train.data.chunk_table import ChunkTable
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.clip_query import ClipQuery, query_clips
from clipmill.train.data.clip_samples import ClipSamples
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.node_cache import shared
from clipmill.train.data.query import DataQuery
from clipmill.train.data.usable_captions import Spans


class ChunkClips(ClipSamples):
    """Clips of whole chunks; batches have `video`, `colour`, and the number of the chunk as `clip_id`.

    Args:
        query: the `group` of its loading is the number of samples of each chunk in an epoch.
        same_frames: let the samples of a chunk show the same moments, each cropped in its own way.
        segment_us: length of the clips that each chunk is divided into, instead of one of the whole chunk. A remainder
            shorter than a quarter of it is added to the last one.

    Raises:
        UserError: there is no such data, or the split has no chunks.
    """

    def __init__(
        self,
        query: ClipQuery,
        *,
        same_frames: bool = False,
        segment_us: int | None = None,
    ) -> None:
        chunks, loading = query.open_chunks(), query.loading
        self._same_frames, self._segment_us = same_frames, segment_us
        self._depends_on = (*chunks.depends_on, *chunks.selection.depends_on, segment_us)
        self._opened = shared(
            lambda: _open_clips(chunks, segment_us=segment_us),
            of=("clips", *self._depends_on),
            num_rows=chunks.num_rows,
            types=(OpenedClips, Spans),
            column="clips",
        )
        super().__init__(
            chunks,
            self._opened.spans,
            query.shape,
            split=query.split,
            loading=loading,
            repeats=loading.group,
            same_frames=loading.group if same_frames else 1,
        )

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Start of the first and end of the last frame of an evaluated clip in its video, seconds."""
        frames = self.plan(SampleRequest(sample, sample, None)).frames
        times = [(self.chunks.table.times(chunk), frame) for chunk, frame in (frames[0], frames[-1])]
        (first, first_frame), (last, last_frame) = times
        return (
            first.start_ms / 1000 + first_frame * first.fps_den / first.fps_num,
            last.start_ms / 1000 + (last_frame + 1) * last.fps_den / last.fps_num,
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""
        return shared(
            self._sha256,
            of=("fingerprint", *self._depends_on, self._repeats, self._same_frames),
            num_rows=self.chunks.num_rows,
            types=(),
            column="fingerprint",
        )

    def _sha256(self) -> str:
        table, video_ids = self.chunks.table, self.chunks.video_ids
        segments = "" if self._segment_us is None else f" {self._segment_us}"
        digest = hashlib.sha256(f"{self.variant_name} {self._repeats} {self._same_frames}{segments}".encode())
        digest.update("\n".join(video_ids.to_pylist()).encode())
        digest.update(self.chunks.selection.text.encode())
        rows = self.chunks.selection.rows
        for array in (table.video_row[rows], table.start_ms[rows], table.num_frames[rows]):
            digest.update(np.ascontiguousarray(array, np.int64).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for the log: the chunks, their samples in an epoch, and deviations from the settings."""
        chunks, opened = self.chunks, self._opened
        videos = counted(opened.num_videos, "video")
        num_chunks = counted(opened.num_chunks, "chunk")
        if self._segment_us is not None:
            num_chunks = f"{counted(self.num_clips, 'segment')} of {num_chunks}"
        parts = [f"{num_chunks} of {videos} of split {self.split!r}"]
        if num_without := opened.num_without:
            parts.append(f"{counted(num_without, 'video')} without chunks")
        if self._repeats > 1:
            what = "crops of the same frames" if self._same_frames else "clips"
            parts.append(f"{self._repeats} {what} of each in an epoch")
        if opened.num_single:
            parts.append(f"{opened.num_single:,} of a single frame, which is repeated")
        return "; ".join(parts + chunks.selection.remarks() + self.deviations())


def open_frames(query: DataQuery) -> ChunkClips:
    """Open the chunks that a task asks for; raises UserError like `ChunkClips`."""
    return ChunkClips(query_clips(query), same_frames=query.same_frames)


@dataclass(frozen=True)
class OpenedClips:
    """The clips, and numbers of chunks for the log.

    Attributes:
        num_chunks, num_videos: those that are selected.
        num_without: videos without chunks.
        num_single: selected chunks of a single frame.
    """

    spans: Spans
    num_chunks: int
    num_videos: int
    num_without: int
    num_single: int


def _open_clips(chunks: ChunkSet, *, segment_us: int | None) -> OpenedClips:
    table, rows = chunks.table, chunks.selection.rows
    return OpenedClips(
        _spans(table, rows, segment_us=segment_us),
        num_chunks=len(rows),
        num_videos=_num_different(table.video_row[rows]),
        num_without=len(chunks.video_ids) - _num_different(table.video_row),
        num_single=int((table.num_frames[rows] == 1).sum()),
    )


def _num_different(ascending: NDArray[np.integer]) -> int:
    return int(np.count_nonzero(ascending[1:] != ascending[:-1])) + bool(len(ascending))


def _spans(table: ChunkTable, chunks: NDArray[np.int64], *, segment_us: int | None) -> Spans:
    begin_us, end_us = table.start_ms[chunks] * 1000, table.end_us_of(chunks)
    if segment_us is not None:
        full, rest_us = np.divmod(end_us - begin_us, segment_us)
        counts = np.maximum(1, full + (4 * rest_us >= segment_us))
        of = np.repeat(np.arange(len(chunks)), counts)
        number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin_us, chunks = begin_us[of] + number * segment_us, chunks[of]
        end_us = np.where(number + 1 == counts[of], end_us[of], begin_us + segment_us)
    return Spans(begin_us, end_us, first_chunk=chunks, last_chunk=chunks)
