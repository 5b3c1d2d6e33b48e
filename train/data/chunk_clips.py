"""Sample set of whole chunks of a split: frames alone, without captions."""

import hashlib
from pathlib import Path

import numpy as np

from shards.tars import TarBytes
from train.data.chunks import ChunkSet
from train.data.clip_samples import ClipSamples
from train.data.decoding.clip import ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings
from train.data.usable_captions import Spans


class ChunkClips(ClipSamples):
    """Clips of whole chunks; batches have `video`, `colour`, and the number of the chunk as `clip_id`.

    Args:
        loading: its `group` is the number of samples of each chunk in an epoch.
        same_frames: let the samples of a chunk show the same moments, each cropped in its own way.
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
        decode: DecodeRule = "packets",
        tars: TarBytes | None = None,
        where: str | None = None,
    ) -> None:
        chunks = ChunkSet(data_dir, split=split, rule=decode, tars=tars, where=where)
        table, rows = chunks.table, chunks.selection.rows
        spans = Spans(table.start_ms[rows] * 1000, table.end_us[rows], first_chunk=rows, last_chunk=rows)
        self._same_frames = same_frames
        super().__init__(
            chunks,
            spans,
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
        digest = hashlib.sha256(f"{self.variant_name} {self._repeats} {self._same_frames}".encode())
        digest.update("\n".join(video_ids.to_pylist()).encode())
        digest.update(self.chunks.selection.text.encode())
        rows = self.chunks.selection.rows
        for array in (table.video_row[rows], table.start_ms[rows], table.num_frames[rows]):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for the log: the chunks, their samples in an epoch, and deviations from the settings."""
        chunks = self.chunks
        num_frames, rows = chunks.table.num_frames, chunks.selection.rows
        num_videos = len(np.unique(chunks.table.video_row[rows]))
        videos = "1 video" if num_videos == 1 else f"{num_videos:,} videos"
        num_chunks = "1 chunk" if self.num_clips == 1 else f"{self.num_clips:,} chunks"
        parts = [f"{num_chunks} of {videos} of split {self.split!r}"]
        if num_without := len(chunks.video_ids) - len(np.unique(chunks.table.video_row)):
            parts.append(f"{num_without:,} video{'s' * (num_without > 1)} without chunks")
        if self._repeats > 1:
            what = "crops of the same frames" if self._same_frames else "clips"
            parts.append(f"{self._repeats} {what} of each in an epoch")
        if num_single := int((num_frames[rows] == 1).sum()):
            parts.append(f"{num_single:,} of a single frame, which is repeated")
        return "; ".join(parts + chunks.selection.remarks() + self.deviations())
