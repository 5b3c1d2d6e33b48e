"""The captions of a segment: those of its video whose span overlaps it.

Captions may need stored embeddings; captions without one are then excluded. Everything is arrays: a pair of segment and
caption takes four bytes, a caption up to twelve, a segment eight; if a segment has captions of several sources, each of
its sources takes twelve more.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.caption_choice import caption_choice, same_text, smallest_integers
from clipmill.train.data.caption_rows import SplitCaptions, captions_of_split, used_texts
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.latents.segments import LatentRecords, Segments, times_us
from clipmill.train.data.stored_text import TextRows
from clipmill.train.data.table import RowCaptions

_BLOCK = 1 << 16  # pairs processed at a time


def pair_captions(
    query: SegmentQuery,
    stored: CaptionSpans,
    *,
    records: LatentRecords,
    segments: Segments,
    text: TextRows | None,
    video_ids: pa.Array,
    selected: NDArray[np.bool_] | None,
    keep: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> tuple[NDArray[np.int64], RowCaptions, list[str]]:
    """Read the captions of the videos `video_ids`, which are of the split of a query, and find the segments of each.

    Args:
        stored: The captions of the manifest.
        text: The stored embeddings; None if captions need none.
        selected: Which captions are selected; None for all.
        keep: Chooses among the segments with captions, ascending.

    Returns:
        The segments, ascending; their captions, grouped by segment, then by source, ascending by id; and remarks.

    Raises:
        UserError: a caption belongs to another video in the text column than in the manifest, or a source is missing,
            or no caption is selected.
    """
    stored.verify()
    of_split = captions_of_split(
        stored, query.data_dir, split=query.split, video_ids=video_ids, wanted_sources=query.sources
    )
    span = SegmentSpans(records, segments)
    none = np.empty(0, np.int64)
    parts: list[dict[str, NDArray[Any]]] = [
        dict.fromkeys(("id", "row", "place", "tokens", "rank", "first", "last"), none)
    ]
    num_embedded = num_selected = 0
    for block in stored.blocks(of_split.video_row):
        video_row = block.video.astype(np.int64)
        overlapped = span.overlapped(video_row=video_row, begin_s=block.begin_s, end_s=block.end_s)
        video_row, first, last = (np.repeat(array, block.counts) for array in (video_row, *overlapped))
        rank = of_split.rank_of_code[block.source]
        place, tokens = np.empty(0, np.int64), np.empty(0, np.int32)
        used = rank >= 0
        if text is not None:
            row_of_text = text.find(block.caption_id, video_row=video_row, video_ids=video_ids)
            used &= row_of_text >= 0
        num_embedded += int(used.sum())
        if selected is not None:
            used &= selected[block.row]
        num_selected += int(used.sum())
        used &= last > first
        if text is not None:
            place = text.place[row_of_text[used]]
            tokens = tokens if text.num_tokens is None else text.num_tokens[row_of_text[used]]
        part: dict[str, NDArray[Any]] = {
            "id": block.caption_id,
            "row": block.row,
            "rank": rank,
            "first": first,
            "last": last,
        }
        parts.append({"place": place, "tokens": tokens, **{name: array[used] for name, array in part.items()}})
    joined = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    # Ascending indices of captions are then ascending ids, source by source.
    order = np.lexsort((joined["id"], joined["rank"]))
    rank, text_row = joined["rank"][order], joined["row"][order].astype(np.int32)
    counts, pair_caption = _pairs(joined["first"][order], joined["last"][order], num_segments=len(segments))
    shown = np.flatnonzero(counts)
    segment = keep(shown)
    if len(segment) < len(shown):
        is_kept = np.zeros(len(segments), bool)
        is_kept[segment] = True
        pair_caption = pair_caption[np.repeat(is_kept, counts)]
    choice = caption_choice(
        np.repeat(np.arange(len(segment)), counts[segment]),
        rank[pair_caption],
        num_clips=len(segment),
        weights=of_split.sources.weights,
    )
    captions = RowCaptions(
        choice=choice,
        sources=of_split.sources,
        texts_sha256=_words_sha256(stored, text_row, rank=rank, of_split=of_split),
        caption=pair_caption,
        text_row=text_row,
        same_text=same_text(stored.texts, np.sort(text_row)) if len(text_row) else None,
        caption_id=smallest_integers(joined["id"][order]),
        place=None if text is None else joined["place"][order],
        num_tokens=None if text is None or text.num_tokens is None else joined["tokens"][order],
    )
    num_asked_for = of_split.num_captions - of_split.num_other_sources
    remarks = {
        f"{count_noun(len(segments) - len(shown), 'segment')} without captions left out": len(segments) - len(shown),
        of_split.sources.describe_excluded(of_split.num_other_sources): of_split.num_other_sources,
        f"{count_noun(num_asked_for - num_embedded, 'caption')} without embedding": num_asked_for - num_embedded,
        f"{count_noun(num_embedded - num_selected, 'caption')} not selected": num_embedded - num_selected,
        f"{count_noun(num_selected - len(order), 'caption')} outside of all segments": num_selected - len(order),
    }
    return segment, captions, [remark for remark, count in remarks.items() if count]


def _words_sha256(
    captions: CaptionSpans, rows: NDArray[np.int32], *, rank: NDArray[np.int16], of_split: SplitCaptions
) -> str:
    """Digest of the texts of `rows`, source by source."""
    each = []
    for code, its_rank in enumerate(of_split.rank_of_code.tolist()):
        if its_rank >= 0:
            is_used = np.zeros(len(captions.texts), bool)
            is_used[rows[rank == its_rank]] = True
            each.append(f"{captions.sources[code]} {used_texts(captions.texts, is_used)[0]}")
    return hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()


class SegmentSpans:
    """Finds the segments that a span of a video overlaps; video and time are searched as one number.

    Attributes:
        lengths_us: int64 [segments], duration of each, microseconds.
    """

    def __init__(self, records: LatentRecords, segments: Segments) -> None:
        numbers = np.arange(len(segments))
        self._begins, self._ends = times_us(records, segments, numbers)
        self.lengths_us: NDArray[np.int64] = self._ends - self._begins
        self._step = int(self._ends.max(initial=0)) + 2  # more than any time of a video
        before = records.video_row[segments.chunk_of(numbers)] * np.int64(self._step)
        self._begins += before
        self._ends += before

    def overlapped(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each span the first segment of its video that overlaps it, and the one after the last."""
        begin, end = self._keys(video_row=video_row, begin_s=begin_s, end_s=end_s)
        first = np.searchsorted(self._ends, begin, side="right")
        last = np.searchsorted(self._begins, end, side="left")
        return first, np.where(end > begin, last, first)

    def longest(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each segment the span that shares the most time with it, and how much that is, microseconds.

        Among equal spans it is the first; -1 and 0 if none overlaps the segment.
        """
        begin, end = self._keys(video_row=video_row, begin_s=begin_s, end_s=end_s)
        first, last = self.overlapped(video_row=video_row, begin_s=begin_s, end_s=end_s)
        widths = np.maximum(last - first, 0)
        span = np.repeat(np.arange(len(first)), widths)
        segment = np.arange(len(span)) - np.repeat(np.cumsum(widths) - widths, widths) + first[span]
        shared_us = np.minimum(end[span], self._ends[segment]) - np.maximum(begin[span], self._begins[segment])
        # The last value written to a segment stays: the longest, and among equal ones the first.
        order = np.lexsort((-span, shared_us))
        longest = np.full(len(self._begins), -1)
        longest_us = np.zeros(len(self._begins), np.int64)
        longest[segment[order]] = span[order]
        longest_us[segment[order]] = shared_us[order]
        return longest, longest_us

    def _keys(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        step = self._step
        # NaN is not a time: such a span is empty.
        begin = np.clip(np.nan_to_num(np.rint(begin_s * US_PER_S), nan=step), 0, step - 1).astype(np.int64)
        end = np.clip(np.nan_to_num(np.rint(end_s * US_PER_S), nan=0, posinf=step), 0, step - 1).astype(np.int64)
        return video_row * step + begin, video_row * step + end


def _pairs(
    first: NDArray[np.int64], last: NDArray[np.int64], *, num_segments: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Captions of each segment: how many, and which, segment by segment and ascending within each."""
    steps = np.bincount(first, minlength=num_segments + 1) - np.bincount(last, minlength=num_segments + 1)
    counts = np.cumsum(steps)[:num_segments]
    pair_caption = np.empty(int((last - first).sum()), np.int32)
    where = np.concatenate([[0], np.cumsum(counts)])
    for block in _blocks(first, last):
        widths = last[block] - first[block]
        caption = np.repeat(block, widths)
        within = np.arange(len(caption)) - np.repeat(np.cumsum(widths) - widths, widths)
        segment = np.repeat(first[block], widths) + within
        order = np.argsort(segment, kind="stable")
        segment = segment[order]
        begins = np.flatnonzero(np.r_[True, segment[1:] != segment[:-1]])
        run = np.diff(np.r_[begins, len(segment)])
        pair_caption[where[segment] + np.arange(len(segment)) - np.repeat(begins, run)] = caption[order]
        where[segment[begins]] += run
    return counts, pair_caption


def _blocks(first: NDArray[np.int64], last: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Captions in order, in blocks of a bounded number of pairs."""
    total = np.cumsum(last - first)
    begin = 0
    while begin < len(first):
        before = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, before + _BLOCK, side="right")))
        yield np.arange(begin, end)
        begin = end
