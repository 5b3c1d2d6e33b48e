"""Which captions can be shown, those whose whole span lies in existing chunks, and the clips they make. Arrays only."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.caption_choice import CaptionChoice, Runs, Sources, choice_of, runs_of, smallest
from clipmill.train.data.chunk_table import ChunkTable
from clipmill.train.data.frame_sampling import START_ROUNDING_US, US_PER_S
from clipmill.train.data.node_cache import Rows, index_type, scratch
from clipmill.train.data.outcomes import Unusable, remarks_of

_BLOCK = 1 << 20  # captions at a time
_LONGEST_S = 1e9  # longer than any video (clipmill.train.data.chunks), and far below where microseconds overflow


@dataclass(frozen=True)
class UsableCaptions:
    """The captions that can be shown; one entry of each array per caption.

    Attributes:
        caption: index in the arrays that were given.
        begin_us, end_us: the span to show.
        first_chunk, last_chunk: the chunks that hold it, as rows of the chunk table.
        num_unusable: captions that cannot be shown, by reason.
        num_shortened: captions that end after the last chunk of their video and are shown up to its end.
    """

    caption: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    first_chunk: NDArray[np.int64]
    last_chunk: NDArray[np.int64]
    num_unusable: dict[Unusable, int]
    num_shortened: int

    def remarks(self) -> list[str]:
        """Excluded and shortened captions, by reason."""
        return remarks_of(self.num_unusable, self.num_shortened)


def usable_captions(
    *,
    video_row: NDArray[np.int64],
    begin_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    chunks: ChunkTable,
    selected: NDArray[np.bool_] | None = None,
    selected_chunks: NDArray[np.bool_] | None = None,
    counts: NDArray[np.integer] | None = None,
) -> UsableCaptions:
    """Find the span and the chunks of each caption; an `end_s` of inf stands for the end of the video.

    Args:
        selected: the captions to use; None for all.
        selected_chunks: the chunks to use; None for all. All chunks of a caption must be among them.
        counts: number of captions that each of these stands for; None for one.
    """
    search = chunks.search()
    left = np.arange(len(video_row))
    num_unusable: dict[Unusable, int] = {}

    def drop(reason: Unusable, bad: NDArray[np.bool_]) -> NDArray[np.int64]:
        if bad.any():
            num_unusable[reason] = _number(bad, left, counts)
        return left[~bad]

    # Negated, so that NaN counts as empty.
    left = drop("empty_span", ~(end_s > begin_s) | ~np.isfinite(begin_s))
    last_of_video = search.last_of(video_row)
    if len(chunks):
        has_chunks = (last_of_video >= 0) & (chunks.video_row[last_of_video] == video_row)
    else:
        has_chunks = np.zeros(len(video_row), dtype=bool)
    left = drop("video_without_chunks", ~has_chunks[left])

    begin_us, stated_end_us = _to_us(begin_s[left]), _to_us(end_s[left])
    video_end_us = search.end_us[last_of_video[left]]
    wanted_end_us = np.where(np.isinf(end_s[left]), video_end_us, stated_end_us)
    # Two times less than a microsecond apart may round to the same: the span is then one microsecond.
    wanted_end_us = np.maximum(wanted_end_us, begin_us + 1)
    after_the_end = begin_us >= video_end_us
    left = drop("begins_after_the_last_chunk", after_the_end)
    begin_us, wanted_end_us, video_end_us = (array[~after_the_end] for array in (begin_us, wanted_end_us, video_end_us))
    end_us = np.minimum(wanted_end_us, video_end_us)

    first = search.last_started(video_row[left], begin_us // 1000)
    last = search.last_started(video_row[left], (end_us - 1) // 1000)
    num_gaps = search.num_gaps
    is_missing = (
        (first < 0)
        | (chunks.video_row[first] != video_row[left])
        | (num_gaps[first] != num_gaps[last])
        | (end_us > search.end_us[last] + START_ROUNDING_US)
        | (begin_us >= search.end_us[first] + START_ROUNDING_US)
    )
    kept = ~is_missing
    left = drop("chunk_missing", is_missing)
    is_selected = np.ones(len(left), bool) if selected is None else selected[left]
    if selected_chunks is not None:
        num_dropped = np.concatenate([[0], np.cumsum(~selected_chunks)])
        is_selected &= num_dropped[last[kept] + 1] == num_dropped[first[kept]]
    left = drop("not_selected", ~is_selected)
    kept[kept] = is_selected
    one_frame_us = US_PER_S * chunks.fps_den[last].astype(np.int64) // np.maximum(chunks.fps_num[last], 1)
    return UsableCaptions(
        caption=left,
        begin_us=begin_us[kept],
        end_us=end_us[kept],
        first_chunk=first[kept],
        last_chunk=last[kept],
        num_unusable=num_unusable,
        num_shortened=_number((wanted_end_us - end_us > one_frame_us)[kept], left, counts),
    )


def _number(mask: NDArray[np.bool_], rows: NDArray[np.int64], counts: NDArray[np.integer] | None) -> int:
    """How many captions the `rows` in `mask` stand for."""
    return int(mask.sum() if counts is None else counts[rows[mask]].sum())


def _to_us(times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Microseconds; times beyond the end of any video are clipped to one that is too, and that fits into 64 bits."""
    return np.rint(np.clip(times_s, -_LONGEST_S, _LONGEST_S) * US_PER_S).astype(np.int64)


