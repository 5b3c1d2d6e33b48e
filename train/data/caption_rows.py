"""The captions of a split, grouped into clips: the table of captioned clips.

Captions come in the order of videos and times (clipmill.manifests.caption_spans), so that spans are searched rather
than captions, and texts stay where they are. What is kept of them is collected in `scratch`: tens of millions take
little memory.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_digest import TextDigest
from clipmill.manifests.caption_reader import rows_of_split
from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.train.data.caption_choice import Sources, choose_sources, same_text
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.clip_captions import ClipGroups, clips_of
from clipmill.train.data.node_cache import scratch
from clipmill.train.data.outcomes import Unusable, remarks_of
from clipmill.train.data.table import RowCaptions, SampleTable
from clipmill.train.data.usable_captions import usable_captions

if TYPE_CHECKING:
    from clipmill.train.data.stored_text import StoredText


@dataclass(frozen=True)
class SplitCaptions:
    """What is known of the captions of a split before they are read one by one.

    Attributes:
        video_row: for each video of the manifest its row among those of the split, else -1.
        rank_of_code: int16, rank in `sources` of each source of the manifest; -1 for those that are left out.
        num_by_code: int64, captions of the split by source of the manifest.
        max_id: of a caption.
    """

    video_row: NDArray[np.int32]
    sources: Sources
    rank_of_code: NDArray[np.int16]
    num_by_code: NDArray[np.int64]
    max_id: int

    @property
    def num_captions(self) -> int:
        """Number of captions."""
        return int(self.num_by_code.sum())

    @property
    def num_other_sources(self) -> int:
        """Captions of sources that are left out."""
        return int(self.num_by_code[self.rank_of_code < 0].sum())


def captions_of_split(
    spans: CaptionSpans, data_dir: Path, *, split: str, video_ids: pa.Array, wanted_sources: str | None
) -> SplitCaptions:
    """Count the captions of a split, and choose among their sources.

    Args:
        video_ids: the videos of the split.
        wanted_sources: see `choose_sources`.
    """
    video_row = rows_of_split(data_dir, split, video_ids=video_ids)
    count, max_id = np.zeros(len(spans.sources), np.int64), -1
    for block in spans.blocks(video_row):
        count += np.bincount(block.source, minlength=len(count))
        max_id = max(max_id, int(block.caption_id.max(initial=-1)))
    used = np.flatnonzero(count)  # of the others, all captions are of other splits
    sources = choose_sources([spans.sources[code] for code in used], wanted=wanted_sources, elsewhere=spans.sources)
    rank_of_code = np.full(len(count), -1, np.int16)
    rank_of_code[used] = sources.rank
    return SplitCaptions(video_row, sources, rank_of_code, count, max_id)


def make_clip_table(
    spans: CaptionSpans,
    chunks: ChunkSet,
    *,
    data_dir: Path,
    split: str,
    wanted_sources: str | None,
    stored_text: "StoredText | None",
    each_caption: bool,
    table: pa.Table | None,
) -> SampleTable:
    """Group the captions of a split that can be shown into clips.

    Args:
        spans: Captions of the videos of `data_dir`.
        wanted_sources: See `choose_sources`.
        stored_text: Captions without an embedding there are left out; None to take all.
        each_caption: Make a clip of each caption rather than of each span.
        table: The captions as a table, if they are not the manifest's.

    Raises:
        UserError: the split has no captions, or none is selected.
    """
    of_split = captions_of_split(
        spans, data_dir, split=split, video_ids=chunks.video_ids, wanted_sources=wanted_sources
    )
    if not of_split.num_captions:
        raise no_captions(data_dir, split)
    selected = chunks.selection.of_captions(table)
    groups = ClipGroups(
        of_split.sources,
        num_captions=of_split.num_captions,
        num_chunks=len(chunks.table),
        max_id=of_split.max_id,
    )
    num_unusable = Counter[Unusable]()
    num_not_embedded = num_shortened = 0
    for stored in spans.blocks(of_split.video_row):
        block = stored.each_caption() if each_caption or selected is not None else stored
        rank = of_split.rank_of_code[block.source]
        if stored_text is not None:
            video_row = np.repeat(block.video, block.counts).astype(np.int64)
            has_text = stored_text.has(block.caption_id, video_row=video_row)
            num_not_embedded += int(np.count_nonzero(~has_text & (rank >= 0)))
            rank[~has_text] = -1
        first_chunk, own_chunks = chunks.table.of_videos(int(block.video[0]), int(block.video[-1]) + 1)
        selected_chunks = chunks.selection.chunks
        usable = usable_captions(
            video_row=block.video.astype(np.int64),
            begin_s=block.begin_s,
            end_s=block.end_s,
            chunks=own_chunks,
            selected=None if selected is None else selected[block.row],
            selected_chunks=None
            if selected_chunks is None
            else selected_chunks[first_chunk : first_chunk + len(own_chunks)],
            counts=block.counts,
        )
        num_unusable.update(usable.num_unusable)
        num_shortened += usable.num_shortened
        groups.add(clips_of(usable, block, rank, each_caption=each_caption), first_chunk=first_chunk)
    captions = groups.joined()
    is_used = scratch(len(spans.texts), np.bool_)
    is_used[:] = False
    is_used[captions.rows] = True
    if is_used.all():
        texts_sha256, text = spans.texts_sha256, same_text(spans.texts) if len(is_used) else None
    else:
        texts_sha256, text = used_texts(spans.texts, is_used)
    clips, rows, sources = len(captions.spans), captions.rows, of_split.sources
    num_used = f"{len(rows):,} of {counted(of_split.num_captions, 'caption')} of split {split!r}"
    if len(rows) != clips:
        num_used += f", one at a time for each of {clips:,} clips"
    remarks = [num_used]
    if len(sources.names) > 1 or wanted_sources is not None:
        remarks.append(sources.describe(captions.rank_counts))
    remarks.append(sources.describe_excluded(of_split.num_other_sources))
    if num_not_embedded:
        remarks.append(f"{num_not_embedded:,} without embedding")
    remarks += remarks_of({why: num_unusable[why] for why in get_args(Unusable) if num_unusable[why]}, num_shortened)
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


def no_captions(data_dir: Path, split: str) -> UserError:
    """The error for a split without captions."""
    return UserError(
        f"the manifest of {data_dir} has no captions of split {split!r}",
        hint="run prep manifest with annotations that have captions of this split",
    )


def used_texts(texts: pa.ChunkedArray, is_used: NDArray[np.bool_]) -> tuple[str, str | None]:
    """`TextDigest` of the texts in use, and the text if all of them have the same."""
    digest, begin, same = TextDigest(), 0, set[str | None]()
    for chunk in texts.chunks:
        used = chunk.filter(pa.array(is_used[begin : begin + len(chunk)]))
        begin += len(chunk)
        digest.add(used)
        if len(used) and len(same) < 2:
            same |= {same_text(pa.chunked_array([used])), used[0].as_py()}
    return digest.hexdigest(), same.pop() if len(same) == 1 else None
