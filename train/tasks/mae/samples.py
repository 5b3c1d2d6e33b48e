"""Samples of a masked autoencoder: whole chunks of one split, without captions.

An epoch has `samples_per_chunk` samples of every chunk: sample i is of chunk i // samples_per_chunk. The samples of a
chunk are consecutive, so that it is read and decoded once for all of them.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.tars import TarBytes
from train.data.batch import Sample
from train.data.chunks import ChunkSet
from train.data.clip_samples import ClipSamples, VideoClips
from train.data.decoding.clip import Clip, ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings, Visit
from train.data.outcomes import FailedSample
from train.data.usable_captions import Spans


class ChunkClips(ClipSamples):
    """Samples of one split; batches have `video`, `colour`, and the chunk as `clip_id`.

    Args:
        loading: its `group` is the number of samples of a chunk.
        same_frames: samples of a chunk show the same frames, with different crops; otherwise each draws its own.
        decode: how chunks are decoded.
        tars: reads tars that are not in `data_dir`.

    Raises:
        UserError: there is no such data, or no chunk of the split.
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
    ) -> None:
        chunks = ChunkSet(data_dir, split=split, rule=decode, tars=tars)
        table, rows = chunks.table, np.arange(len(chunks.table))
        spans = Spans(table.start_ms * 1000, table.end_us, first_chunk=rows, last_chunk=rows)
        self._per_chunk, self._same_frames = loading.group, same_frames
        clips = VideoClips(chunks, spans, shape, visits_of_same_frames=loading.group if same_frames else 1)
        super().__init__(clips, split=split, loading=loading)

    def __len__(self) -> int:
        return len(self.clips) * self._per_chunk

    @property
    def num_clips(self) -> int:
        """Number of chunks."""
        return len(self.clips)

    @property
    def variant_name(self) -> str:
        """The variant of the video column."""
        return self.clips.chunks.variant_name

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the order of samples."""
        table, video_ids = self.clips.chunks.table, self.clips.chunks.video_ids
        digest = hashlib.sha256(f"{self.variant_name} {self._per_chunk} {self._same_frames}".encode())
        digest.update("\n".join(video_ids.to_pylist()).encode())
        for array in (table.video_row, table.start_ms, table.num_frames):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line: number of chunks, of samples of each, and of unusable or short ones."""
        chunks = self.clips.chunks
        num_videos = len(np.unique(chunks.table.video_row))
        videos = "1 video" if num_videos == 1 else f"{num_videos:,} videos"
        chunks_there = "1 chunk" if self.num_clips == 1 else f"{self.num_clips:,} chunks"
        parts = [f"{chunks_there} of {videos} of split {self.split!r}"]
        if num_without := len(chunks.video_ids) - num_videos:
            parts.append(f"{num_without:,} videos without chunks")
        if self._per_chunk > 1:
            what = "crops of the same frames" if self._same_frames else "clips"
            parts.append(f"{self._per_chunk} {what} of each in an epoch")
        if num_single := int((chunks.table.num_frames == 1).sum()):
            parts.append(f"{num_single:,} of a single frame, which is repeated")
        return "; ".join(parts + self.clips.describe())

    def load(self, visits: Sequence[Visit]) -> list[Sample | FailedSample]:
        """Read, decode and crop samples; a chunk of several samples is decoded once."""
        return super().load([Visit(self._chunk(visit.sample), visit.position, visit.seed) for visit in visits])

    def sample(self, visit: Visit, clip: Clip) -> Sample:
        """The clip with its key."""
        return Sample(
            position=visit.position,
            key=self.clips.key(visit.sample),
            clip_id=visit.sample,
            video=clip.video,
            colour=clip.colour,
        )

    def key(self, sample: int) -> str:
        """The chunk."""
        return super().key(self._chunk(sample))

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the chunk in its video, in seconds."""
        return super().span_s(self._chunk(sample))

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as in an evaluation, uint8 RGB [H, W, 3]; an empty list if they cannot be decoded."""
        return super().pictures(self._chunk(sample), num_frames=num_frames)

    def _chunk(self, sample: int) -> int:
        return sample // self._per_chunk