@dataclass(frozen=True)
class Spans:
    """Clips in order of videos and time; one entry of each array per clip, whose index is the clip_id.

    Attributes:
        begin_us, end_us: the span in its video.
        first_chunk, last_chunk: the chunks that hold it, as rows of the chunk table.
    """

    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    first_chunk: NDArray[Any]
    last_chunk: NDArray[Any]

    def __len__(self) -> int:
        return len(self.begin_us)


@dataclass(frozen=True)
class ClipCaptions:
    """Clips and their captions: 24 bytes per clip, 8 to 28 per caption.

    Attributes:
        choice: of an entry of `caption`.
        caption: [P] index of each caption in the arrays that were given; grouped by clip, then by source.
    """

    spans: Spans
    choice: CaptionChoice
    caption: NDArray[Any]


def group_captions(usable: UsableCaptions, *, rank: NDArray[np.int16], sources: Sources) -> ClipCaptions:
    """Make one clip of all captions with the same span.

    Args:
        rank: of the source of each caption, indexed by `usable.caption`; captions with -1 are excluded.
    """
    return _joined(_grouped(usable, rank), sources)


def ungrouped_captions(usable: UsableCaptions, *, rank: NDArray[np.int16], sources: Sources) -> ClipCaptions:
    """Make one clip of each caption, even with the same span; the arguments are those of `group_captions`."""
    return _joined(_ungrouped(usable, rank), sources)


@dataclass(frozen=True)
class ClipsOfCaptions:
    """The clips of all captions of a split, and what was left out.

    Attributes:
        clips: `caption` refers to the arrays that were given.
        num_unusable, num_shortened: as in `UsableCaptions`.
    """

    clips: ClipCaptions
    num_unusable: dict[Unusable, int]
    num_shortened: int

    def remarks(self) -> list[str]:
        """Excluded and shortened captions, by reason."""
        return remarks_of(self.num_unusable, self.num_shortened)


def clips_of_captions(
    *,
    video_row: NDArray[np.integer],
    begin_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    rank: NDArray[np.int16],
    sources: Sources,
    chunks: ChunkTable,
    selected: NDArray[np.bool_] | None = None,
    selected_chunks: NDArray[np.bool_] | None = None,
    is_grouped: bool = True,
) -> ClipsOfCaptions:
    """`usable_captions`, and then `group_captions` or `ungrouped_captions`, for blocks of videos one after another.

    Clips are in order of videos, so that the result is that of all captions together, in a fraction of the memory.
    """
    parts = ClipGroups(len(video_row), num_chunks=len(chunks))
    num_unusable: Counter[Unusable] = Counter()
    num_shortened = 0
    for rows, low, high in _blocks_of_videos(video_row):
        first_chunk, own_chunks = chunks.of_videos(low, high)
        own_selected = slice(first_chunk, first_chunk + len(own_chunks))
        usable = usable_captions(
            video_row=video_row[rows].astype(np.int64),
            begin_s=begin_s[rows],
            end_s=end_s[rows],
            chunks=own_chunks,
            selected=None if selected is None else selected[rows],
            selected_chunks=None if selected_chunks is None else selected_chunks[own_selected],
        )
        num_unusable.update(usable.num_unusable)
        num_shortened += usable.num_shortened
        part = _grouped(usable, rank[rows]) if is_grouped else _ungrouped(usable, rank[rows])
        parts.add(replace(part, caption=rows[part.caption]), first_chunk=first_chunk)
    in_order = {reason: num_unusable[reason] for reason in get_args(Unusable) if num_unusable[reason]}
    return ClipsOfCaptions(parts.joined(sources), in_order, num_shortened)


