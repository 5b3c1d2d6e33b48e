"""Compute how many seconds of each split belong to captions of other splits.

Training without captions omits these seconds, so that a split never contains video that belongs to another split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.divided_videos import DividedVideos, read_divided_videos
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_videos
from clipmill.shards.chunk_table import read_chunk_rows
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

_TIMES = ("start_ms", "num_frames", "fps_num", "fps_den")


@dataclass(frozen=True)
class LostTime:
    """Seconds of a split that belong to captions of other splits, and the number of affected chunks."""

    seconds: float
    num_chunks: int


def lost_times(
    divided: DividedVideos,
    splits: pa.Array,
    *,
    video: NDArray[np.integer],
    begin_us: NDArray[np.int64],
    end_us: NDArray[np.int64],
) -> dict[str, LostTime]:
    """Return the lost time of each split. Splits that lose no time are omitted.

    Args:
        divided: Videos whose captions belong to several splits.
        splits: Split of each video, in manifest order.
        video: Row in the manifest of each chunk's video.
        begin_us: Start of each chunk in its video, in microseconds.
        end_us: End of each chunk in its video, in microseconds.
    """
    times: dict[str, LostTime] = {}
    is_divided = np.isin(video, divided.video)
    video, begin_us, end_us = video[is_divided], begin_us[is_divided], end_us[is_divided]
    chunk_splits = np.array(splits.take(pa.array(video)).to_pylist(), object)
    for split in dict.fromkeys(chunk_splits.tolist()):
        in_split = chunk_splits == split
        lengths_us = (end_us - begin_us)[in_split]
        parts = divided.split_parts(split, video=video[in_split], begin_us=begin_us[in_split], end_us=end_us[in_split])
        kept_us = np.bincount(parts.span, weights=parts.end_us - parts.begin_us, minlength=len(lengths_us))
        lost_us = lengths_us - kept_us.astype(np.int64)
        if lost_us.any():
            times[split] = LostTime(float(lost_us.sum()) / 1e6, int(np.count_nonzero(lost_us)))
    return times


def stored_lost_times(data_dir: Path) -> dict[str, LostTime]:
    """Return `lost_times` of the current variant of `video`; {} without divided videos or readable chunks.

    Raises:
        UserError: The manifest is damaged.
    """
    divided = read_divided_videos(data_dir)
    if divided is None or current_variant(data_dir, VIDEO) is None:
        return {}
    try:
        chunks = read_chunk_rows(Variant.open(data_dir), columns=("video_id", *_TIMES))
    except (Damaged, OSError):  # `prep status` reports the damage
        return {}
    videos = read_videos(data_dir, columns=["video_id", "split"])
    entries, codes = chunks.dictionary_codes("video_id")
    rows = pc.fill_null(pc.index_in(entries, value_set=videos["video_id"].combine_chunks()), -1).to_numpy()[codes]
    start_ms, num_frames, fps_num, fps_den = (chunks.table[name].to_numpy().astype(np.int64) for name in _TIMES)
    begin_us = start_ms * 1000
    end_us = begin_us - -num_frames * fps_den * 1_000_000 // fps_num
    return lost_times(divided, videos["split"].combine_chunks(), video=rows, begin_us=begin_us, end_us=end_us)


def lost_lines(times: Mapping[str, LostTime], *, indent: int) -> list[str]:
    """Return report lines about the lost time of each split.

    Args:
        times: Lost time, keyed by split.
        indent: Width of the column of labels, in characters.
    """
    return [
        f"{'splits':<{indent}}{split}: {time.seconds:,.1f} s of {count_noun(time.num_chunks, 'chunk')} belong to "
        "captions of other splits; training without captions omits them"
        for split, time in times.items()
    ]
