"""The set of samples of one split that are whole chunks: pictures alone, no captions needed.

An epoch shows every chunk `samples_per_chunk` times: sample i is of chunk i // samples_per_chunk, and the samples of a
chunk stand in one row, so that it is read and decoded once for all of them.
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
from train.data.loader import LoaderSettings, SampleRequest
from train.data.outcomes import FailedSample
from train.data.usable_captions import Spans


class ChunkClips(ClipSamples):
    """Samples of one split; batches have `video`, `colour`, and the chunk as `clip_id`.

    Args:
        loading: its `group` is the number of samples of a chunk.
        same_frames: samples of a chunk show the same moments, each cut out in its own way; else each draws its own.
        decode: how frames come out of chunks.
        tars: how bytes of tars are read, where they do not lie in `data_dir`.

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
        clips = VideoClips(chunks, spans, shape, requests_of_same_frames=loading.group if same_frames else 1)
        super().__init__(clips, split=split, loading=loading)

    def __len__(self) -> int:
        return len(self.clips) * self._per_chunk

    @property
    def num_clips(self) -> int:
        """Chunks."""
        return len(self.clips)

    @property
    def variant_name(self) -> str:
        """The variant of the pictures."""
        return self.clips.chunks.variant_name

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where."""
        table, video_ids = self.clips.chunks.table, self.clips.chunks.video_ids
        digest = hashlib.sha256(f"{self.variant_name} {self._per_chunk} {self._same_frames}".encode())
        digest.update("\n".join(video_ids.to_pylist()).encode())
        for array in (table.video_row, table.start_ms, table.num_frames):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line: the chunks, how often each is shown, and what is not as it was asked for."""
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

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Reads, decodes and crops samples; a chunk that several of them show is decoded once."""
        return super().load(
            [SampleRequest(self._chunk(request.sample), request.position, request.seed) for request in requests]
        )

    def sample(self, request: SampleRequest, clip: Clip) -> Sample:
        """The clip with its name."""
        return Sample(
            position=request.position,
            key=self.clips.key(request.sample),
            clip_id=request.sample,
            video=clip.video,
            colour=clip.colour,
        )

    def key(self, sample: int) -> str:
        """The chunk."""
        return super().key(self._chunk(sample))

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the chunk in its video, seconds."""
        return super().span_s(self._chunk(sample))

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them in an evaluation, RGB [H, W, 3]; none where they cannot be had."""
        return super().pictures(self._chunk(sample), num_frames=num_frames)

    def _chunk(self, sample: int) -> int:
        return sample // self._per_chunk
