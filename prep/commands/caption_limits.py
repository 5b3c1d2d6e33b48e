"""What limits captions of tables: the ends of the videos, and for those that describe chunks, the chunks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.prep.sources.table import probes_of, read_probes
from clipmill.shards.chunk_table import Moments, read_chunk_rows
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

_TIMES = ("start_ms", "num_frames", "fps_num", "fps_den")
_LONGEST_MS = 1e15  # longer than any video


def ends_of_videos(data_dir: Path, videos: pa.Table) -> np.ndarray:
    """Return the end of each video in seconds, float64[N]; +inf for those that have not been probed.

    Args:
        videos: schema.VIDEOS.
    """
    probes, is_known = probes_of(videos["path"], read_probes(data_dir, columns=["path", "end_s"]))
    ends_s = np.full(len(videos), np.inf)
    ends_s[is_known] = pc.fill_null(probes["end_s"], np.inf).to_numpy()
    return ends_s


def chunk_finder(data_dir: Path, videos: pa.Table) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None:
    """Return a function of video row, start and end in seconds: whether there is a chunk at these times, bool[N].

    Return None if this is unknown: the current variant has no chunks yet, or damaged ones.

    Args:
        videos: schema.VIDEOS.
    """
    name = current_variant(data_dir, VIDEO)
    if name is None:
        return None
    try:
        chunks = read_chunk_rows(Variant(variant_dir(data_dir, VIDEO, name)), columns=("video_id", *_TIMES))
    except (Damaged, OSError):
        return None
    if not len(chunks.table):
        return None
    ids = videos["video_id"].combine_chunks()
    entries, codes = chunks.dictionary_codes("video_id")
    video_rows = pc.index_in(entries, value_set=ids).fill_null(-1).to_numpy().astype(np.int64)[codes]
    begin_ms, frames, fps_num, fps_den = (chunks.table[name].to_numpy().astype(np.int64) for name in _TIMES)
    end_ms = begin_ms + frames * fps_den * 1000 // fps_num
    is_known = video_rows >= 0
    video_rows, begin_ms, end_ms = video_rows[is_known], begin_ms[is_known], end_ms[is_known]
    moments = Moments.of(video_rows, begin_ms, end_ms)
    order = np.lexsort((begin_ms, video_rows))
    begin, end = (moments.numbers(video_rows, times)[order] for times in (begin_ms, end_ms))

    def has_chunk(rows: np.ndarray, begin_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
        times_ms = (np.minimum(times * 1000, _LONGEST_MS).astype(np.int64) for times in (begin_s, end_s))
        low, high = (moments.numbers(rows, times) for times in times_ms)
        # The last chunk that begins before the end of the caption; chunks of a video do not overlap.
        found = np.searchsorted(begin, high) - 1
        return (found >= 0) & (end[np.maximum(found, 0)] > low) if len(begin) else np.zeros(len(rows), bool)

    return has_chunk
