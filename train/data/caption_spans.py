"""Opening tens of millions of captions from the files that `prep` keeps of them (clipmill.manifests.caption_spans).

The result is that of `clipmill.train.data.opened_captions`, which reads, sorts and copies every caption. Here captions
come in order, so that spans are searched rather than captions, and texts stay where they are: a caption costs some
additions.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_digest import TextDigest
from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.store import read_videos
from clipmill.train.data.caption_choice import choose_sources, runs_of, same_text
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.node_cache import Rows, index_type, scratch
from clipmill.train.data.opened_captions import OpenedCaptions, no_captions
from clipmill.train.data.outcomes import Unusable, remarks_of
from clipmill.train.data.stored_text import StoredText
from clipmill.train.data.usable_captions import (
    ClipGroups,
    Clips,
    UsableCaptions,
    spans_at,
    usable_captions,
)


def open_captions_by_span(
    files: CaptionSpans,
    chunks: ChunkSet,
    *,
    data_dir: Path,
    split: str,
    wanted_sources: str | None,
    stored_text: StoredText | None,
) -> OpenedCaptions:
    """Group the captions of a split that can be shown into clips: `open_clip_captions` without a selection of captions.

    Raises:
        DamagedSpans, OSError: a file cannot be used.
        UserError: the split has no captions.
    """
    files.verify()
    split_row = _split_rows(data_dir, split)
    count, max_id = _count_sources(files, split_row)
    num_captions = int(count.sum())
    if not num_captions:
        raise no_captions(data_dir, split)
    used = np.flatnonzero(count)  # of the others, all captions are of other splits
    sources = choose_sources([files.sources[code] for code in used], wanted=wanted_sources, elsewhere=files.sources)
    rank_of_code = np.full(len(count), -1, np.int16)
    rank_of_code[used] = sources.rank
    groups = ClipGroups(num_captions, num_chunks=len(chunks.table), num_rows=files.num_captions)
    caption_ids, num_unusable = Rows(num_captions, index_type(max_id)), Counter[Unusable]()
    num_other_sources = num_not_embedded = num_shortened = 0
    rank_counts = np.zeros(len(sources.names), np.int64)
    for part in _parts_of_split(files, split_row):
        rank = rank_of_code[part.source]
        num_other_sources += int(np.count_nonzero(rank < 0))
        if stored_text is not None:
            has_text = stored_text.has(part.caption_id, video_row=np.repeat(part.video, part.counts).astype(np.int64))
            num_not_embedded += int(np.count_nonzero(~has_text & (rank >= 0)))
            rank[~has_text] = -1
        first_chunk, own_chunks = chunks.table.of_videos(int(part.video[0]), int(part.video[-1]) + 1)
        selected = chunks.selection.chunks
        usable = usable_captions(
            video_row=part.video.astype(np.int64),
            begin_s=part.begin_s,
            end_s=part.end_s,
            chunks=own_chunks,
            selected_chunks=None if selected is None else selected[first_chunk : first_chunk + len(own_chunks)],
            counts=part.counts,
        )
        num_unusable.update(usable.num_unusable)
        num_shortened += usable.num_shortened
        clips, which = _clips(usable, part, rank)
        groups.add(clips, first_chunk=first_chunk)
        caption_ids.add(part.caption_id[which])
        rank_counts += np.bincount(rank[which], minlength=len(rank_counts))
    captions = groups.joined(sources)
    rows = captions.caption
    is_used = scratch(files.num_captions, np.bool_)
    is_used[:] = False
    is_used[rows] = True
    texts_sha256, text = _used_texts(files, is_used)
    in_order = {reason: num_unusable[reason] for reason in get_args(Unusable) if num_unusable[reason]}
    return OpenedCaptions(
        captions=replace(captions, caption=np.empty(0, np.int32)),
        sources=sources,
        rows=rows,
        table_rows=None,
        caption_ids=caption_ids.array,
        num_caption_ids=int(caption_ids.array.max(initial=-1)) + 1,
        texts=None,
        texts_sha256=texts_sha256,
        same_text=text,
        rank_counts=rank_counts,
        num_captions=num_captions,
        num_other_sources=num_other_sources,
        num_not_embedded=num_not_embedded,
        num_seen=chunks.selection.num_captions,
        num_selected=chunks.selection.num_selected,
        remarks=remarks_of(in_order, num_shortened),
    )


@dataclass(frozen=True)
class _Part:
    """Spans of the split, in order of videos and times.

    Attributes:
        video: [S], row of the split's videos.
        counts: [S], number of captions of each span.
        source, row, caption_id: [C], of these captions; see `SpanBlock`.
    """

    video: NDArray[np.int32]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    counts: NDArray[np.int32]
    source: NDArray[np.int16]
    row: NDArray[np.int32]
    caption_id: NDArray[np.int64]


def _split_rows(data_dir: Path, split: str) -> NDArray[np.int32]:
    """For each video of the manifest its row among those of the split; -1 for those of other splits."""
    is_own = pc.equal(read_videos(data_dir)["split"], split).to_numpy()
    return np.where(is_own, np.cumsum(is_own) - 1, -1).astype(np.int32)


def _count_sources(files: CaptionSpans, split_row: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
    """The number of the split's captions by source, and the highest of their ids."""
    count, max_id = np.zeros(len(files.sources), np.int64), -1
    for part in _parts_of_split(files, split_row):
        count += np.bincount(part.source, minlength=len(count))
        max_id = max(max_id, int(part.caption_id.max(initial=-1)))
    return count, max_id


