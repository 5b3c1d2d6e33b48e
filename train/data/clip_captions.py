"""Grouping captions into clips: the captions of one span are one clip, which is shown with any of them. Arrays only."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import SpanBlock
from clipmill.train.data.caption_choice import CaptionChoice, Sources, choice_of, runs_of
from clipmill.train.data.node_cache import Rows, index_type
from clipmill.train.data.usable_captions import Spans, UsableCaptions, spans_at


@dataclass(frozen=True)
class ClipCaptions:
    """Clips and their captions: 24 bytes per clip, 8 to 28 per caption.

    Attributes:
        choice: of a caption of a clip, as an entry of the next two arrays.
        rows: [P] of the text of each caption; grouped by clip, then by source.
        caption_ids: [P] likewise.
        rank_counts: int64, number of captions by source.
    """

    spans: Spans
    choice: CaptionChoice
    rows: NDArray[np.int32]
    caption_ids: NDArray[Any]
    rank_counts: NDArray[np.int64]


@dataclass(frozen=True)
class Clips:
    """Clips in order of videos and time, and for each of their captions clip, rank of the source, row and id."""

    spans: Spans
    clip: NDArray[np.int64]
    rank: NDArray[np.int16]
    row: NDArray[np.int32]
    caption_id: NDArray[np.int64]


def clips_of(usable: UsableCaptions, block: SpanBlock, rank: NDArray[np.int16], *, each_caption: bool = False) -> Clips:
    """Make one clip of all captions whose spans are the same in microseconds.

    Args:
        usable: of the spans of `block`.
        rank: [captions], that of the source of each; captions with -1 are left out.
        each_caption: make one clip of each caption instead; `block` then has a span for each.
    """
    # The first chunk identifies the video.
    keys: tuple[NDArray[np.integer], ...] = (usable.end_us, usable.begin_us, usable.first_chunk)
    if each_caption:
        keys = (block.row[usable.caption], *keys)
    order = None if _ascend(keys) else np.lexsort(keys)
    spans = usable.caption
    if order is not None:
        spans, keys = spans[order], tuple(key[order] for key in keys)
    is_new = np.ones(len(spans), bool)
    is_new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    counts = block.counts[spans]
    which: Any = slice(None)
    if len(spans) < len(block.counts) or order is not None:
        first = np.cumsum(block.counts) - block.counts
        which = np.repeat(first[spans] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    number = np.repeat(np.arange(len(spans), dtype=np.int32), counts)  # of each caption's span in `spans`
    clip, own_rank, row = np.repeat(np.cumsum(is_new, dtype=np.int32) - 1, counts), rank[which], block.row[which]
    caption_id = block.caption_id[which]
    is_used = own_rank >= 0
    if not is_used.all():
        clip, own_rank, row, caption_id, number = (
            array[is_used] for array in (clip, own_rank, row, caption_id, number)
        )
    if not _ascend((row, own_rank, clip)):  # spans that round to the same, or sources in another order
        by_clip = np.lexsort((row, own_rank, clip))
        clip, own_rank, row, caption_id, number = (
            array[by_clip] for array in (clip, own_rank, row, caption_id, number)
        )
    begins = np.ones(len(clip), bool)
    begins[1:] = clip[1:] != clip[:-1]
    first_of_clip = number[begins].astype(np.int64)
    found = spans_at(usable, first_of_clip if order is None else order[first_of_clip])
    return Clips(found, np.cumsum(begins) - 1, own_rank, row, caption_id)


def _ascend(keys: tuple[NDArray[Any], ...]) -> bool:
    """Whether rows are in the order of `np.lexsort(keys)`."""
    num_pairs = max(0, len(keys[0]) - 1)
    is_less, is_same = np.zeros(num_pairs, bool), np.ones(num_pairs, bool)
    for key in keys[::-1]:
        is_less = is_less | (is_same & (key[1:] < key[:-1]))
        is_same = is_same & (key[1:] == key[:-1])
    return not np.any(is_less)


class ClipGroups:
    """Collects the clips of blocks of videos.

    Args:
        num_captions: limit of their captions.
        max_id: of the captions.
    """

    def __init__(self, sources: Sources, *, num_captions: int, num_chunks: int, max_id: int) -> None:
        of_chunk, of_caption = index_type(num_chunks), index_type(num_captions)
        self._sources = sources
        self._spans = {name: Rows(num_captions, np.int64) for name in ("begin_us", "end_us")}
        self._spans |= {name: Rows(num_captions, of_chunk) for name in ("first_part", "last_part")}
        self._first_entry, self._num_runs = Rows(num_captions + 1, of_caption), Rows(num_captions, of_caption)
        self._rank, self._rows = Rows(num_captions, np.int16), Rows(num_captions, np.int32)
        self._caption_ids = Rows(num_captions, index_type(max_id))
        self._rank_counts = np.zeros(len(sources.names), np.int64)

    def add(self, part: Clips, *, first_chunk: int = 0) -> None:
        """Add a block whose chunks are those from `first_chunk` on."""
        for name, rows in self._spans.items():
            rows.add(getattr(part.spans, name) + (first_chunk if name.endswith("part") else 0))
        runs = runs_of(part.clip, part.rank, num_clips=len(part.spans))
        self._first_entry.add(runs.first_entry + len(self._rows))
        self._rank.add(runs.rank)
        self._num_runs.add(runs.num_runs)
        self._rows.add(part.row)
        self._caption_ids.add(part.caption_id)
        self._rank_counts += np.bincount(part.rank, minlength=len(self._rank_counts))

    def joined(self) -> ClipCaptions:
        """All of them."""
        self._first_entry.add(np.array([len(self._rows)]))
        choice = choice_of(
            self._first_entry.array,
            rank=self._rank.array,
            num_runs=self._num_runs.array,
            weights=self._sources.weights,
        )
        spans = Spans(**{name: rows.array for name, rows in self._spans.items()})
        return ClipCaptions(spans, choice, self._rows.array, self._caption_ids.array, self._rank_counts)
