"""The split of each second of a video, for videos whose captions belong to different splits.

A caption may belong to a different split than its video (schema.OPTIONAL_CAPTIONS). Each second of such a video belongs
to exactly one split. If captions cover the second, their split applies; if these captions belong to several splits, the
held-out split applies (`test`, otherwise `val`). If no caption covers the second, the split of the video applies.
Training without captions omits the seconds of other splits. A caption is omitted if its span contains any second of
another split. Captions from further sources, such as models, do not divide a video, because they cover all of it.
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

_HELD_OUT = ("val", "test")  # splits that win where captions overlap, the later split first; all others lose
_US_PER_S = 1_000_000
MIN_PART_US = _US_PER_S  # minimum length of a part of a chunk; shorter parts are useless for training
_LAST_S = 1e9  # time after the end of any video
# Times of neighbouring captions are rounded separately, and starts of chunks are stored in milliseconds.
_ROUNDING_US = 1000


@dataclass(frozen=True)
class Parts:
    """Parts of spans that belong to one split: span number and times in microseconds, int64 [P], ordered by span."""

    span: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]


@dataclass(frozen=True)
class DividedVideos:
    """The seconds of divided videos, without gaps. An array entry represents consecutive seconds of one split.

    Attributes:
        splits: Names of splits.
        video: int32 [N], row of the video, ascending.
        begin_us, end_us: int64 [N]. The first entry of a video begins at 0, and its last entry ends after the video.
        split: int8 [N], index into `splits`.
    """

    splits: tuple[str, ...]
    video: NDArray[np.int32]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    split: NDArray[np.int8]

    def of_videos(self, row: NDArray[np.int32]) -> "DividedVideos":
        """Select videos: `row` is the new row of each video, in ascending order; -1 removes the video."""
        video = row[self.video]
        is_kept = video >= 0
        begin_us, end_us = self.begin_us[is_kept], self.end_us[is_kept]
        return DividedVideos(self.splits, video[is_kept], begin_us, end_us, self.split[is_kept])

    def videos_with(self, split: str) -> NDArray[np.int32]:
        """Return the rows of the videos that have seconds of a split, ascending."""
        return np.unique(self.video[self._is_of(split)])

    def numbers_at(self, *, video: NDArray[np.integer], at_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the split at each (video, time); -1 for videos that are not divided."""
        return np.where(np.isin(video, self.video), self.split[self._find_entries(video, at_us)], -1).astype(np.int64)

    def shows_only(
        self, split: str, *, video: NDArray[np.integer], begin_us: NDArray[np.int64], end_us: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return bool [spans], True if a span contains only seconds of `split`, or belongs to an undivided video."""
        middle_us = (begin_us + end_us) // 2
        begin_us = np.minimum(begin_us + _ROUNDING_US, middle_us)
        end_us = np.maximum(end_us - _ROUNDING_US, middle_us)
        entry = self._find_entries(video, begin_us)
        is_inside = self._is_of(split)[entry] & (self.end_us[entry] >= end_us)
        return np.where(np.isin(video, self.video), is_inside, True)

    def parts_of(
        self, split: str, *, video: NDArray[np.integer], begin_us: NDArray[np.int64], end_us: NDArray[np.int64]
    ) -> Parts:
        """Return the parts of spans that belong to a split, in order. Spans of undivided videos are not cut.

        A part shorter than MIN_PART_US is omitted, unless it is a complete span.
        """
        is_divided = np.isin(video, self.video)
        first = self._find_entries(video, begin_us)
        counts = np.where(is_divided, self._find_entries(video, end_us - 1) - first + 1, 1)
        span = np.repeat(np.arange(len(video)), counts)
        entry = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins, ends = begin_us[span].astype(np.int64), end_us[span].astype(np.int64)
        is_cut = is_divided[span]
        begins = np.where(is_cut, np.maximum(begins, self.begin_us[entry]), begins)
        ends = np.where(is_cut, np.minimum(ends, self.end_us[entry]), ends)
        length_us = ends - begins
        is_long = (length_us >= MIN_PART_US) | (length_us == (end_us - begin_us)[span])
        is_kept = (~is_cut | self._is_of(split)[entry]) & is_long
        return Parts(span[is_kept], begins[is_kept], ends[is_kept])

    def _is_of(self, split: str) -> NDArray[np.bool_]:
        return self.split == (self.splits.index(split) if split in self.splits else -1)

    def _find_entries(self, video: NDArray[np.integer], at_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entry that contains each (video, time); an arbitrary entry for videos that are not divided."""
        # Video and time are combined into one number. Times are clipped to the range of the entries' starts.
        step = int(self.begin_us.max(initial=0)) + 1
        rows = np.unique(self.video)
        keys = np.searchsorted(rows, self.video) * np.int64(step) + self.begin_us
        query = np.searchsorted(rows, video) * np.int64(step) + np.minimum(at_us, step - 1)
        return np.maximum(np.searchsorted(keys, query, side="right") - 1, 0)


def read_divided_videos(data_dir: Path) -> DividedVideos | None:
    """Read the videos whose captions belong to different splits, by row in videos.parquet; None if there are none.

    The captions are read only if the manifest records that the split of a caption differs from its video's split.

    Raises:
        UserError: There is no manifest, or it is damaged.
    """
    stored = open_stored_captions(data_dir)
    if not stored.splits:
        return None
    from clipmill.manifests.previous import FURTHER_KEY  # imports many modules

    stored.verify()
    video_splits = read_videos(data_dir, columns=["split"])["split"].combine_chunks().dictionary_encode()
    further = read_manifest(data_dir).get(FURTHER_KEY, {})
    divides = np.array([source not in further for source in stored.sources])
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
    """Return the video, start, end and split of each entry of the divided videos in a block.

    Args:
        block: Block with all spans of its videos.
        video_split: int8 [videos of the manifest], code of each video's split.
        codes: Code of each of the captions' splits.
        divides: bool [sources], True if captions of the source divide videos.
    """
    assert block.split is not None
    spans = block.each_caption()
    has_split = block.split >= 0
    videos = np.unique(spans.video[has_split])
    is_divided = np.isin(spans.video, videos) & (spans.end_s > spans.begin_s) & divides[block.source]
    video = spans.video[is_divided]
    begin_us, end_us = (
        np.rint(np.clip(times_s[is_divided], 0, _LAST_S) * _US_PER_S).astype(np.int64)
        for times_s in (spans.begin_s, spans.end_s)
    )
    split = np.where(has_split, codes[block.split], video_split[spans.video])[is_divided]
    # Between two neighbouring times, the set of captions that cover a video does not change.
    at_video = np.concatenate([video, video, videos, videos])
    last_us = round(_LAST_S * _US_PER_S)
    at_us = np.concatenate([begin_us, end_us, np.zeros(len(videos), np.int64), np.full(len(videos), last_us)])
    order = np.lexsort((at_us, at_video))
    at_video, at_us = at_video[order], at_us[order]
    is_new = np.r_[True, (at_video[1:] != at_video[:-1]) | (at_us[1:] != at_us[:-1])][: len(order)]
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(is_new) - 1
    begins, ends = number[: len(video)], number[len(video) : 2 * len(video)]
    at_video, at_us = at_video[is_new], at_us[is_new]
    entry_split = video_split[at_video]
    for code in range(num_splits):
        is_code = split == code
        num_begins = np.bincount(begins[is_code], minlength=len(entry_split))
        num_ends = np.bincount(ends[is_code], minlength=len(entry_split))
        entry_split[np.cumsum(num_begins - num_ends) > 0] = code
    # No entry begins at the last time of a video. Neighbours of the same split become one entry.
    is_first = np.r_[True, (at_video[1:] != at_video[:-1]) | (entry_split[1:] != entry_split[:-1])][: len(entry_split)]
    is_first &= at_us < last_us
    next_us = np.r_[at_us[is_first][1:], last_us][: int(is_first.sum())]
    is_last = np.r_[np.diff(at_video[is_first]) != 0, True][: len(next_us)]
    return at_video[is_first], at_us[is_first], np.where(is_last, last_us, next_us), entry_split[is_first]


def find_split_videos(data_dir: Path, split: str) -> tuple[pa.Array, DividedVideos | None]:
    """Return the IDs of the videos that have seconds of a split, and the divided videos among them (None if none).

    Raises:
        UserError: No video has seconds of this split.
    """
    videos, divided = read_videos(data_dir, columns=["video_id", "split"]), read_divided_videos(data_dir)
    is_member = members_of(split, videos, divided)
    if not is_member.any():
        splits = ", ".join(sorted(names_of_splits(videos, divided))) or "none, the manifest is empty"
        raise UserError(
            f"{data_dir} has no videos of split {split!r}",
            hint=f"use --split with a split of this manifest: {splits}",
            flags=("--split",),
        )
    if divided is not None:
        divided = divided.of_videos(np.where(is_member, np.cumsum(is_member) - 1, -1).astype(np.int32))
    ids = videos["video_id"].filter(pa.array(is_member)).combine_chunks()
    return ids, divided if divided is not None and len(divided.video) else None


def members_of(split: str, videos: pa.Table, divided: DividedVideos | None) -> NDArray[np.bool_]:
    """Return bool [videos], True for each video of the manifest that is in a split, or has seconds of the split."""
    is_member = pc.equal(videos["split"], split).to_numpy().copy()
    if divided is not None:
        is_member[divided.videos_with(split)] = True
    return is_member


def names_of_splits(videos: pa.Table, divided: DividedVideos | None) -> set[str]:
    """Return the names of all splits of `videos` (schema.VIDEOS) and of their captions."""
    return {*pc.unique(videos["split"]).to_pylist(), *(() if divided is None else divided.splits)}


def is_of_splits(captions: pa.Table, videos: pa.Table, splits: Collection[str]) -> NDArray[np.bool_]:
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
    """Select the captions of a split from the captions of a manifest; raise UserError if the split has no videos."""
    find_split_videos(data_dir, split)
    return captions.filter(pa.array(is_of_splits(captions, read_videos(data_dir), [split])))
