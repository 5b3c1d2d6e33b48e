"""Sample set of whole chunks of a split, or of segments of them: frames alone, without captions."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.chunks import ChunkSet, ChunkTable
from train.data.clip_samples import ClipSamples
from train.data.decoding.clip import ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings
from train.data.remote import RemoteTars
from train.data.usable_captions import Spans


class ChunkClips(ClipSamples):
    """Clips of whole chunks; batches have `video`, `colour`, and the number of the chunk as `clip_id`.

    Args:
        loading: its `group` is the number of samples of each chunk in an epoch.
        same_frames: let the samples of a chunk show the same moments, each cropped in its own way.
        segment_us: length of the clips that each chunk is divided into, instead of one of the whole chunk. A remainder
            shorter than a quarter of it is added to the last one.
        decode, tars, where: see `ChunkSet`.

    Raises:
        UserError: there is no such data, or the split has no chunks.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        shape: ClipShape,
        loading: LoaderSettings,
        same_frames: bool = False,
        segment_us: int | None = None,
        decode: DecodeRule = "packets",
        tars: RemoteTars | None = None,
        where: str | None = None,
    ) -> None:
        chunks = ChunkSet(data_dir, split=split, rule=decode, tars=tars, where=where)
        self._same_frames, self._segment_us = same_frames, segment_us
        super().__init__(
            chunks,
            _spans(chunks.table, chunks.selection.rows, segment_us=segment_us),
            shape,
            split=split,
            loading=loading,
            repeats=loading.group,
            same_frames=loading.group if same_frames else 1,
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""
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
        chunks = self.chunks
        num_frames, rows = chunks.table.num_frames, chunks.selection.rows
        num_videos = len(np.unique(chunks.table.video_row[rows]))
        videos = "1 video" if num_videos == 1 else f"{num_videos:,} videos"
        num_chunks = "1 chunk" if len(rows) == 1 else f"{len(rows):,} chunks"
        if self._segment_us is not None:
            num_chunks = f"{self.num_clips:,} segments of {num_chunks}"
        parts = [f"{num_chunks} of {videos} of split {self.split!r}"]
        if num_without := len(chunks.video_ids) - len(np.unique(chunks.table.video_row)):
            parts.append(f"{num_without:,} video{'s' * (num_without > 1)} without chunks")
        if self._repeats > 1:
            what = "crops of the same frames" if self._same_frames else "clips"
            parts.append(f"{self._repeats} {what} of each in an epoch")
        if num_single := int((num_frames[rows] == 1).sum()):
            parts.append(f"{num_single:,} of a single frame, which is repeated")
        return "; ".join(parts + chunks.selection.remarks() + self.deviations())


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
