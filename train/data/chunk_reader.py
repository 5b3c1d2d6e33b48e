"""`read_chunks` and `chunks_table`, for analysis in Python: decoded chunks of a split, and a table of all chunks.

See docs/python.md for examples.
"""

import base64
import html
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key, split_key
from clipmill.manifests.store import read_captions, read_videos
from clipmill.shards.columns import how_to_repair
from clipmill.shards.dataset import current_variant, reading_variants
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import NUMBERS
from clipmill.shards.scores import SCORES, open_scores
from clipmill.shards.selection import find_chunks
from clipmill.train.data.arguments import (
    name_arguments_in_errors,
    require_process,
    require_strings,
    require_whole_numbers,
)
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.data_folder import ChunkSearch, ChunkTable, chunk_table, open_data_folder, rows_of
from clipmill.train.data.frame_sampling import US_PER_S, to_seconds
from clipmill.train.data.outcomes import FailedSample, SampleFailed, list_failures
from clipmill.train.data.producers.chunk_clips import parts_of_split
from clipmill.train.data.workers import StuckResult, map_in_order

if TYPE_CHECKING:
    import av


_STUCK_AFTER_S = 120.0
_MAX_SHOWN, _SHOWN_PX = 8, 120  # number of frames that a notebook shows, and their height in pixels


@dataclass(frozen=True)
class Chunk:
    """Decoded chunk of a video. A notebook shows up to eight of its frames.

    Attributes:
        key: Key of the chunk, `<video id>_<start in ms>`.
        video_id: ID of the video.
        begin_s, end_s: Span of the chunk in the video, in seconds.
        frames: RGB frames at the stored resolution, uint8 [T, H, W, 3].
        time_s: Time in the video at which each frame appears, seconds, float64 [T].
    """

    key: str
    video_id: str
    begin_s: float
    end_s: float
    frames: NDArray[np.uint8] = field(repr=False)
    time_s: NDArray[np.float64] = field(repr=False)

    def _repr_html_(self) -> str:
        import cv2

        indices = np.linspace(0, len(self.frames) - 1, min(_MAX_SHOWN, len(self.frames))).round().astype(int)
        shown_frames = self.frames[indices]
        width_px = round(_SHOWN_PX * shown_frames.shape[2] / shown_frames.shape[1])
        strip = np.concatenate([cv2.resize(frame, (width_px, _SHOWN_PX)) for frame in shown_frames], axis=1)
        jpeg = base64.b64encode(cv2.imencode(".jpg", strip[..., ::-1])[1].tobytes()).decode()
        text = html.escape(
            f"{self.key}: {self.begin_s:.2f} to {self.end_s:.2f} s, {count_noun(len(self.frames), 'frame')}"
        )
        return f'<img src="data:image/jpeg;base64,{jpeg}" alt="{text}"><br>{text}'


