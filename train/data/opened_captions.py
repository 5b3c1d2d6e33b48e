"""The captions of a split, grouped into clips: what opening a set of captioned clips computes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.caption_digest import TextDigest
from manifests.errors import UserError
from train.data.caption_choice import Sources, choose_sources, same_text, smallest
from train.data.chunk_table import rows_of
from train.data.chunks import ChunkSet
from train.data.stored_text import StoredText
from train.data.usable_captions import ClipCaptions, clips_of_captions


@dataclass(frozen=True)
class OpenedCaptions:
    """The clips of a split with their captions; one entry of `rows` and `caption_ids` per caption in use.

    Attributes:
        captions: of each clip; their `caption` is empty, since `rows` are in the same order.
        rows: of the text of each caption in `texts`, which are those in use, in the order of the manifest.
        table_rows: of each caption in the table that was given; None for the manifest's.
        rank_counts: number of captions by source.
        num_captions: of the split.
        num_seen, num_selected: what --where was asked about, and what it selects.
        same_text: the text, if all captions have the same.
        texts_sha256: of `texts`.
    """

    captions: ClipCaptions
    sources: Sources
    rows: NDArray[np.int32]
    table_rows: NDArray[np.int32] | None
    caption_ids: NDArray[Any]
    num_caption_ids: int
    texts: pa.ChunkedArray
    texts_sha256: str
    same_text: str | None
    rank_counts: NDArray[np.int64]
    num_captions: int
    num_other_sources: int
    num_not_embedded: int
    num_seen: int
    num_selected: int
    remarks: list[str]


def open_clip_captions(
    table: pa.Table,
    chunks: ChunkSet,
    *,
    data_dir: Path,
    split: str,
    wanted_sources: str | None,
    stored_text: StoredText | None,
    each_caption: bool,
) -> OpenedCaptions:
    """Group the captions of a split that can be shown into clips.

    Args:
        table: of captions, with the columns of the manifest's.
        wanted_sources: see `choose_sources`.
        stored_text: captions without an embedding there are excluded; None to take all.
        each_caption: make a clip of each caption rather than of each span.

    Raises:
        UserError: the split has no captions, or none is selected.
    """
    video_row = rows_of(table["video_id"], chunks.video_ids)
    of_split = np.flatnonzero(video_row >= 0)
    if not len(of_split):
        raise UserError(
            f"the manifest of {data_dir} has no captions of split {split!r}",
            hint="give prep manifest annotations that have some",
        )
    video_row, num_captions = video_row[of_split], len(of_split)
    sources, rank = _choose_sources(table["source"], of_split, wanted=wanted_sources)
    caption_id = table["caption_id"].to_numpy()
    num_other_sources, num_not_embedded = int((rank < 0).sum()), 0
    if stored_text is not None:
        has_text = stored_text.has(caption_id[of_split], video_row=video_row)
        num_not_embedded = int((~has_text & (rank >= 0)).sum())
        rank = np.where(has_text, rank, np.int16(-1))
    clips = clips_of_captions(
        video_row=video_row,
        begin_s=table["begin_s"].to_numpy()[of_split],
        end_s=table["end_s"].to_numpy()[of_split],
        rank=rank,
        sources=sources,
        chunks=chunks.table,
        is_grouped=not each_caption,
        **chunks.selection.of_captions(table, rows=of_split, video_row=video_row),
    )
    captions = clips.clips
    rank_counts = np.bincount(rank[captions.caption], minlength=len(sources.names))
    rows = of_split[captions.caption].astype(np.int32)
    del video_row, of_split, rank
    is_used = np.zeros(len(table), bool)
    is_used[rows] = True
    used = smallest(np.flatnonzero(is_used))
    texts, texts_sha256 = _used_texts(table["text"], used)
    caption_ids = smallest(caption_id[rows])
    return OpenedCaptions(
        captions=replace(captions, caption=np.empty(0, np.int32)),
        sources=sources,
        rows=(np.cumsum(is_used, dtype=np.int32) - np.int32(1))[rows],
        table_rows=rows,
        caption_ids=caption_ids,
        num_caption_ids=int(caption_ids.max(initial=-1)) + 1,
        texts=texts,
        texts_sha256=texts_sha256,
        same_text=same_text(texts, np.arange(len(used))) if len(used) else None,
        rank_counts=rank_counts,
        num_captions=num_captions,
        num_other_sources=num_other_sources,
        num_not_embedded=num_not_embedded,
        num_seen=chunks.selection.num_captions,
        num_selected=chunks.selection.num_selected,
        remarks=clips.remarks(),
    )


def _used_texts(column: pa.ChunkedArray, used: NDArray[np.int32]) -> tuple[pa.ChunkedArray, str]:
    """The texts at some rows, which ascend, and their digest."""
    digest, texts, begin = TextDigest(), [pa.array([], pa.string())], 0
    for chunk in column.chunks:
        first, last = np.searchsorted(used, (begin, begin + len(chunk)))
        is_whole = last - first == len(chunk)
        texts.append(chunk if is_whole else chunk.take(pa.array(used[first:last] - begin)))
        digest.add(texts[-1])
        begin += len(chunk)
    return pa.chunked_array(texts, pa.string()), digest.hexdigest()


def _choose_sources(
    source: pa.ChunkedArray, of_split: NDArray[np.int64], *, wanted: str | None
) -> tuple[Sources, NDArray[np.int16]]:
    """The sources, and the rank of each of the split's captions."""
    # The dictionary may have sources that do not occur; of those that do, some are of other splits alone.
    every = pc.unique(source).dictionary_decode() if pa.types.is_dictionary(source.type) else pc.unique(source)
    code = rows_of(source, every).astype(np.int32)[of_split]
    codes = np.flatnonzero(np.bincount(code, minlength=len(every)))
    names = [every[int(one)].as_py() for one in codes]
    sources = choose_sources(names, wanted=wanted, elsewhere=every.to_pylist())
    rank_of_code = np.full(len(every), -1, np.int16)
    rank_of_code[codes] = sources.rank
    return sources, rank_of_code[code]
