"""Which captions can be shown: those whose whole span lies in existing chunks. Arrays only."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.caption_choice import smallest_integers
from clipmill.train.data.chunk_table import ChunkTable
from clipmill.train.data.frame_sampling import START_ROUNDING_US, US_PER_S
from clipmill.train.data.outcomes import Unusable, remarks_of

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
    """Microseconds; times beyond the end of any video are clipped to a later time that fits into 64 bits."""
    return np.rint(np.clip(times_s, -_LONGEST_S, _LONGEST_S) * US_PER_S).astype(np.int64)


@dataclass(frozen=True)
class Spans:
    """Clips in order of videos and time; one entry of each array per clip, whose index is the clip_id.

    Attributes:
        begin_us, end_us: the span in its video.
        first_part, last_part: the chunks that hold it, as rows of the chunk table.
    """

    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    first_part: NDArray[Any]
    last_part: NDArray[Any]

    def __len__(self) -> int:
        return len(self.begin_us)


def spans_of_captions(usable: UsableCaptions) -> tuple[Spans, NDArray[np.int64]]:
    """The span of each caption in order of videos and time, and which caption it is."""
    order = np.lexsort((usable.end_us, usable.begin_us, usable.first_chunk))
    return spans_at(usable, order), usable.caption[order]


def spans_at(usable: UsableCaptions, which: NDArray[np.int64]) -> Spans:
    """The spans of some captions."""
    return Spans(
        begin_us=usable.begin_us[which],
        end_us=usable.end_us[which],
        first_part=smallest_integers(usable.first_chunk[which]),
        last_part=smallest_integers(usable.last_chunk[which]),
    )