class Chunks:
    """Iterable of the decoded chunks of a split, ordered by video and time (`read_chunks`).

    If only part of a chunk belongs to the split, only the frames of this part are returned.

    Attributes:
        failures: Chunks whose decoding has failed so far, with key, reason and detail.
    """

    def __init__(self, chunks: ChunkSet, *, every: int, workers: int, max_failures: int) -> None:
        self._chunks, self._every, self._workers, self._max_failures = chunks, every, workers, max_failures
        self._parts = parts_of_split(chunks, np.arange(len(chunks.table)))
        self.failures: list[FailedSample] = []

    def __len__(self) -> int:
        return len(self._parts.chunk)

    def __iter__(self) -> Generator[Chunk, None, None]:
        process = os.getpid()
        loaded = map_in_order(
            self._load,
            range(len(self)),
            num_threads=self._workers,
            num_ahead=self._workers + 1,
            stuck_after_s=_STUCK_AFTER_S,
        )
        for index, outcome in loaded:
            if isinstance(outcome, Chunk):
                yield outcome
                require_process(process, what="chunks")
                continue
            if isinstance(outcome, StuckResult):
                key = self._chunks.key(int(self._parts.chunk[index]))
                outcome = FailedSample(index, key, "stuck", str(outcome))
            list_failures(self.failures, [outcome], max_failures=self._max_failures)

    def _load(self, index: int) -> Chunk | FailedSample:
        chunks, chunk = self._chunks, int(self._parts.chunk[index])
        key, begin_us, end_us = chunks.key(chunk), int(self._parts.begin_us[index]), int(self._parts.end_us[index])
        rgb_frames: dict[int, NDArray[np.uint8]] = {}

        def add(frame: int, video_frame: "av.VideoFrame") -> None:
            # Use one thread, because starting more threads takes longer than the conversion of a frame.
            rgb_frames[frame] = np.asarray(video_frame.to_ndarray(format="rgb24", threads=1), np.uint8)

        try:
            grid, times = chunks.table.times(chunk), chunks.times(chunk)
            nominal_frames = range(grid.frame_at(begin_us, 1), grid.frame_at(end_us - 1, 1) + 1, self._every)
            frames = [times.nominal_frame(frame) for frame in nominal_frames]
            # If only part of the chunk belongs to the split, omit the frames of other splits.
            if begin_us > grid.start_ms * 1000 or end_us < grid.end_us:
                frames = [frame for frame in frames if begin_us <= times.frame_begin_us(frame) < end_us]
                frames = frames or [times.frame_at(begin_us, 1)]
            chunks.decoder.decode_each(chunks.read(chunk, frames), add)
        except SampleFailed as error:
            return error.at(index)
        return Chunk(
            key=key,
            video_id=split_key(key)[0],
            begin_s=begin_us / US_PER_S,
            end_s=end_us / US_PER_S,
            frames=np.stack([rgb_frames[frame] for frame in frames]),
            time_s=np.array([to_seconds(times.frame_begin_us(frame)) for frame in frames]),
        )


@name_arguments_in_errors
@reading_variants({})
def read_chunks(
    data: str | Path,
    *,
    split: str = "train",
    every: int = 1,
    workers: int = 4,
    max_failures: int = 100,
    cache: Path | None = None,
) -> Chunks:
    """Return an iterable of the chunks of a split, for analysis. Frames that belong to other splits are omitted.

    Args:
        data: Path or URL of a data folder that prep made.
        every: Step between decoded frames: 1 for all, 2 for every second frame, and so on, starting with the first. The
            decoded frames of a chunk take memory: 158 MB for 450 frames of 456 x 256.
        split, workers, max_failures, cache: See `open_clips`.

    Raises:
        UserError: The data or the split does not exist, or an argument is out of range.
    """
    require_whole_numbers(every=every, workers=workers, max_failures=max_failures)
    require_strings(split=split)
    if every < 1 or workers < 1:
        raise UserError(f"every is {every} and workers is {workers}", hint="use 1 or more")
    folder = open_data_folder(str(data), cache=cache)
    chunks = ChunkSet(folder.path, split=split, rule="packets", tars=folder.tars)
    return Chunks(chunks, every=every, workers=workers, max_failures=max_failures)


_MS_PER_S, _LABEL = 1000, "label_"


