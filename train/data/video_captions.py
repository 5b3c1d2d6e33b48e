"""The set of (clip, caption) samples of one split: captions of the manifest, pictures from the `video` column."""

import hashlib
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.keys import chunk_key
from manifests.store import read_captions, read_videos
from shards.damage import Damaged
from shards.format import PACKET_KEY
from shards.reader import CommittedShard, Variant
from train.data.batch import Sample
from train.data.chunk_table import ChunkTable, chunk_table, rows_of
from train.data.clips import FramePlace, locate_frames, segment_times_us
from train.data.crop import centre_square, crop_and_resize, random_resized_rectangle
from train.data.decode import RgbFrame, decode_frames
from train.data.failures import SampleFailed
from train.data.loader import LoadedBatch, LoaderSettings, evaluation_batches, training_batches
from train.data.usable_captions import UsableCaptions, usable_captions
from train.models.text import Tokenize


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """How a clip is shown: `num_frames` pictures of `size_px` x `size_px`; training crops keep `min_crop_area`."""

    num_frames: int
    size_px: int
    min_crop_area: float


class VideoCaptions:
    """Samples of one split; sample i is the i-th usable caption. Safe to use from many threads.

    Args:
        loading: how batches are made of them.
    """

    def __init__(
        self, data_dir: Path, *, split: str, shape: ClipShape, tokenize: Tokenize, loading: LoaderSettings
    ) -> None:
        if not data_dir.is_dir():
            raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made: --shards DIR")
        self.split = split
        self._shape = shape
        self._tokenize = tokenize
        self._loading = loading
        variant = Variant.open(data_dir)
        self.variant_name = variant.directory.name
        self._shards = variant.shards()
        self._video_ids = videos_of_split(data_dir, split)
        self._chunks: ChunkTable = chunk_table(self._shards, self._video_ids)
        captions = read_captions(data_dir)
        video_row = rows_of(captions["video_id"], self._video_ids)
        of_split = np.flatnonzero(video_row >= 0)
        self.num_captions = len(of_split)
        self.usable: UsableCaptions = usable_captions(
            video_row=video_row[of_split],
            begin_s=captions["begin_s"].to_numpy()[of_split],
            end_s=captions["end_s"].to_numpy()[of_split],
            chunks=self._chunks,
        )
        rows = of_split[self.usable.caption]
        self._caption_ids: NDArray[np.int64] = captions["caption_id"].to_numpy()[rows]
        self._texts: pa.ChunkedArray = captions["text"].take(pa.array(rows))
        if not len(self):
            raise UserError(
                f"no caption of split {split!r} can be shown: {self.describe()}",
                hint=f"see prep status --data {data_dir}; captions come from prep manifest",
            )

    def __len__(self) -> int:
        return len(self.usable.caption)

    def describe(self) -> str:
        """One line: captions that are used, and those that are not, by reason."""
        parts = [f"{len(self):,} of {self.num_captions:,} captions of split {self.split!r}"]
        parts += [f"{count:,} {reason.replace('_', ' ')}" for reason, count in self.usable.num_unusable.items()]
        if self.usable.num_shortened:
            parts.append(f"{self.usable.num_shortened:,} shortened to the end of the video")
        return "; ".join(parts)

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where: the captions, their order, their spans, the pictures."""
        digest = hashlib.sha256(self.variant_name.encode())
        for array in (self._caption_ids, self.usable.begin_us, self.usable.end_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def text(self, sample: int) -> str:
        """The caption's words."""
        return str(self._texts[sample].as_py())

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return self._key(int(self.usable.first_chunk[sample]))

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the clip in its video, seconds."""
        return float(self.usable.begin_us[sample]) / 1e6, float(self.usable.end_us[sample]) / 1e6

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them in an evaluation, RGB [H, W, 3]; none where they cannot be had."""
        try:
            return list(self.load(sample, position=sample, rng=None)["video"].numpy()[:num_frames])
        except SampleFailed:
            return []

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """See `train.data.loader.training_batches`."""
        return training_batches(self, self._loading, position=position or 0, max_failures=max_failures)

    def evaluation_batches(self) -> Iterator[LoadedBatch]:
        """See `train.data.loader.evaluation_batches`."""
        return evaluation_batches(self, self._loading)

    def load(self, sample: int, *, position: int, rng: np.random.Generator | None) -> Sample:
        """Reads, decodes and crops one sample; with `rng` as for training, without as for evaluation.

        Raises:
            SampleFailed: a chunk cannot be read or decoded.
        """
        first, last = int(self.usable.first_chunk[sample]), int(self.usable.last_chunk[sample])
        shape = self._shape
        times = segment_times_us(
            int(self.usable.begin_us[sample]), int(self.usable.end_us[sample]), num_frames=shape.num_frames, rng=rng
        )
        places = locate_frames(times, [self._chunks.times(chunk) for chunk in range(first, last + 1)])
        frames = self._frames(first, places)
        height, width = frames[0].shape[:2]
        if rng is None:
            rectangle = centre_square(width, height)
        else:
            rectangle = random_resized_rectangle(width, height, min_area=shape.min_crop_area, rng=rng)
        return Sample(
            position=position,
            key=self._key(first),
            caption_id=int(self._caption_ids[sample]),
            video=crop_and_resize(frames, rectangle, size_px=shape.size_px),
            tokens=torch.from_numpy(self._tokenize(self.text(sample))),
        )

    def _frames(self, first_chunk: int, places: list[FramePlace]) -> list[RgbFrame]:
        """Frames in the order of `places`, whichever chunks they lie in."""
        frames: list[RgbFrame] = []
        for number in sorted({place.chunk for place in places}):
            of_chunk = [place.frame for place in places if place.chunk == number]
            frames += self._decode(first_chunk + number, of_chunk)
        if len({frame.shape for frame in frames}) > 1:
            detail = f"chunks of the clip have different sizes: {sorted({frame.shape[:2] for frame in frames})}"
            raise SampleFailed(self._key(first_chunk), reason="sizes_differ", detail=detail)
        return frames

    def _decode(self, chunk: int, frames: list[int]) -> list[RgbFrame]:
        table, key = self._chunks, self._key(chunk)
        shard, row = self._shards[int(table.shard[chunk])], int(table.row[chunk])
        payload = _read_checked(shard, row, key)
        flags = np.array(shard.index["packet_flags"][row].as_py())
        shown = np.array(shard.index["packet_frame"][row].as_py())
        return decode_frames(
            payload,
            frames,
            fps=Fraction(int(table.fps_num[chunk]), int(table.fps_den[chunk])),
            key_frames=sorted(shown[flags & PACKET_KEY > 0].tolist()),
            key=key,
        )

    def _key(self, chunk: int) -> str:
        video_id = self._video_ids[int(self._chunks.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self._chunks.start_ms[chunk]))


def videos_of_split(data_dir: Path, split: str) -> pa.Array:
    """Ids of the videos of a split; UserError where it has none."""
    videos = read_videos(data_dir)
    of_split = videos.filter(pc.equal(videos["split"], split))
    if not of_split.num_rows:
        there = ", ".join(sorted(set(videos["split"].to_pylist()))) or "none, the manifest is empty"
        raise UserError(f"{data_dir} has no videos of split {split!r}", hint=f"splits of this manifest: {there}")
    return of_split["video_id"].combine_chunks()


def _read_checked(shard: CommittedShard, row: int, key: str) -> bytes:
    try:
        payload = shard.read(row, "mp4")
    except (OSError, Damaged) as error:
        raise SampleFailed(key, reason="shard_unreadable", detail=str(error)) from error
    if zlib.crc32(payload) != shard.index["mp4_crc32"][row].as_py():
        raise SampleFailed(key, reason="checksum", detail=f"its bytes in {shard.tar_path} are not those written")
    return payload
