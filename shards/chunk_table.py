"""The merged tables of `video`, `latents` and `text`: what training needs of every sample to open a variant.

They are made of the indexes, so that opening reads one mapped file in place of thousands. Making a table holds its
columns as arrays (about 60 bytes per chunk), and reads only the indexes of shards that are new since the last one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.storage.mirrors import is_away
from manifests.store import read_videos
from shards.damage import Damaged, DamagedIndex
from shards.format import FORMAT_VERSION
from shards.merged_table import (
    CHUNKS_FILE,
    DamagedTable,
    is_table_of,
    open_merged_table,
    read_away_schema,
    verified,
    write_merged_table,
)
from shards.reader import CommittedShard, Variant

MEMBERS = {"video": ("mp4",), "latents": ("latents.npy", "latents.npy.zst"), "text": ("text.npy",)}
_OF_CHUNKS = ("start_ms", "num_frames", "fps_num", "fps_den", "width", "height")
_COPIED = {"video": _OF_CHUNKS, "latents": (*_OF_CHUNKS, "channels", "dtype"), "text": ("num_rows", "width")}
_LISTS = {"video": (), "latents": (), "text": ("caption_id", "caption_row")}
_TEXTS = ("dtype",)
_MEMBER_KINDS = {"offset": np.uint64, "size": np.uint64, "crc32": np.uint32}
_LIST_TYPES = {"caption_id": np.int64, "caption_row": np.int32}
_SHARDS_KEY, _INDEXES_KEY, _OPEN_GOPS_KEY = b"shard_ids", b"index_sha256", b"open_gops"
_MEMBER_KEY, _FORMAT_KEY = b"member", b"clipmill_format"
_MARK_DIGITS = 16  # of the SHA-256 of each index: enough to tell a shard that was made again
_MS_PER_VIDEO = 1 << 40


@dataclass(frozen=True)
class ChunkRows:
    """The merged table of a variant.

    Attributes:
        table: one row per sample, ordered by video and start; not verified yet.
        member: extension of the member that the columns `offset`, `size` and `crc32` are of.
        open_gops: video: shards whose first chunk cannot be decoded from single packets.
    """

    path: Path
    table: pa.Table
    member: str
    open_gops: frozenset[int]

    def verified(self) -> pa.Table:
        """The table after comparing all of it with its checksums; raises DamagedTable if it differs."""
        return verified(self.table, self.path)


def open_chunk_table(variant: Variant) -> ChunkRows | None:
    """Map the merged table of a variant; None if it has none, or one of other commits.

    Raises:
        DamagedTable: the file is not a readable table.
    """
    path = variant.directory / CHUNKS_FILE
    try:
        table = open_merged_table(path)
    except FileNotFoundError:
        return None
    if not _is_current(table.schema, variant):
        return None
    metadata = table.schema.metadata or {}
    member = metadata.get(_MEMBER_KEY, b"").decode()
    return ChunkRows(path, table, member, frozenset(_numbers(metadata.get(_OPEN_GOPS_KEY, b""))))


def _is_current(schema: pa.Schema, variant: Variant) -> bool:
    is_format = (schema.metadata or {}).get(_FORMAT_KEY) == str(FORMAT_VERSION).encode()
    return is_format and is_table_of(schema, variant.commits)


def collect_rows(
    variant: Variant, *, column: str, check: Callable[[CommittedShard], object], order: pa.Array
) -> ChunkRows:
    """The rows of the merged table of a variant that has none, from its indexes.

    Args:
        check: called with each shard before its index is read; raises an error if it cannot be used.
        order: ids of videos, in the order of the rows.
    """
    building = _Building(column)
    member = ""
    for shard in variant.shards():
        check(shard)
        member = building.add(shard)
        shard.close()
    return ChunkRows(variant.directory / CHUNKS_FILE, building.table(order), member, frozenset())


def chunk_table_problem(variant: Variant) -> str | None:
    """Return why the table of a variant is damaged; None if it is not, is missing or stale, which costs only time."""
    try:
        rows = open_chunk_table(variant)
        if rows is not None:
            rows.verified()
    except (DamagedTable, OSError) as error:
        return str(error)
    return None


def update_chunk_table(variant: Variant, *, column: str) -> bool:
    """Write the merged table of a variant unless it is up to date; return whether it was written.

    Raises:
        UserError: an index cannot be read. The variant then has no table, or one that readers recognise as stale.
    """
    if column not in MEMBERS or not variant.shards() or variant.damaged:
        return False
    path = variant.directory / CHUNKS_FILE
    try:
        if is_away(path) and _is_current(read_away_schema(path), variant):
            return False  # `prep verify` reads it
        if (rows := open_chunk_table(variant)) is not None:
            rows.verified()
            return False
    except (DamagedTable, OSError):
        pass  # replaced
    try:
        _write(variant, column=column)
    except (Damaged, OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{path} was not written: {error}", hint="see prep verify") from error
    return True


def shards_to_merge(variant: Variant) -> list[CommittedShard]:
    """Return the shards whose indexes `update_chunk_table` reads: those that the table lacks or has otherwise."""
    shards = variant.shards()
    _, unchanged = _reusable(variant.directory / CHUNKS_FILE, {shard.shard_id: _mark(shard) for shard in shards})
    return [shard for shard in shards if shard.shard_id not in unchanged]


def _write(variant: Variant, *, column: str) -> None:
    data_dir = variant.directory.parent.parent
    shards = variant.shards()
    marks = {shard.shard_id: _mark(shard) for shard in shards}
    old, unchanged = _reusable(variant.directory / CHUNKS_FILE, marks)
    building = _Building(column)
    open_gops: set[int] = set()
    member = ""
    if old is not None and unchanged:
        member = old.member
        building.add_old(old.table, unchanged)
        open_gops |= old.open_gops & unchanged
    for shard in shards:
        if shard.shard_id in unchanged:
            continue
        found = building.add(shard)
        if member and found != member:
            raise DamagedIndex(shard.index_path, f"its samples have {found}, those of other shards {member}")
        member = found
        if column == "video" and not shard.packet_tables.has_closed_gops(0):
            open_gops.add(shard.shard_id)
        shard.close()
    table = building.table(read_videos(data_dir)["video_id"].combine_chunks())
    if len(table) != variant.num_samples:
        raise ValueError(f"the indexes have {len(table):,} rows, the commits say {variant.num_samples:,}")
    metadata = chunk_table_metadata(member, marks, open_gops=open_gops)
    write_merged_table(variant.directory / CHUNKS_FILE, table, commits=variant.commits, metadata=metadata)


def chunk_table_metadata(
    member: str, index_sha256: Mapping[int, str], *, open_gops: Collection[int]
) -> dict[bytes, bytes]:
    """Return the metadata of a merged table's schema.

    Args:
        index_sha256: of each shard (hex), by shard ID.
    """
    return {
        _FORMAT_KEY: str(FORMAT_VERSION).encode(),
        _MEMBER_KEY: member.encode(),
        _SHARDS_KEY: ",".join(map(str, index_sha256)).encode(),
        _INDEXES_KEY: "".join(one[:_MARK_DIGITS] for one in index_sha256.values()).encode(),
        _OPEN_GOPS_KEY: ",".join(map(str, sorted(open_gops))).encode(),
    }


def _mark(shard: CommittedShard) -> str:
    assert shard.commit.files is not None  # a CommittedShard has files
    return shard.commit.files.index_sha256[:_MARK_DIGITS]


def _reusable(path: Path, marks: Mapping[int, str]) -> tuple[ChunkRows | None, frozenset[int]]:
    """The previous table, verified, and its shards whose indexes have not changed."""
    try:
        table = verified(open_merged_table(path), path)
    except (DamagedTable, OSError):
        return None, frozenset()
    metadata = table.schema.metadata or {}
    if metadata.get(_FORMAT_KEY) != str(FORMAT_VERSION).encode():
        return None, frozenset()
    shard_ids, text = _numbers(metadata.get(_SHARDS_KEY, b"")), metadata.get(_INDEXES_KEY, b"").decode()
    made_of = {one: text[at * _MARK_DIGITS : (at + 1) * _MARK_DIGITS] for at, one in enumerate(shard_ids)}
    same = frozenset(one for one, mark in made_of.items() if marks.get(one) == mark)
    member = metadata.get(_MEMBER_KEY, b"").decode()
    return ChunkRows(path, table, member, frozenset(_numbers(metadata.get(_OPEN_GOPS_KEY, b"")))), same


def _numbers(text: bytes) -> list[int]:
    return [int(one) for one in text.split(b",") if one]


class _Building:
    """Collects the rows of a table as arrays."""

    def __init__(self, column: str) -> None:
        self._column = column
        copied = [name for name in _COPIED[column] if name not in _TEXTS]
        self._kinds: dict[str, Any] = {name: np.int64 if name == "start_ms" else np.int32 for name in copied}
        self._kinds |= _MEMBER_KINDS | {"shard": np.int32, "row": np.int32}
        self._arrays: dict[str, list[NDArray[Any]]] = {name: [] for name in self._kinds}
        self._texts = {name: _Codes() for name in ("video_id", *(one for one in _COPIED[column] if one in _TEXTS))}
        self._lists: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {name: [] for name in _LISTS[column]}

    def add(self, shard: CommittedShard) -> str:
        """Add the samples of a shard after verifying its index; return the extension of their member."""
        shard.require_committed_index()
        index = shard.index
        member = next((one for one in MEMBERS[self._column] if f"{one}_offset" in index.column_names), None)
        wanted = {"video_id", *_COPIED[self._column], *_LISTS[self._column]}
        if member is None or (missing := wanted.difference(index.column_names)):
            what = f"member {MEMBERS[self._column][0]}" if member is None else ", ".join(sorted(missing))
            raise DamagedIndex(shard.index_path, f"not an index of {self._column}: it has no {what}")
        renamed = index.rename_columns([name.removeprefix(f"{member}_") for name in index.column_names])
        shard_id = pa.array(np.full(index.num_rows, shard.shard_id, np.int32))
        row = pa.array(np.arange(index.num_rows, dtype=np.int32))
        self._add(renamed.append_column("shard", shard_id).append_column("row", row))
        return member

    def add_old(self, table: pa.Table, shard_ids: frozenset[int]) -> None:
        """Add the rows of some shards of the previous table."""
        kept = np.isin(table["shard"].to_numpy(), np.fromiter(shard_ids, np.int64))
        self._add(table if kept.all() else table.take(pa.array(np.flatnonzero(kept))))

    def _add(self, table: pa.Table) -> None:
        for name, parts in self._arrays.items():
            # Copied: a view would keep the index mapped.
            parts.append(table[name].to_numpy().astype(self._kinds[name], copy=True))
        for name, codes in self._texts.items():
            codes.add(table[name])
        for name, lists in self._lists.items():
            for chunk in table[name].chunks:
                lengths = pc.list_value_length(chunk).to_numpy()
                lists.append((lengths.copy(), pc.list_flatten(chunk).to_numpy().copy()))

    def table(self, video_ids: pa.Array) -> pa.Table:
        """All rows in order. Videos that are not among `video_ids`, those of the manifest, come last."""
        video_id = self._texts.pop("video_id").ordered(video_ids)
        codes = video_id.indices.to_numpy()
        keys = codes.astype(np.int64) * _MS_PER_VIDEO
        if "start_ms" in self._arrays:
            keys += np.concatenate(self._arrays["start_ms"])
        order = None if bool((keys[1:] >= keys[:-1]).all()) else np.argsort(keys, kind="stable")
        del keys
        columns: dict[str, pa.Array] = {"video_id": video_id if order is None else video_id.take(pa.array(order))}
        for name in list(self._arrays):
            array = np.concatenate(self._arrays.pop(name))
            columns[name] = pa.array(array if order is None else array[order])
            del array
        for name in list(self._texts):
            text = self._texts.pop(name).ordered(None)
            columns[name] = text if order is None else text.take(pa.array(order))
        for name in list(self._lists):
            lengths, values = (np.concatenate(parts) for parts in zip(*self._lists.pop(name), strict=True))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(_LIST_TYPES[name])))
            columns[name] = lists if order is None else lists.take(pa.array(order))
        return pa.table(columns)


class _Codes:
    """A column of strings that is collected as a dictionary. Its entries are compared once, at the end."""

    def __init__(self) -> None:
        self._codes: list[NDArray[np.int32]] = []
        self._entries: list[pa.Array] = []
        self._num_entries = 0

    def add(self, values: pa.ChunkedArray) -> None:
        values = values.combine_chunks()
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        self._codes.append(coded.indices.to_numpy() + np.int32(self._num_entries))
        # Copied: a view would keep the index mapped.
        self._entries.append(pc.take(coded.dictionary, pa.array(np.arange(len(coded.dictionary)))))
        self._num_entries += len(coded.dictionary)

    def ordered(self, first: pa.Array | None) -> pa.DictionaryArray:
        """The column with its dictionary in the order of `first`, and the other entries after them in their own."""
        entries = pa.concat_arrays([*self._entries, pa.array([], pa.string())]).cast(pa.string())
        coded = entries.dictionary_encode()
        found = coded.dictionary
        number = pa.nulls(len(found), pa.int32()) if first is None else pc.index_in(found, value_set=first)
        by_number = pc.sort_indices(
            pa.table({"number": number, "id": found}), [("number", "ascending"), ("id", "ascending")]
        )
        rank = np.empty(len(found), np.int32)
        rank[by_number.to_numpy()] = np.arange(len(found), dtype=np.int32)
        codes = rank[coded.indices.to_numpy()][np.concatenate(self._codes)]
        return pa.DictionaryArray.from_arrays(pa.array(codes), found.take(by_number))
