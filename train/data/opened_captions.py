"""The captions of a split, grouped into clips: what opening a set of captioned clips computes.

Captions are read in blocks, and what is kept of them is collected in `scratch`: tens of millions take little memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipmill.manifests.caption_digest import TextDigest
from clipmill.manifests.errors import UserError
from clipmill.train.data.caption_choice import Sources, choose_sources, same_text
from clipmill.train.data.chunk_table import rows_of
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.node_cache import Rows, index_type, scratch, scratch_bytes
from clipmill.train.data.stored_text import StoredText
from clipmill.train.data.usable_captions import ClipCaptions, clips_of_captions

CODED = ("video_id", "source")  # columns to open as dictionaries
_BLOCK = 1 << 21  # captions to read at a time: for each block, the ids of all videos are hashed
_TEXTS = 1 << 18  # texts in a chunk
_TEXT_BYTES = 1 << 30  # below the 2 GiB of an Arrow array


@dataclass(frozen=True)
class OpenedCaptions:
    """The clips of a split with their captions; one entry of `rows` and `caption_ids` per caption in use.

    Attributes:
        captions: of each clip; their `caption` is empty, since `rows` are in the same order.
        rows: of the text of each caption in `texts`.
        texts: those in use, in the order of the manifest; None: all texts of the manifest, from its file.
        table_rows: of each caption in the table that was given; None for those that are read from a file.
        rank_counts: number of captions by source.
        num_captions: of the split.
        num_seen, num_selected: what --where was asked about, and what it selects.
        same_text: the text, if all captions have the same.
        texts_sha256: of the texts in use.
    """

    captions: ClipCaptions
    sources: Sources
    rows: NDArray[np.int32]
    table_rows: NDArray[np.int32] | None
    caption_ids: NDArray[Any]
    num_caption_ids: int
    texts: pa.ChunkedArray | None
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
    table: pa.Table | pq.ParquetFile,
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
        table: of captions, with the columns of the manifest's; in a file, `CODED` are read as dictionaries.
        wanted_sources: see `choose_sources`.
        stored_text: captions without an embedding there are excluded; None to take all.
        each_caption: make a clip of each caption rather than of each span.

    Raises:
        UserError: the split has no captions, or none is selected.
    """
    found = _read_captions(table, chunks)
    video_row, num_captions = found.video_row.array, len(found.video_row)
    if not num_captions:
        raise no_captions(data_dir, split)
    sources, rank = _choose_sources(found, wanted=wanted_sources)
    num_other_sources, num_not_embedded = int((rank < 0).sum()), 0
    if stored_text is not None:
        for part in _slices(num_captions):
            ids = found.caption_id.array[part].astype(np.int64)
            has_text = stored_text.has(ids, video_row=video_row[part].astype(np.int64))
            num_not_embedded += int((~has_text & (rank[part] >= 0)).sum())
            rank[part][~has_text] = -1
    chunks.selection.require_captions()
    clips = clips_of_captions(
        video_row=video_row,
        begin_s=found.begin_s.array,
        end_s=found.end_s.array,
        rank=rank,
        sources=sources,
        chunks=chunks.table,
        is_grouped=not each_caption,
        selected=None if found.selected is None else found.selected.array,
        selected_chunks=chunks.selection.chunks,
    )
    captions = clips.clips
    rank_counts = np.zeros(len(sources.names), np.int64)
    for part in _slices(len(captions.caption)):
        rank_counts += np.bincount(rank[captions.caption[part]], minlength=len(rank_counts))
    table_rows = _taken(found.row.array, captions.caption)
    id_type = index_type(int(found.caption_id.array.max()))
    caption_ids = _taken(found.caption_id.array, captions.caption, kind=id_type)
    is_used = np.zeros(_num_rows(table), bool)
    is_used[table_rows] = True
    del found, video_row, rank
    texts, texts_sha256 = _used_texts(table, is_used)
    number = scratch(len(is_used), np.int32)
    np.cumsum(is_used, dtype=np.int32, out=number)
    number -= 1
    return OpenedCaptions(
        captions=replace(captions, caption=np.empty(0, np.int32)),
        sources=sources,
        rows=_taken(number, table_rows),
        table_rows=table_rows if isinstance(table, pa.Table) else None,
        caption_ids=caption_ids,
        num_caption_ids=int(caption_ids.max(initial=-1)) + 1,
        texts=texts,
        texts_sha256=texts_sha256,
        same_text=same_text(texts) if len(texts) else None,
        rank_counts=rank_counts,
        num_captions=num_captions,
        num_other_sources=num_other_sources,
        num_not_embedded=num_not_embedded,
        num_seen=chunks.selection.num_captions,
        num_selected=chunks.selection.num_selected,
        remarks=clips.remarks(),
    )


def no_captions(data_dir: Path, split: str) -> UserError:
    """The error for a split without captions."""
    return UserError(
        f"the manifest of {data_dir} has no captions of split {split!r}",
        hint="give prep manifest annotations that have some",
    )


class _Captions:
    """The captions of a split, in the order of their table.

    Attributes:
        row: in the table.
        code: of the source, an index in `names`, which has those of other splits too.
        selected: by --where; None for all.
    """

    def __init__(self, num_rows: int) -> None:
        self.row, self.video_row = Rows(num_rows, np.int32), Rows(num_rows, np.int32)
        self.begin_s, self.end_s = Rows(num_rows, np.float64), Rows(num_rows, np.float64)
        self.code, self.caption_id = Rows(num_rows, np.int16), Rows(num_rows, np.int64)
        self.names: list[str] = []
        self.selected: Rows | None = None