def _blocks_of_videos(video_row: NDArray[np.integer]) -> Iterator[tuple[NDArray[np.integer], int, int]]:
    """Captions in blocks of about `_BLOCK`, and the range of videos of each block, in order; at least one block."""
    count, num_videos = len(video_row), int(video_row.max(initial=-1)) + 1
    if count <= _BLOCK:
        yield np.arange(count), 0, num_videos
        return
    of_video = np.zeros(num_videos, np.int64)
    for begin in range(0, count, _BLOCK):
        of_video += np.bincount(video_row[begin : begin + _BLOCK], minlength=num_videos)
    block_of_video = ((np.cumsum(of_video) - of_video) // _BLOCK).astype(np.uint16)  # which NumPy sorts by radix
    ends = np.cumsum(np.bincount(block_of_video, weights=of_video)).astype(np.int64)
    order, filled = scratch(count, index_type(count)), np.r_[0, ends[:-1]]
    for begin in range(0, count, _BLOCK):
        blocks = block_of_video[video_row[begin : begin + _BLOCK]]
        rows, at = begin + np.argsort(blocks, kind="stable"), 0
        for block, num_rows in enumerate(np.bincount(blocks).tolist()):
            order[filled[block] : filled[block] + num_rows] = rows[at : at + num_rows]
            filled[block] += num_rows
            at += num_rows
    begin = 0
    for block, end in enumerate(ends.tolist()):
        if end > begin:
            low, high = (int(np.searchsorted(block_of_video, np.uint16(block), side)) for side in ("left", "right"))
            yield order[begin:end], low, high
        begin = end


@dataclass(frozen=True)
class Clips:
    """Clips in order of videos and time; `caption` is that of each entry of `runs`."""

    spans: Spans
    runs: Runs
    caption: NDArray[Any]


def _grouped(usable: UsableCaptions, rank: NDArray[np.int16]) -> Clips:
    used = np.flatnonzero(rank[usable.caption] >= 0)
    # The first chunk identifies the video; a stable sort keeps the captions of a source in the order of their ids.
    own_rank = rank[usable.caption[used]]
    keys = (own_rank, usable.end_us[used], usable.begin_us[used], usable.first_chunk[used])
    order = np.lexsort(keys)
    used, own_rank = used[order], own_rank[order]
    begin_us, end_us, first_chunk = usable.begin_us[used], usable.end_us[used], usable.first_chunk[used]
    is_new = np.ones(len(used), bool)
    is_new[1:] = (np.diff(begin_us) != 0) | (np.diff(end_us) != 0) | (np.diff(first_chunk) != 0)
    clip = np.cumsum(is_new) - 1
    spans = spans_at(usable, used[is_new])
    return Clips(spans, runs_of(clip, own_rank, num_clips=len(spans)), usable.caption[used])


def _ungrouped(usable: UsableCaptions, rank: NDArray[np.int16]) -> Clips:
    spans, caption = spans_of_captions(usable, np.flatnonzero(rank[usable.caption] >= 0))
    runs = runs_of(np.arange(len(spans)), rank[caption], num_clips=len(spans))
    return Clips(spans, runs, caption)


class ClipGroups:
    """Collects the clips of blocks of videos: of at most `num_captions`, numbers below `num_rows` (None: the same)."""

    def __init__(self, num_captions: int, *, num_chunks: int, num_rows: int | None = None) -> None:
        of_chunk, of_caption = index_type(num_chunks), index_type(num_captions)
        self._spans = {name: Rows(num_captions, np.int64) for name in ("begin_us", "end_us")}
        self._spans |= {name: Rows(num_captions, of_chunk) for name in ("first_chunk", "last_chunk")}
        self._first_entry, self._num_runs = Rows(num_captions + 1, of_caption), Rows(num_captions, of_caption)
        self._rank, self._caption = (
            Rows(num_captions, np.int16),
            Rows(num_captions, index_type(num_rows or num_captions)),
        )

    def add(self, part: Clips, *, first_chunk: int = 0) -> None:
        """Add a block whose chunks are those from `first_chunk` on."""
        for name, rows in self._spans.items():
            rows.add(getattr(part.spans, name) + (first_chunk if name.endswith("chunk") else 0))
        self._first_entry.add(part.runs.first_entry + len(self._caption))
        self._rank.add(part.runs.rank)
        self._num_runs.add(part.runs.num_runs)
        self._caption.add(part.caption)

    def joined(self, sources: Sources) -> ClipCaptions:
        """All of them."""
        self._first_entry.add(np.array([len(self._caption)]))
        choice = choice_of(
            self._first_entry.array, rank=self._rank.array, num_runs=self._num_runs.array, weights=sources.weights
        )
        spans = Spans(**{name: rows.array for name, rows in self._spans.items()})
        return ClipCaptions(spans, choice, self._caption.array)


def _joined(part: Clips, sources: Sources) -> ClipCaptions:
    parts = ClipGroups(len(part.caption), num_chunks=int(part.spans.last_chunk.max(initial=-1)) + 1)
    parts.add(part)
    return parts.joined(sources)


def spans_of_captions(usable: UsableCaptions, used: NDArray[np.int64] | None = None) -> tuple[Spans, NDArray[np.int64]]:
    """The span of each of the `used` captions (all by default) in order of videos and time, and which caption it is."""
    used = np.arange(len(usable.caption)) if used is None else used
    used = used[np.lexsort((usable.end_us[used], usable.begin_us[used], usable.first_chunk[used]))]
    return spans_at(usable, used), usable.caption[used]


def spans_at(usable: UsableCaptions, which: NDArray[np.int64]) -> Spans:
    """The spans of some captions."""
    return Spans(
        begin_us=usable.begin_us[which],
        end_us=usable.end_us[which],
        first_chunk=smallest(usable.first_chunk[which]),
        last_chunk=smallest(usable.last_chunk[which]),
    )
