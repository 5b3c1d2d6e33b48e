"""Usable captions of a split, and the grouping of these captions into a table of clips.

Captions are ordered by video and time (clipmill.manifests.caption_spans). If several captions share a span, the chunks
of this span are looked up only once. Texts are not copied. The resulting arrays are allocated with `scratch`, so that
tens of millions of captions take little memory.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import CaptionSpans, SpanBlock, SplitVideos, split_videos
from clipmill.manifests.caption_table import TextDigest
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.captions import (
    CaptionChoice,
    RowCaptions,
    Sources,
    choice_from_runs,
    choose_sources,
    runs_of,
    same_text,
    smallest_integers,
)
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.data_folder import ChunkSearch, ChunkTable
from clipmill.train.data.frame_sampling import START_ROUNDING_US, US_PER_S, to_whole_us
from clipmill.train.data.node_cache import Rows, index_type, scratch
from clipmill.train.data.outcomes import Unusable, remarks_of
from clipmill.train.data.samples import SampleTable

if TYPE_CHECKING:
    from clipmill.train.data.stored_text import StoredText


@dataclass(frozen=True)
class UsableCaptions:
    """Captions that can be shown. Each array has one entry per usable caption.

    Attributes:
        caption: Index of the caption in the arrays that were passed to `usable_captions`.
        begin_us, end_us: Span to show in the video, in microseconds.
        first_chunk, last_chunk: First and last chunk of the span, as rows of the chunk table.
        num_unusable: Number of captions that cannot be shown, by reason.
        num_shortened: Number of captions that are shortened because they end more than a frame after the last chunk.
    """

    caption: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    first_chunk: NDArray[np.int64]
    last_chunk: NDArray[np.int64]
    num_unusable: dict[Unusable, int]
    num_shortened: int

    def remarks(self) -> list[str]:
        """Return remarks on unusable captions, by reason, and on shortened captions."""
        return remarks_of(self.num_unusable, self.num_shortened)


def usable_captions(
    *,
    video_row: NDArray[np.int64],
    begin_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    chunks: ChunkTable,
    is_selected: NDArray[np.bool_] | None = None,
    selected_chunks: NDArray[np.bool_] | None = None,
    is_of_split: NDArray[np.bool_] | None = None,
    counts: NDArray[np.integer] | None = None,
) -> UsableCaptions:
    """Find the span and the chunks of each caption, and omit captions that cannot be shown.

    A caption is usable only if all chunks of its span exist. A caption that ends after the last chunk of its video is
    shortened to the end of this chunk.

    Args:
        video_row: Row of each caption's video.
        begin_s, end_s: Span of each caption in its video, in seconds. An `end_s` of inf means the end of the video.
        chunks: Table of chunks.
        is_selected: Mask of the captions to use; None for all.
        selected_chunks: Mask of the chunks to use; None for all. A caption is usable only if all chunks of its span are
            selected.
        is_of_split: Mask of the captions that do not overlap other splits; None for all.
        counts: Number of captions that each entry of the arrays represents; None if each represents one caption.
    """
    search = ChunkSearch(chunks)
    remaining = np.arange(len(video_row))
    num_unusable: dict[Unusable, int] = {}

    def count(mask: NDArray[np.bool_]) -> int:
        return int(mask.sum() if counts is None else counts[remaining[mask]].sum())

    def drop(reason: Unusable, is_unusable: NDArray[np.bool_]) -> NDArray[np.int64]:
        if is_unusable.any():
            num_unusable[reason] = count(is_unusable)
        return remaining[~is_unusable]

    # The comparison is negated, so that NaN counts as empty.
    remaining = drop("empty_span", ~(end_s > begin_s) | ~np.isfinite(begin_s))
    if is_of_split is not None:
        remaining = drop("other_split", ~is_of_split[remaining])
    last_of_video = search.last_of(video_row)
    if len(chunks):
        has_chunks = (last_of_video >= 0) & (chunks.video_row[last_of_video] == video_row)
    else:
        has_chunks = np.zeros(len(video_row), dtype=bool)
    remaining = drop("video_without_chunks", ~has_chunks[remaining])

    begin_us, stated_end_us = to_whole_us(begin_s[remaining]), to_whole_us(end_s[remaining])
    video_end_us = search.end_us[last_of_video[remaining]]
    full_end_us = np.where(np.isinf(end_s[remaining]), video_end_us, stated_end_us)
    # Times less than a microsecond apart may round to the same value. Make such spans one microsecond long.
    full_end_us = np.maximum(full_end_us, begin_us + 1)
    starts_too_late = begin_us >= video_end_us
    remaining = drop("begins_after_the_last_chunk", starts_too_late)
    begin_us, full_end_us, video_end_us = (array[~starts_too_late] for array in (begin_us, full_end_us, video_end_us))
    end_us = np.minimum(full_end_us, video_end_us)

    first = search.last_started(video_row[remaining], begin_us // 1000)
    last = search.last_started(video_row[remaining], (end_us - 1) // 1000)
    num_gaps = search.num_gaps
    is_missing = (
        (first < 0)
        | (chunks.video_row[first] != video_row[remaining])
        | (num_gaps[first] != num_gaps[last])
        | (end_us > search.end_us[last] + START_ROUNDING_US)
        | (begin_us >= search.end_us[first] + START_ROUNDING_US)
    )
    is_kept = ~is_missing
    remaining = drop("chunk_missing", is_missing)
    is_used = np.ones(len(remaining), bool) if is_selected is None else is_selected[remaining]
    if selected_chunks is not None:
        num_dropped = np.concatenate([[0], np.cumsum(~selected_chunks)])
        is_used &= num_dropped[last[is_kept] + 1] == num_dropped[first[is_kept]]
    remaining = drop("not_selected", ~is_used)
    is_kept[is_kept] = is_used
    one_frame_us = US_PER_S * chunks.fps_den[last].astype(np.int64) // np.maximum(chunks.fps_num[last], 1)
    return UsableCaptions(
        caption=remaining,
        begin_us=begin_us[is_kept],
        end_us=end_us[is_kept],
        first_chunk=first[is_kept],
        last_chunk=last[is_kept],
        num_unusable=num_unusable,
        num_shortened=count((full_end_us - end_us > one_frame_us)[is_kept]),
    )


@dataclass(frozen=True)
class Spans:
    """Spans of clips, ordered by video and time. Each array has one entry per clip, at the index of the clip ID.

    Attributes:
        begin_us, end_us: Span in the video, in microseconds.
        first_part, last_part: First and last chunk of the span, as rows of the chunk table.
    """

    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    first_part: NDArray[Any]
    last_part: NDArray[Any]

    def __len__(self) -> int:
        return len(self.begin_us)


def spans_at(usable: UsableCaptions, indices: NDArray[np.int64]) -> Spans:
    """Return the spans of the captions at these indices."""
    return Spans(
        begin_us=usable.begin_us[indices],
        end_us=usable.end_us[indices],
        first_part=smallest_integers(usable.first_chunk[indices]),
        last_part=smallest_integers(usable.last_chunk[indices]),
    )


@dataclass(frozen=True)
class SplitCaptions:
    """Facts about all captions of a split, collected before the captions are grouped into clips.

    Attributes:
        videos: Videos of the split.
        sources: Caption sources in use.
        rank_of_code: Rank in `sources` of each source of the manifest, by source code, int16; -1 for omitted sources.
        num_by_code: Number of captions of the split from each source of the manifest, by source code, int64.
        max_id: Highest caption ID.
    """

    videos: SplitVideos
    sources: Sources
    rank_of_code: NDArray[np.int16]
    num_by_code: NDArray[np.int64]
    max_id: int

    @property
    def num_captions(self) -> int:
        """Number of captions of the split."""
        return int(self.num_by_code.sum())

    @property
    def num_other_sources(self) -> int:
        """Number of captions from omitted sources."""
        return int(self.num_by_code[self.rank_of_code < 0].sum())


def captions_of_split(
    spans: CaptionSpans, data_dir: Path, *, split: str, video_ids: pa.Array, weights: str | None
) -> SplitCaptions:
    """Count the captions of a split by source, and select the sources to use.

    Args:
        video_ids: IDs of the videos of the split.
        weights: See `choose_sources`.
    """
    videos = split_videos(spans, data_dir, split, video_ids=video_ids)
    count, max_id = np.zeros(len(spans.sources), np.int64), -1
    for block in spans.blocks(videos):
        count += np.bincount(block.source, minlength=len(count))
        max_id = max(max_id, int(block.caption_id.max(initial=-1)))
    used_codes = np.flatnonzero(count)  # all captions from other sources belong to other splits
    sources = choose_sources([spans.sources[code] for code in used_codes], weights=weights, all_sources=spans.sources)
    rank_of_code = np.full(len(count), -1, np.int16)
    rank_of_code[used_codes] = sources.rank
    return SplitCaptions(videos, sources, rank_of_code, count, max_id)


def make_clip_table(
    spans: CaptionSpans,
    chunks: ChunkSet,
    *,
    data_dir: Path,
    split: str,
    weights: str | None,
    stored_text: "StoredText | None",
    each_caption: bool,
    table: pa.Table | None,
) -> SampleTable:
    """Group the usable captions of a split into clips.

    Args:
        spans: Spans of all captions of the videos.
        weights: Value of `--captions.sources`; see `choose_sources`.
        stored_text: Stored embeddings; captions without an embedding are omitted. None to use all captions.
        each_caption: True to make a clip for each caption instead of each span.
        table: Table of captions; None for the captions of the manifest.

    Raises:
        UserError: The split has no captions, or none is selected.
    """
    split_captions = captions_of_split(spans, data_dir, split=split, video_ids=chunks.video_ids, weights=weights)
    if not split_captions.num_captions:
        raise no_captions(data_dir, split)
    is_selected = chunks.selection.select_captions(table)
    chunks.require_same_manifest()  # all rows must refer to the same manifest
    groups = ClipGroups(
        split_captions.sources,
        num_captions=split_captions.num_captions,
        num_chunks=len(chunks.table),
        max_id=split_captions.max_id,
    )
    num_unusable = Counter[Unusable]()
    num_not_embedded = num_shortened = 0
    for span_block in spans.blocks(split_captions.videos):
        block = span_block.expand_captions() if each_caption or is_selected is not None else span_block
        rank = split_captions.rank_of_code[block.source]
        if stored_text is not None:
            video_row = np.repeat(block.video, block.counts).astype(np.int64)
            has_text = stored_text.has_embedding(block.caption_id, video_row=video_row)
            num_not_embedded += int(np.count_nonzero(~has_text & (rank >= 0)))
            rank[~has_text] = -1
        first_chunk, chunks_of_block = chunks.table.slice_videos(int(block.video[0]), int(block.video[-1]) + 1)
        selected_chunks = chunks.selection.chunks
        usable = usable_captions(
            video_row=block.video.astype(np.int64),
            begin_s=block.begin_s,
            end_s=block.end_s,
            chunks=chunks_of_block,
            is_selected=None if is_selected is None else is_selected[block.row],
            selected_chunks=None
            if selected_chunks is None
            else selected_chunks[first_chunk : first_chunk + len(chunks_of_block)],
            is_of_split=chunks.are_entirely_in_split(video_row=block.video, begin_s=block.begin_s, end_s=block.end_s),
            counts=block.counts,
        )
        num_unusable.update(usable.num_unusable)
        num_shortened += usable.num_shortened
        groups.add(clips_of(usable, block, rank, each_caption=each_caption), first_chunk=first_chunk)
    captions = groups.join()
    is_used = scratch(len(spans.texts), np.bool_)
    is_used[:] = False
    is_used[captions.rows] = True
    if is_used.all():
        texts_sha256, text = spans.texts_sha256, same_text(spans.texts) if len(is_used) else None
    else:
        texts_sha256, text = digest_used_texts(spans.texts, is_used)
    chunks.require_same_manifest()
    clips, rows, sources = len(captions.spans), captions.rows, split_captions.sources
    num_used = f"{len(rows):,} of {count_noun(split_captions.num_captions, 'caption')} of split {split!r}"
    if len(rows) != clips:
        num_used += f", one at a time for each of {clips:,} clips"
    remarks = [num_used]
    if len(sources.names) > 1 or weights is not None:
        remarks.append(sources.describe(captions.rank_counts))
    remarks.append(sources.describe_omitted(split_captions.num_other_sources))
    if num_not_embedded:
        remarks.append(f"{num_not_embedded:,} without embedding")
    remarks += remarks_of(
        {reason: num_unusable[reason] for reason in get_args(Unusable) if num_unusable[reason]}, num_shortened
    )
    return SampleTable(
        **vars(captions.spans),
        captions=RowCaptions(
            choice=captions.choice,
            sources=sources,
            texts_sha256=texts_sha256,
            caption_id=captions.caption_ids,
            text_row=rows,
            same_text=text,
        ),
        remarks=(*remarks, *chunks.selection.remarks()),
    )


class NoCaptions(UserError):
    """The split has no captions."""


def no_captions(data_dir: Path, split: str) -> NoCaptions:
    """Return the error for a split without captions."""
    return NoCaptions(
        f"the manifest of {data_dir} has no captions of split {split!r}",
        hint="run prep manifest with annotations that contain captions of this split",
        flags=("--split",),
    )


def digest_used_texts(texts: pa.ChunkedArray, is_used: NDArray[np.bool_]) -> tuple[str, str | None]:
    """Return the hex `TextDigest` of the texts in use, and their common text, or None if the texts differ."""
    digest, begin, common_texts = TextDigest(), 0, set[str | None]()
    for chunk in texts.chunks:
        texts_in_chunk = chunk.filter(pa.array(is_used[begin : begin + len(chunk)]))
        begin += len(chunk)
        digest.add(texts_in_chunk)
        if len(texts_in_chunk) and len(common_texts) < 2:
            common_texts |= {same_text(pa.chunked_array([texts_in_chunk])), texts_in_chunk[0].as_py()}
    return digest.hexdigest(), common_texts.pop() if len(common_texts) == 1 else None


@dataclass(frozen=True)
class ClipCaptions:
    """Clips and their captions. The arrays take 24 bytes per clip and 8 to 28 bytes per caption.

    Attributes:
        spans: Spans of the clips.
        choice: Entries of the captions of each clip, as indices into `rows` and `caption_ids`.
        rows: Row of each caption's text, [P], grouped by clip and source.
        caption_ids: ID of each caption, [P].
        rank_counts: Number of captions from each source in use, by rank, int64.
    """

    spans: Spans
    choice: CaptionChoice
    rows: NDArray[np.int32]
    caption_ids: NDArray[Any]
    rank_counts: NDArray[np.int64]


@dataclass(frozen=True)
class Clips:
    """Clips ordered by video and time, and their captions.

    Attributes:
        spans: Spans of the clips.
        clip, rank, row, caption_id: Clip, source rank, text row and ID of each caption.
    """

    spans: Spans
    clip: NDArray[np.int64]
    rank: NDArray[np.int16]
    row: NDArray[np.int32]
    caption_id: NDArray[np.int64]


def clips_of(usable: UsableCaptions, block: SpanBlock, rank: NDArray[np.int16], *, each_caption: bool = False) -> Clips:
    """Group captions into clips: all captions whose spans are equal to the microsecond form one clip.

    Args:
        usable: Usable spans of `block`.
        rank: Rank of each caption's source, int16 [captions]; captions with rank -1 are omitted.
        each_caption: True to make a clip for each caption instead; `block` must then contain one span per caption.
    """
    # The first chunk identifies the video.
    keys: tuple[NDArray[np.integer], ...] = (usable.end_us, usable.begin_us, usable.first_chunk)
    if each_caption:
        keys = (block.row[usable.caption], *keys)
    order = None if _are_sorted(keys) else np.lexsort(keys)
    spans = usable.caption
    if order is not None:
        spans, keys = spans[order], tuple(key[order] for key in keys)
    is_new = np.ones(len(spans), bool)
    is_new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    counts = block.counts[spans]
    entries: Any = slice(None)
    if len(spans) < len(block.counts) or order is not None:
        first = np.cumsum(block.counts) - block.counts
        entries = np.repeat(first[spans] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    span_index = np.repeat(np.arange(len(spans), dtype=np.int32), counts)  # index of each caption's span in `spans`
    clip, rank_of_caption = np.repeat(np.cumsum(is_new, dtype=np.int32) - 1, counts), rank[entries]
    row, caption_id = block.row[entries], block.caption_id[entries]
    is_used = rank_of_caption >= 0
    if not is_used.all():
        clip, rank_of_caption, row, caption_id, span_index = (
            array[is_used] for array in (clip, rank_of_caption, row, caption_id, span_index)
        )
    # Sort again, if necessary: spans may have become equal by rounding, and the order of the sources may differ.
    if not _are_sorted((row, rank_of_caption, clip)):
        by_clip = np.lexsort((row, rank_of_caption, clip))
        clip, rank_of_caption, row, caption_id, span_index = (
            array[by_clip] for array in (clip, rank_of_caption, row, caption_id, span_index)
        )
    is_first = np.ones(len(clip), bool)
    is_first[1:] = clip[1:] != clip[:-1]
    first_of_clip = span_index[is_first].astype(np.int64)
    spans_of_clips = spans_at(usable, first_of_clip if order is None else order[first_of_clip])
    return Clips(spans_of_clips, np.cumsum(is_first) - 1, rank_of_caption, row, caption_id)


def _are_sorted(keys: tuple[NDArray[Any], ...]) -> bool:
    """Return True if the rows are already in the order of `np.lexsort(keys)`."""
    num_pairs = max(0, len(keys[0]) - 1)
    is_less, is_same = np.zeros(num_pairs, bool), np.ones(num_pairs, bool)
    for key in keys[::-1]:
        is_less = is_less | (is_same & (key[1:] < key[:-1]))
        is_same = is_same & (key[1:] == key[:-1])
    return not np.any(is_less)


class ClipGroups:
    """Collector for the clips of a split. Clips are added in blocks of videos.

    Args:
        sources: Caption sources in use.
        num_captions: Maximum number of captions.
        num_chunks: Number of chunks.
        max_id: Highest caption ID.
    """

    def __init__(self, sources: Sources, *, num_captions: int, num_chunks: int, max_id: int) -> None:
        chunk_type, caption_type = index_type(num_chunks), index_type(num_captions)
        self._sources = sources
        self._spans = {name: Rows(num_captions, np.int64) for name in ("begin_us", "end_us")}
        self._spans |= {name: Rows(num_captions, chunk_type) for name in ("first_part", "last_part")}
        self._first_entry, self._num_runs = Rows(num_captions + 1, caption_type), Rows(num_captions, caption_type)
        self._rank, self._rows = Rows(num_captions, np.int16), Rows(num_captions, np.int32)
        self._caption_ids = Rows(num_captions, index_type(max_id))
        self._rank_counts = np.zeros(len(sources.names), np.int64)

    def add(self, clips: Clips, *, first_chunk: int = 0) -> None:
        """Add the clips of a block. `first_chunk` is the row of the block's first chunk in the chunk table."""
        for name, rows in self._spans.items():
            rows.add(getattr(clips.spans, name) + (first_chunk if name.endswith("part") else 0))
        runs = runs_of(clips.clip, clips.rank, num_clips=len(clips.spans))
        self._first_entry.add(runs.first_entry + len(self._rows))
        self._rank.add(runs.rank)
        self._num_runs.add(runs.num_runs)
        self._rows.add(clips.row)
        self._caption_ids.add(clips.caption_id)
        self._rank_counts += np.bincount(clips.rank, minlength=len(self._rank_counts))

    def join(self) -> ClipCaptions:
        """Return the clips of all blocks."""
        self._first_entry.add(np.array([len(self._rows)]))
        choice = choice_from_runs(
            self._first_entry.array,
            rank=self._rank.array,
            num_runs=self._num_runs.array,
            weights=self._sources.weights,
        )
        spans = Spans(**{name: rows.array for name, rows in self._spans.items()})
        return ClipCaptions(spans, choice, self._rows.array, self._caption_ids.array, self._rank_counts)