def _read_captions(table: pa.Table | pq.ParquetFile, chunks: ChunkSet) -> _Captions:
    schema = table.schema if isinstance(table, pa.Table) else table.schema_arrow
    columns = ["caption_id", "video_id", "begin_s", "end_s", "source"]
    columns += [name for name in chunks.selection.caption_columns(schema) if name not in columns]
    num_rows = _num_rows(table)
    found, begin = _Captions(num_rows), 0
    for block in _blocks(table, columns):
        video_row = rows_of(block["video_id"], chunks.video_ids)
        rows = np.flatnonzero(video_row >= 0)
        video_row = video_row[rows]
        every = pc.unique(block["source"])
        every = every.dictionary_decode() if pa.types.is_dictionary(every.type) else every
        found.names += [name for name in every.to_pylist() if name not in found.names]
        code = rows_of(block["source"], pa.array(found.names, pa.string()))[rows]
        selected = chunks.selection.part_of_captions(block, rows=rows, video_row=video_row)
        if selected is not None:
            found.selected = found.selected or Rows(num_rows, np.bool_)
            found.selected.add(selected)
        found.row.add(rows + begin)
        found.video_row.add(video_row)
        found.code.add(code)
        for name, kept in (("caption_id", found.caption_id), ("begin_s", found.begin_s), ("end_s", found.end_s)):
            kept.add(block[name].to_numpy()[rows])
        begin += len(block)
    return found


def _blocks(table: pa.Table | pq.ParquetFile, columns: Sequence[str], *, num_rows: int = _BLOCK) -> Iterator[pa.Table]:
    """Some columns of a table in order, at least `num_rows` at a time but for the last; of a file, whole row groups."""
    if isinstance(table, pa.Table):
        for begin in range(0, len(table), num_rows):
            yield table.select(columns).slice(begin, num_rows)
        return
    groups: list[int] = []
    count = 0
    for group in range(table.num_row_groups):
        groups.append(group)
        count += table.metadata.row_group(group).num_rows
        if count >= num_rows or group == table.num_row_groups - 1:
            yield table.read_row_groups(groups, columns=columns).unify_dictionaries()
            groups, count = [], 0


def _num_rows(table: pa.Table | pq.ParquetFile) -> int:
    return int(table.num_rows if isinstance(table, pa.Table) else table.metadata.num_rows)


def _slices(count: int) -> Iterator[slice]:
    """All rows in slices, so that what is computed of them takes little memory."""
    return (slice(begin, begin + _TEXTS) for begin in range(0, count, _TEXTS))


def _taken(values: NDArray[Any], rows: NDArray[Any], *, kind: Any = None) -> NDArray[Any]:
    found = scratch(len(rows), kind or values.dtype)
    for part in _slices(len(rows)):
        found[part] = values[rows[part]]
    return found


def _used_texts(table: pa.Table | pq.ParquetFile, is_used: NDArray[np.bool_]) -> tuple[pa.ChunkedArray, str]:
    """The texts of the rows in use, and their digest."""
    digest, texts, begin = TextDigest(), [pa.array([], pa.string())], 0
    for block in _blocks(table, ["text"], num_rows=_TEXTS):
        pieces: list[pa.StringArray] = []
        for chunk in block["text"].chunks:
            mask = is_used[begin : begin + len(chunk)]
            pieces.append(chunk if mask.all() else chunk.filter(pa.array(mask)))
            digest.add(pieces[-1])
            begin += len(chunk)
        is_small = sum(piece.nbytes for piece in pieces) < _TEXT_BYTES
        texts += [_copied(pieces)] if is_small else [_copied([piece]) for piece in pieces]
    return pa.chunked_array(texts, pa.string()), digest.hexdigest()


def _copied(pieces: Sequence[pa.StringArray]) -> pa.StringArray:
    """The texts in one array, in `scratch`."""
    lengths, contents = [np.zeros(1, np.int32)], []
    for piece in pieces:
        lengths.append(pc.binary_length(piece).to_numpy(zero_copy_only=False))
        if size := int(lengths[-1].sum()):
            _, starts, content = piece.buffers()
            first = int(np.frombuffer(starts, np.int32)[piece.offset])
            contents.append(np.frombuffer(content, np.uint8)[first : first + size])
    offsets = np.cumsum(np.concatenate(lengths), dtype=np.int32)
    return pa.StringArray.from_buffers(len(offsets) - 1, scratch_bytes([offsets]), scratch_bytes(contents))


def _choose_sources(found: _Captions, *, wanted: str | None) -> tuple[Sources, NDArray[np.int16]]:
    """The sources, and the rank of each of the split's captions."""
    code, count = found.code.array, np.zeros(len(found.names), np.int64)
    for part in _slices(len(code)):
        count += np.bincount(code[part], minlength=len(count))
    codes = np.flatnonzero(count)  # of the others, all captions are of other splits
    names = [found.names[one] for one in codes.tolist()]
    sources = choose_sources(names, wanted=wanted, elsewhere=found.names)
    rank_of_code = np.full(len(count), -1, np.int16)
    rank_of_code[codes] = sources.rank
    return sources, _taken(rank_of_code, code)
