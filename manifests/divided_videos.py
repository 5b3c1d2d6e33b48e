"""Find the split of each second of divided videos: videos whose captions belong to different splits.

A caption may belong to a different split than its video (schema.OPTIONAL_CAPTIONS). Each second of a divided video
belongs to exactly one split: the split of the captions that cover it. If captions of several splits cover a second, the
second belongs to the held-out split (`test`, otherwise `val`). A second that no caption covers belongs to the split of
the video. Captions from further sources, such as models, do not divide a video, because they cover the entire video.

Training without captions omits the seconds of other splits. Training with captions omits a caption if its span contains
a second of a different split.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import SpanBlock, open_stored_captions
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_manifest, read_videos

_HELD_OUT = ("val", "test")  # splits that override other splits where captions overlap; test overrides val
_US_PER_S = 1_000_000
MIN_PART_US = _US_PER_S  # minimum length of a part of a chunk; shorter parts are useless for training
_LAST_S = 1e9  # a time after the end of any video
_ROUNDING_US = 1000  # tolerance: the times of neighbouring captions, and the starts of chunks, are rounded separately


@dataclass(frozen=True)
class SpanParts:
    """Parts of spans that belong to one split, ordered by span.

    Attributes:
        span: int64 [P], index of the span.
        begin_us, end_us: int64 [P], times in the video in microseconds.
    """

    span: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]


@dataclass(frozen=True)
class DividedVideos:
    """Divided videos as consecutive entries without gaps. An entry is a time span that belongs to one split.

    Attributes:
        splits: Names of the splits.
        video: int32 [N], row of the video, ascending.
        begin_us, end_us: int64 [N]. The first entry of a video begins at 0, and the last entry ends after the video.
        split: int8 [N], index into `splits`.
    """

    splits: tuple[str, ...]
    video: NDArray[np.int32]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    split: NDArray[np.int8]

    def select_videos(self, row: NDArray[np.int32]) -> "DividedVideos":
        """Select videos, and renumber them.

        Args:
            row: int32 [videos], new row of each video, ascending; -1 removes the video.
        """
        video = row[self.video]
        is_kept = video >= 0
        begin_us, end_us = self.begin_us[is_kept], self.end_us[is_kept]
        return DividedVideos(self.splits, video[is_kept], begin_us, end_us, self.split[is_kept])

    def videos_with(self, split: str) -> NDArray[np.int32]:
        """Return the rows of the divided videos that contain seconds of a split, ascending."""
        return np.unique(self.video[self._is_in_split(split)])

    def find_splits(self, *, video: NDArray[np.integer], at_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the split at each time of a video, or -1 if the video is not divided."""
        return np.where(np.isin(video, self.video), self.split[self._find_entries(video, at_us)], -1).astype(np.int64)

    def is_entirely_in(
        self, split: str, *, video: NDArray[np.integer], begin_us: NDArray[np.int64], end_us: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return bool [spans], True if a span contains only seconds of `split`, or if its video is not divided."""
        middle_us = (begin_us + end_us) // 2
        begin_us = np.minimum(begin_us + _ROUNDING_US, middle_us)
        end_us = np.maximum(end_us - _ROUNDING_US, middle_us)
        entry = self._find_entries(video, begin_us)
        is_inside = self._is_in_split(split)[entry] & (self.end_us[entry] >= end_us)
        return np.where(np.isin(video, self.video), is_inside, True)

    def split_parts(
        self, split: str, *, video: NDArray[np.integer], begin_us: NDArray[np.int64], end_us: NDArray[np.int64]
    ) -> SpanParts:
        """Return the parts of spans that belong to a split, ordered by span. Spans of undivided videos are not trimmed.

        A part that is shorter than MIN_PART_US is omitted, unless it is a complete span.
        """
        is_divided = np.isin(video, self.video)
        first = self._find_entries(video, begin_us)
        counts = np.where(is_divided, self._find_entries(video, end_us - 1) - first + 1, 1)
        span = np.repeat(np.arange(len(video)), counts)
        entry = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins, ends = begin_us[span].astype(np.int64), end_us[span].astype(np.int64)
        is_trimmed = is_divided[span]
        begins = np.where(is_trimmed, np.maximum(begins, self.begin_us[entry]), begins)
        ends = np.where(is_trimmed, np.minimum(ends, self.end_us[entry]), ends)
        length_us = ends - begins
        is_long = (length_us >= MIN_PART_US) | (length_us == (end_us - begin_us)[span])
        is_kept = (~is_trimmed | self._is_in_split(split)[entry]) & is_long
        return SpanParts(span[is_kept], begins[is_kept], ends[is_kept])

    def _is_in_split(self, split: str) -> NDArray[np.bool_]:
        return self.split == (self.splits.index(split) if split in self.splits else -1)

    def _find_entries(self, video: NDArray[np.integer], at_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the entry at each time of a video, or any index if the video is not divided."""
        # Video and time are combined into one sortable number. Times are clipped to the range of the entries' starts.
        step = int(self.begin_us.max(initial=0)) + 1
        rows = np.unique(self.video)
        keys = np.searchsorted(rows, self.video) * np.int64(step) + self.begin_us
        query = np.searchsorted(rows, video) * np.int64(step) + np.minimum(at_us, step - 1)
        return np.maximum(np.searchsorted(keys, query, side="right") - 1, 0)


def read_divided_videos(data_dir: Path) -> DividedVideos | None:
    """Find the divided videos of a manifest, with rows of videos.parquet. Return None if there are none.

    The captions are read only if some captions have splits that differ from their videos' splits.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    stored = open_stored_captions(data_dir)
    if not stored.splits:
        return None
    from clipmill.manifests.previous import FURTHER_KEY  # imported late, because the module imports many others

    stored.verify()
    video_splits = read_videos(data_dir, columns=["split"])["split"].combine_chunks().dictionary_encode()
    further_records = read_manifest(data_dir).get(FURTHER_KEY, {})
    divides = np.array([source not in further_records for source in stored.sources])
    names = {*stored.splits, *video_splits.dictionary.to_pylist()}
    splits = sorted(names, key=lambda name: (_HELD_OUT.index(name) if name in _HELD_OUT else -1, name))
    video_split = np.array([splits.index(name) for name in video_splits.dictionary.to_pylist()], np.int8)
    video_split = video_split[video_splits.indices.to_numpy()]
    codes = np.array([splits.index(name) for name in stored.splits], np.int8)
    parts = [_divide_block(block, video_split, codes, divides, num_splits=len(splits)) for block in stored.blocks()]
    video, begin_us, end_us, split = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return DividedVideos(tuple(splits), video, begin_us, end_us, split)


def _divide_block(
    block: SpanBlock,
    video_split: NDArray[np.int8],
    codes: NDArray[np.int8],
    divides: NDArray[np.bool_],
    *,
    num_splits: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]:
    """Find the divided videos in a block, and return the video, start, end and split of each entry.

    A code is the index of a split in `DividedVideos.splits`.

    Args:
        block: Block with all spans of its videos.
        video_split: int8 [videos of the manifest], code of each video's split.
        codes: int8 [splits of captions], code of each split in `CaptionSpans.splits`.
        divides: bool [sources], True if captions of a source divide videos.
        num_splits: Number of codes.
    """
    assert block.split is not None
    spans = block.expand_captions()
    has_split = block.split >= 0
    videos = np.unique(spans.video[has_split])
    is_divided = np.isin(spans.video, videos) & (spans.end_s > spans.begin_s) & divides[block.source]
    video = spans.video[is_divided]
    begin_us, end_us = (
        np.rint(np.clip(times_s[is_divided], 0, _LAST_S) * _US_PER_S).astype(np.int64)
        for times_s in (spans.begin_s, spans.end_s)
    )
    split = np.where(has_split, codes[block.split], video_split[spans.video])[is_divided]
    # The boundaries are the distinct times at which a caption begins or ends. Between two consecutive boundaries, the
    # set of captions that cover the video does not change.
    boundary_video = np.concatenate([video, video, videos, videos])
    last_us = round(_LAST_S * _US_PER_S)
    boundary_us = np.concatenate([begin_us, end_us, np.zeros(len(videos), np.int64), np.full(len(videos), last_us)])
    order = np.lexsort((boundary_us, boundary_video))
    boundary_video, boundary_us = boundary_video[order], boundary_us[order]
    is_new = (boundary_video[1:] != boundary_video[:-1]) | (boundary_us[1:] != boundary_us[:-1])
    is_new = np.r_[True, is_new][: len(order)]
    boundary_index = np.empty(len(order), np.int64)
    boundary_index[order] = np.cumsum(is_new) - 1
    begin_index, end_index = boundary_index[: len(video)], boundary_index[len(video) : 2 * len(video)]
    boundary_video, boundary_us = boundary_video[is_new], boundary_us[is_new]
    entry_split = video_split[boundary_video]
    for code in range(num_splits):
        is_code = split == code
        num_begins = np.bincount(begin_index[is_code], minlength=len(entry_split))
        num_ends = np.bincount(end_index[is_code], minlength=len(entry_split))
        entry_split[np.cumsum(num_begins - num_ends) > 0] = code
    # No entry begins at the last boundary of a video. Consecutive entries of the same split are joined.
    is_first = (boundary_video[1:] != boundary_video[:-1]) | (entry_split[1:] != entry_split[:-1])
    is_first = np.r_[True, is_first][: len(entry_split)] & (boundary_us < last_us)
    next_us = np.r_[boundary_us[is_first][1:], last_us][: int(is_first.sum())]
    is_last = np.r_[np.diff(boundary_video[is_first]) != 0, True][: len(next_us)]
    return boundary_video[is_first], boundary_us[is_first], np.where(is_last, last_us, next_us), entry_split[is_first]


def find_split_videos(data_dir: Path, split: str) -> tuple[pa.Array, DividedVideos | None]:
    """Find the videos that contain seconds of a split.

    Returns:
        The IDs of the videos, and the divided videos among them, or None if none of them is divided.

    Raises:
        UserError: No video contains seconds of the split.
    """
    videos, divided = read_videos(data_dir, columns=["video_id", "split"]), read_divided_videos(data_dir)
    is_member = split_mask(split, videos, divided)
    if not is_member.any():
        splits = ", ".join(sorted(split_names(videos, divided)))
        raise UserError(
            f"{data_dir} has no videos of split {split!r}",
            hint=f"use --split with a split of this manifest: {splits}"
            if splits
            else "the manifest is empty; add videos with `prep manifest`",
            flags=("--split",),
        )
    if divided is not None:
        divided = divided.select_videos(np.where(is_member, np.cumsum(is_member) - 1, -1).astype(np.int32))
    ids = videos["video_id"].filter(pa.array(is_member)).combine_chunks()
    return ids, divided if divided is not None and len(divided.video) else None


def split_mask(split: str, videos: pa.Table, divided: DividedVideos | None) -> NDArray[np.bool_]:
    """Return bool [videos], True for each video of the manifest that is in a split or contains seconds of it."""
    is_member = pc.equal(videos["split"], split).to_numpy().copy()
    if divided is not None:
        is_member[divided.videos_with(split)] = True
    return is_member


def split_names(videos: pa.Table, divided: DividedVideos | None) -> set[str]:
    """Return the names of all splits of `videos` (schema.VIDEOS) and of their captions."""
    return {*pc.unique(videos["split"]).to_pylist(), *(() if divided is None else divided.splits)}


def is_in_splits(captions: pa.Table, videos: pa.Table, splits: Collection[str]) -> NDArray[np.bool_]:
    """Return bool [captions], True for each caption that belongs to one of the given splits.

    Args:
        captions: Captions as returned by `read_captions`.
        videos: Table of schema.VIDEOS.
    """
    names = pa.array(list(splits), pa.string())
    ids = videos["video_id"].filter(pc.is_in(videos["split"], value_set=names)).combine_chunks()
    column = captions["video_id"].unify_dictionaries()
    if not len(column):
        return np.zeros(0, bool)
    is_member = pc.is_in(column.chunk(0).dictionary, value_set=ids).to_numpy(zero_copy_only=False)
    is_video_member = np.concatenate([is_member[chunk.indices.to_numpy()] for chunk in column.chunks])
    if "split" not in captions.column_names:
        return is_video_member
    is_caption_member = pc.is_in(captions["split"], value_set=names).to_numpy()
    return np.where(captions["split"].is_valid().to_numpy(), is_caption_member, is_video_member)


def select_split(captions: pa.Table, data_dir: Path, split: str) -> pa.Table:
    """Select the captions of a split from all captions of a manifest.

    Raises:
        UserError: No video contains seconds of the split.
    """
    find_split_videos(data_dir, split)
    return captions.filter(pa.array(is_in_splits(captions, read_videos(data_dir), [split])))