def _parts_of_split(files: CaptionSpans, split_row: NDArray[np.int32]) -> Iterator[_Part]:
    for block in files.blocks():
        video = split_row[block.video]
        counts = np.diff(block.first)
        is_own = video >= 0
        if is_own.all():
            yield _Part(video, block.begin_s, block.end_s, counts, block.source, block.row, block.caption_id)
        elif is_own.any():
            captions = np.repeat(is_own, counts)
            yield _Part(
                video=video[is_own],
                begin_s=block.begin_s[is_own],
                end_s=block.end_s[is_own],
                counts=counts[is_own],
                source=block.source[captions],
                row=block.row[captions],
                caption_id=block.caption_id[captions],
            )


def _clips(usable: UsableCaptions, part: _Part, rank: NDArray[np.int16]) -> tuple[Clips, Any]:
    """The clips of some spans, and which captions they have, in their order."""
    keys: tuple[NDArray[np.int64], ...] = (usable.end_us, usable.begin_us, usable.first_chunk)
    order = None if _ascend(keys) else np.lexsort(keys)
    spans = usable.caption
    if order is not None:
        spans, keys = spans[order], tuple(key[order] for key in keys)
    is_new = np.ones(len(spans), bool)
    is_new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    counts = part.counts[spans]
    which: Any = slice(None)
    if len(spans) < len(part.counts) or order is not None:
        first = np.cumsum(part.counts) - part.counts
        which = np.repeat(first[spans] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    number = np.repeat(np.arange(len(spans), dtype=np.int32), counts)  # of each caption's span in `spans`
    clip, own_rank, row = np.repeat(np.cumsum(is_new, dtype=np.int32) - 1, counts), rank[which], part.row[which]
    is_used = own_rank >= 0
    if not is_used.all():
        which = np.flatnonzero(is_used) if isinstance(which, slice) else which[is_used]
        clip, own_rank, row, number = clip[is_used], own_rank[is_used], row[is_used], number[is_used]
    if not _ascend((row, own_rank, clip)):  # spans that round to the same, or sources in another order
        by_clip = np.lexsort((row, own_rank, clip))
        which = by_clip if isinstance(which, slice) else which[by_clip]
        clip, own_rank, row, number = clip[by_clip], own_rank[by_clip], row[by_clip], number[by_clip]
    begins = np.ones(len(clip), bool)
    begins[1:] = clip[1:] != clip[:-1]
    first_of_clip = number[begins].astype(np.int64)
    found = spans_at(usable, first_of_clip if order is None else order[first_of_clip])
    clip_of_caption = np.cumsum(begins) - 1
    return Clips(found, runs_of(clip_of_caption, own_rank, num_clips=len(found)), row), which


def _ascend(keys: tuple[NDArray[Any], ...]) -> bool:
    """Whether rows are in the order of `np.lexsort(keys)`."""
    num_pairs = max(0, len(keys[0]) - 1)
    is_less, is_same = np.zeros(num_pairs, bool), np.ones(num_pairs, bool)
    for key in keys[::-1]:
        is_less = is_less | (is_same & (key[1:] < key[:-1]))
        is_same = is_same & (key[1:] == key[:-1])
    return not np.any(is_less)


def _used_texts(files: CaptionSpans, is_used: NDArray[np.bool_]) -> tuple[str, str | None]:
    """The digest of the texts in use, and the text if all of them have the same."""
    texts = files.texts()
    if is_used.all():
        return files.texts_sha256, same_text(texts) if len(texts) else None
    digest, begin, same = TextDigest(), 0, set[str | None]()
    for chunk in texts.chunks:
        used = chunk.filter(pa.array(is_used[begin : begin + len(chunk)]))
        begin += len(chunk)
        digest.add(used)
        if len(used) and len(same) < 2:
            same.add(same_text(pa.chunked_array([used])))
            same.add(used[0].as_py())
    return digest.hexdigest(), same.pop() if len(same) == 1 else None