@name_arguments_in_errors
@reading_variants({})
def chunks_table(data: str | Path, *, cache: Path | None = None) -> pa.Table:
    """Return the chunks of all splits as a pyarrow table, ordered by video and time; no video is decoded.

    The columns are `key`, `video_id`, `split`, `begin_s` and `end_s` (seconds in the video). The columns `captions`
    (strings), `caption_id` (int64) and `label_NAME` (values of a label) contain lists with one item per caption whose
    span overlaps the chunk, ordered by caption ID. After `prep scores`, the table also contains each score and
    `duplicate` (bool: the chunk looks like a chunk of an earlier video), which are null for chunks without scores.

    Args:
        data: Path or URL of a data folder that prep made.
        cache: Folder for copies of remote data. Default: the user's cache folder.

    Raises:
        UserError: The data do not exist, one of their tables is damaged, or the scores belong to other chunks.
    """
    folder = open_data_folder(str(data), cache=cache)
    data_dir = folder.path
    videos = read_videos(data_dir, columns=["video_id", "split"])
    video_ids = videos["video_id"].combine_chunks()
    try:
        chunks, _ = chunk_table(Variant.open(data_dir, tars=folder.tars).require_complete(), video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair()) from error
    ids = video_ids.take(pa.array(chunks.video_row))
    starts_ms = chunks.start_ms.tolist()
    columns = {
        "key": pa.array(
            [chunk_key(video_id, start) for video_id, start in zip(ids.to_pylist(), starts_ms, strict=True)]
        ),
        "video_id": ids,
        "split": videos["split"].combine_chunks().take(pa.array(chunks.video_row)),
        "begin_s": pa.array(chunks.start_ms / _MS_PER_S),
        "end_s": pa.array(chunks.end_us / US_PER_S),
        **dict(_captions(data_dir, chunks, video_ids)),
    }
    if current_variant(data_dir, SCORES) is not None:
        if folder.tars is not None:
            folder.tars.files.copy_column(SCORES)
        table = open_scores(data_dir, columns={"video_id", "start_ms", *NUMBERS, "duplicate_of"}).table
        rows = find_chunks(table, video_ids=video_ids, video_row=chunks.video_row, start_ms=chunks.start_ms)
        score_rows = pa.array(rows, mask=rows < 0)
        scores = {name: table[name].take(score_rows) for name in NUMBERS}
        columns |= scores | {"duplicate": pa.compute.greater_equal(table["duplicate_of"].take(score_rows), 0)}
    return pa.table(columns)


def _captions(data_dir: Path, chunks: ChunkTable, video_ids: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yield the name of each column of captions, caption IDs and labels, and its array with one list per chunk."""
    captions = read_captions(data_dir)
    rows, chunk = _shown_pairs(captions, chunks, video_ids)
    order = np.lexsort((rows, chunk))
    bounds = np.searchsorted(chunk[order], np.arange(len(chunks) + 1))
    labels = [name for name in captions.column_names if name.startswith(_LABEL)]
    names = {"captions": "text", "caption_id": "caption_id", **dict(zip(labels, labels, strict=True))}
    for name, column in names.items():
        values = captions[column].take(pa.array(rows[order])).combine_chunks()
        yield name, pa.LargeListArray.from_arrays(bounds, values)


def _shown_pairs(
    captions: pa.Table, chunks: ChunkTable, video_ids: pa.Array
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of a caption and a chunk that overlap: the rows of the captions, and the rows of the chunks."""
    video = rows_of(captions["video_id"], video_ids)
    begin_s, end_s = captions["begin_s"].to_numpy(), captions["end_s"].to_numpy()
    search = ChunkSearch(chunks)
    previous_last = search.last_of(video - 1)  # last chunk of the preceding videos
    last = search.last_of(video)
    is_within = np.isfinite(end_s)
    end_ms = np.ceil(end_s[is_within] * _MS_PER_S).astype(np.int64) - 1
    last[is_within] = np.minimum(last[is_within], search.last_started(video[is_within], end_ms))
    first = np.maximum(previous_last + 1, search.last_started(video, (begin_s * _MS_PER_S).astype(np.int64)))
    # The last chunk that starts before the caption may also end before it, because there may be gaps between chunks.
    has_ended = chunks.end_us[np.minimum(first, len(chunks) - 1)] <= begin_s * US_PER_S
    counts = np.maximum(last - (first + has_ended) + 1, 0)
    rows = np.repeat(np.arange(len(captions)), counts)
    index_in_range = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, np.repeat(first + has_ended, counts) + index_in_range
