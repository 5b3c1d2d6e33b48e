"""The captions of a shard's videos, of which a worker reads only the row groups of the table that contain any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_COLUMNS = ["caption_id", "begin_s", "end_s", "text", "source"]
_IDS_AT_ONCE = 1 << 20  # looked up together, because each lookup begins with a hash table of all videos


@dataclass(frozen=True)
class Caption:
    """One caption; `end_s` is None if it lasts to the end of the video."""

    caption_id: int
    begin_s: float
    end_s: float | None
    text: str
    source: str

    def overlaps(self, begin_s: Fraction, end_s: Fraction) -> bool:
        """Return True if the caption overlaps [begin_s, end_s)."""
        return self.begin_s < end_s and (self.end_s is None or self.end_s > begin_s)


@dataclass(frozen=True)
class CaptionGroups:
    """The row groups of a table of captions that hold captions of each video.

    Attributes:
        begins: first entry of each video in `groups`, and the number of all entries, int64 [videos + 1].
        groups: row groups of one video after another, ascending, int32.
    """

    begins: np.ndarray
    groups: np.ndarray

    def of(self, videos: np.ndarray) -> tuple[int, ...]:
        """Return the row groups that hold captions of some videos, given by their rows; ascending."""
        parts = [self.groups[self.begins[video] : self.begins[video + 1]] for video in np.unique(videos)]
        return tuple(np.unique(np.concatenate(parts)).tolist()) if parts else ()


def caption_groups(captions_file: Path, video_ids: pa.Array) -> CaptionGroups:
    """Read the column of videos of a table of captions once, to find the row groups of each of `video_ids`."""
    videos, groups = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for ids, group_of_id in _ids_of_groups(captions_file):
        rows = np.asarray(pc.fill_null(pc.index_in(ids, value_set=video_ids), -1)).astype(np.int64)
        videos.append(rows[rows >= 0])
        groups.append(group_of_id[rows >= 0])
    of_videos, of_groups = np.concatenate(videos), np.concatenate(groups)
    begins = np.concatenate([[0], np.cumsum(np.bincount(of_videos, minlength=len(video_ids)))])
    return CaptionGroups(begins, of_groups[np.argsort(of_videos, kind="stable")])


def _ids_of_groups(captions_file: Path) -> Iterator[tuple[pa.ChunkedArray, np.ndarray]]:
    """Yield ids of videos, each once per row group that holds it, with these row groups."""
    waiting: list[pa.Array] = []
    numbers: list[int] = []
    with pq.ParquetFile(captions_file, read_dictionary=["video_id"]) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["video_id"], use_threads=False)
            ids = pc.unique(table["video_id"].unify_dictionaries()).cast(pa.string())
            waiting.append(ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids)
            numbers.append(group)
            if sum(map(len, waiting)) >= _IDS_AT_ONCE or group == file.num_row_groups - 1:
                repeats = list(map(len, waiting))
                yield pa.chunked_array(waiting, pa.string()), np.repeat(np.asarray(numbers, np.int32), repeats)
                waiting, numbers = [], []


def captions_of(
    captions_file: Path, video_ids: Sequence[str], *, row_groups: Sequence[int]
) -> dict[str, list[Caption]]:
    """Return the captions of some videos, sorted by time.

    Args:
        row_groups: row groups of the table that hold them; one is in memory at a time.
    """
    wanted = pa.array(sorted(set(video_ids)), pa.string())
    found: dict[str, list[Caption]] = {}
    with pq.ParquetFile(captions_file, read_dictionary=["video_id"], pre_buffer=False) as file:
        for group in row_groups:
            ids = file.read_row_group(group, columns=["video_id"], use_threads=False)["video_id"].unify_dictionaries()
            rows = pa.array(np.flatnonzero(pc.is_in(ids.cast(pa.string()), value_set=wanted).to_numpy()))
            table = file.read_row_group(group, columns=_COLUMNS, use_threads=False).take(rows)
            for video_id, row in zip(ids.take(rows).to_pylist(), table.to_pylist(), strict=True):
                end_s = row["end_s"] if row["end_s"] != float("inf") else None
                caption = Caption(row["caption_id"], row["begin_s"], end_s, row["text"], row["source"])
                found.setdefault(video_id, []).append(caption)
    for captions in found.values():
        captions.sort(key=lambda caption: (caption.begin_s, caption.caption_id))
    return found
