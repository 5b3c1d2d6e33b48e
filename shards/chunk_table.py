"""The merged tables of all columns except `scores`, and `Moments`, which maps positions in videos to integers.

A merged table has a part for each folder of shards (clipmill.shards.format): the file `chunks.arrow` in that folder,
built from the indexes of its shards (up to 1,000), ordered by shard and row. A part depends only on the commits of its
shards, so a run writes only the parts that have changed, and reads only the new indexes. If a part is missing or stale,
readers use the indexes of its shards.

A moment is a time in a video, together with the video's row in a list of videos. `Moments` maps moments to integers
(row * number of possible times + time) that can be sorted and searched. The moments of 10^9 videos of up to 100 days
each fit into 64 bits. Moments that do not fit are rejected, because two of them could get the same integer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import make_folder, remove
from clipmill.manifests.storage.mirrors import is_only_in_bucket
from clipmill.shards.column_fields import COLUMN_FIELDS, field_differences
from clipmill.shards.columns import COLUMNS, VIDEO
from clipmill.shards.commit_table import TableCommits
from clipmill.shards.format import FORMAT_VERSION, INDEX_FIELDS, folders_in
from clipmill.shards.index import extensions_of
from clipmill.shards.merged_table import (
    CHUNKS_FILE,
    DamagedTable,
    is_table_of,
    open_merged_table,
    read_remote_schema,
    verify_columns,
    write_merged_table,
)
from clipmill.shards.opening import Damaged, DamagedIndex
from clipmill.shards.reader import CommittedShard, Variant

_TEXT = pa.string()  # in the table, a dictionary whose entries are in the order of first occurrence
_MEMBER_FIELDS = {"offset": pa.uint64(), "size": pa.uint64(), "crc32": pa.uint32()}
_POSITION_FIELDS = {"shard": pa.int32(), "row": pa.int32()}
_SHARDS_KEY, _INDEXES_KEY, _OPEN_GOPS_KEY = b"shard_ids", b"index_sha256", b"open_gops"
_MEMBER_KEY, _FORMAT_KEY = b"member", b"clipmill_format"
_DIGEST_DIGITS = 16  # number of hex digits of an index's SHA-256 that identify the index


@dataclass(frozen=True)
class ChunkRows:
    """The samples of a variant.

    Attributes:
        table: One row per sample, ordered by shard and row, with one Arrow chunk per part. All Arrow chunks of
            `video_id` have the same dictionary, which may contain an ID several times.
        member: Extension of the member to which the columns `offset`, `size` and `crc32` refer.
        open_gops: IDs of the shards of `video` whose first chunk has open GOPs; None if rows were read from indexes, so
            that the IDs are unknown.
    """

    table: pa.Table
    member: str
    open_gops: frozenset[int] | None

    def dictionary_codes(self, name: str) -> tuple[pa.Array, NDArray[np.int32]]:
        """Return the dictionary of a string column, and the dictionary code of each row."""
        chunks = self.table[name].chunks
        codes = [np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in chunks)]
        return chunks[0].dictionary if chunks else pa.array([], _TEXT), np.concatenate(codes)


def read_chunk_rows(variant: Variant, *, columns: Collection[str] | None = None) -> ChunkRows:
    """Read the samples of a variant.

    They are read from the merged table. For missing and stale parts of this table, the indexes of the shards are read.

    Args:
        columns: Columns of the table to read and verify; None for all.

    Raises:
        DamagedTable: A part does not match its checksums.
        DamagedIndex: An index differs from its commit, or is not an index of this column.
        OSError: A file cannot be read.
        UserError: The column's package declares fields that its samples lack, or store with a different type.
    """
    tables, members, open_gops = [], set[str](), set[int]()
    are_all_current = True
    for part in _parts(variant):
        current_table = part.open_current()
        are_all_current &= current_table is not None
        table = part.build(old_table=None, finds_open_gops=False) if current_table is None else current_table
        members.add(_metadata(table, _MEMBER_KEY).decode())
        open_gops.update(_numbers(table, _OPEN_GOPS_KEY))
        names = list(table.column_names if columns is None else columns)
        tables.append(
            (table if current_table is None else verify_columns(table, part.path, columns=names)).select(names)
        )
    if len(members) > 1:
        raise DamagedTable(
            variant.directory / CHUNKS_FILE, f"its samples have different members: {' and '.join(sorted(members))}"
        )
    known_open_gops = frozenset(open_gops) if are_all_current else None
    return ChunkRows(_join_tables(tables), members.pop() if members else "", known_open_gops)


def chunk_table_problem(variant: Variant) -> str | None:
    """Describe the damage of a variant's merged table; return None if the table is intact, missing or stale."""
    try:
        for part in _parts(variant):
            if (table := part.open_current()) is not None:
                verify_columns(table, part.path)
    except (DamagedTable, OSError) as error:
        return str(error)
    return None


def has_chunk_table(column: str) -> bool:
    """Return True if this module writes the merged table of a column.

    The result is False for `scores`, and for a plug-in column without declared fields (COLUMN_FIELDS).
    """
    return bool(COLUMNS[column].members) if column in COLUMNS else column in COLUMN_FIELDS


def update_chunk_table(variant: Variant, *, column: str) -> bool:
    """Write the parts of a variant's merged table that are missing, stale or damaged; return True if any were written.

    Raises:
        UserError: A part cannot be written, for example because an index is damaged.
    """
    if not has_chunk_table(column) or variant.damaged:
        return False
    parts = _parts(variant)
    stale_parts = [part for part in parts if not part.is_intact()]
    for part in stale_parts:
        try:
            part.write()
        except (Damaged, OSError, ValueError, KeyError, pa.ArrowException) as error:
            hint = "run prep verify, which prints the command that rebuilds damaged shards"
            raise UserError(f"{part.path} was not written: {error}", hint=hint) from error
    current_paths = {part.path for part in parts}
    for folder in folders_in(variant.directory) if parts else ():
        if (path := folder / CHUNKS_FILE) not in current_paths and path.is_file():
            remove(path)  # its shards no longer exist
    return bool(stale_parts)


def missing_parts(variant: Variant) -> list[str]:
    """Return the paths of missing, stale and damaged parts of the merged table, relative to the variant's folder."""
    stale_parts = [part for part in _parts(variant) if not part.is_intact()]
    return [part.path.relative_to(variant.directory).as_posix() for part in stale_parts]


def shards_to_merge(variant: Variant) -> list[CommittedShard]:
    """Return the shards whose indexes `update_chunk_table` has to read, because the table lacks their rows."""
    stale_parts = [part for part in _parts(variant) if not part.is_intact()]
    return [variant.shard(shard_id) for part in stale_parts for shard_id in part.changed_shards(part.open_previous())]


def chunk_table_metadata(
    member: str, index_sha256: Mapping[int, str], *, open_gops: Collection[int]
) -> dict[bytes, bytes]:
    """Return the schema metadata of a part.

    Args:
        member: Extension of the member to which the columns `offset`, `size` and `crc32` refer.
        index_sha256: SHA-256 (hex) of each shard's index, by shard ID.
        open_gops: IDs of the shards whose first chunk has open GOPs.
    """
    return {
        _FORMAT_KEY: str(FORMAT_VERSION).encode(),
        _MEMBER_KEY: member.encode(),
        _SHARDS_KEY: ",".join(map(str, index_sha256)).encode(),
        _INDEXES_KEY: "".join(sha256[:_DIGEST_DIGITS] for sha256 in index_sha256.values()).encode(),
        _OPEN_GOPS_KEY: ",".join(map(str, sorted(open_gops))).encode(),
    }


class _Part:
    """The part of a variant's merged table that covers the shards of one folder."""

    def __init__(self, variant: Variant, path: Path, commits: TableCommits) -> None:
        self.path = path
        self.index_sha256 = commits.index_checksums()  # by shard ID
        self._variant, self._commits = variant, commits
        self._column = variant.directory.parent.name

    def open_current(self) -> pa.Table | None:
        """Map the file; return None if it is missing or stale.

        Raises:
            DamagedTable: The file is not a readable table.
        """
        try:
            table = open_merged_table(self.path)
        except FileNotFoundError:
            return None
        return table if self._is_current(table.schema) else None

    def is_intact(self) -> bool:
        """Return True if the file is current and undamaged. Only the schema of a file in a bucket is checked."""
        try:
            if is_only_in_bucket(self.path):
                return self._is_current(read_remote_schema(self.path))  # `prep verify` also reads the rows
            table = self.open_current()
            return table is not None and len(verify_columns(table, self.path)) >= 0
        except (DamagedTable, OSError):
            return False

    def open_previous(self) -> pa.Table | None:
        """Map and verify the file, even if it is stale; return None if it is unusable, or has a different format."""
        try:
            table = verify_columns(open_merged_table(self.path), self.path)
        except (DamagedTable, OSError):
            return None
        has_format = _metadata(table, _FORMAT_KEY) == str(FORMAT_VERSION).encode()
        return table if has_format and not field_differences(self._column, table.schema) else None

    def changed_shards(self, old_table: pa.Table | None) -> list[int]:
        """Return the IDs of the shards whose rows are missing from `old_table`, or were read from a different index."""
        ids = [] if old_table is None else _numbers(old_table, _SHARDS_KEY)
        digits = "" if old_table is None else _metadata(old_table, _INDEXES_KEY).decode()
        starts = range(0, len(digits), _DIGEST_DIGITS)
        old_digests = {
            shard_id: digits[start : start + _DIGEST_DIGITS] for shard_id, start in zip(ids, starts, strict=False)
        }
        digests = ((shard_id, sha256[:_DIGEST_DIGITS]) for shard_id, sha256 in self.index_sha256.items())
        return [shard_id for shard_id, digest in digests if old_digests.get(shard_id) != digest]

    def build(self, *, old_table: pa.Table | None, finds_open_gops: bool) -> pa.Table:
        """Build the rows of the part, and the metadata of its schema.

        Args:
            old_table: Earlier version of the part, from which the rows of unchanged shards are copied.
            finds_open_gops: True to find the shards whose first chunk has open GOPs.

        Raises:
            DamagedIndex: An index differs from its commit, or is not an index of this column.
        """
        changed_ids = self.changed_shards(old_table)
        unchanged_ids = self.index_sha256.keys() - set(changed_ids)
        # Encode strings as a dictionary only after all rows have been collected, so that there is a single dictionary.
        schema = pa.schema({"video_id": _TEXT, **_merged_fields(self._column), **_MEMBER_FIELDS, **_POSITION_FIELDS})
        tables, open_gops, members = [schema.empty_table()], set[int](), set[str]()
        if old_table is not None and unchanged_ids:
            mask = np.isin(old_table["shard"].to_numpy(), np.fromiter(unchanged_ids, np.int64))
            tables.append(old_table.select(schema.names).take(pa.array(np.flatnonzero(mask))).cast(schema))
            members.add(_metadata(old_table, _MEMBER_KEY).decode())
            open_gops |= unchanged_ids.intersection(_numbers(old_table, _OPEN_GOPS_KEY))
        for shard in map(self._variant.shard, changed_ids):
            table, member = _read_rows(shard, self._column, schema)
            members.add(member)
            if len(members) > 1:
                raise DamagedIndex(shard.index_path, f"its samples have {member}, but samples of other shards do not")
            tables.append(table)
            if finds_open_gops and self._column == VIDEO and not shard.packet_tables.has_closed_gops(0):
                open_gops.add(shard.shard_id)
            shard.close()
        table = pa.concat_tables(tables).combine_chunks()
        shards = table["shard"].to_numpy()
        if bool((shards[1:] < shards[:-1]).any()):
            table = table.take(pa.array(np.argsort(shards, kind="stable"))).combine_chunks()
        for name in ("video_id", "dtype"):
            if name in table.column_names:
                position = table.column_names.index(name)
                table = table.set_column(position, name, table[name].combine_chunks().dictionary_encode())
        metadata = chunk_table_metadata(members.pop() if members else "", self.index_sha256, open_gops=open_gops)
        return table.replace_schema_metadata(metadata)

    def write(self) -> None:
        """Build the part, and publish its file."""
        table = self.build(old_table=self.open_previous(), finds_open_gops=True)
        make_folder(self.path.parent)
        write_merged_table(self.path, table, commits=self._commits, metadata=table.schema.metadata)

    def _is_current(self, schema: pa.Schema) -> bool:
        has_format = (schema.metadata or {}).get(_FORMAT_KEY) == str(FORMAT_VERSION).encode()
        return has_format and is_table_of(schema, self._commits) and not field_differences(self._column, schema)


def _parts(variant: Variant) -> list[_Part]:
    folders = variant.commits.split_by_folder()
    parts = [_Part(variant, variant.directory / folder / CHUNKS_FILE, commits) for folder, commits in folders]
    return [part for part in parts if part.index_sha256]


def _merged_fields(column: str) -> Mapping[str, pa.DataType]:
    """Return the index fields that are copied to the merged table."""
    if column not in COLUMNS:
        return {"start_ms": pa.int64(), **COLUMN_FIELDS[column].fields}
    types = {field.name: field.type for field in INDEX_FIELDS[column]}
    return {name: types[name] for name in COLUMNS[column].merged_fields}


def _read_rows(shard: CommittedShard, column: str, schema: pa.Schema) -> tuple[pa.Table, str]:
    """Return the rows of a shard for the merged table, and the extension of their member."""
    index = shard.index
    if differences := field_differences(column, index.schema):
        raise UserError(
            f"the fields that {COLUMN_FIELDS.package_of(column)} declares for the column {column} "
            f"differ from the fields of its samples: {', '.join(differences)}",
            hint="declare the fields of the package's ChunkWork, with the same types; if only samples of an earlier "
            f"version differ, increment `schema` in its ColumnSpec, and run prep {column}",
        )
    extensions = COLUMNS[column].members if column in COLUMNS else extensions_of(index)
    member = next((extension for extension in extensions if f"{extension}_offset" in index.column_names), None)
    names = {"video_id", *_merged_fields(column)}
    if member is None or (missing := names.difference(index.column_names)):
        missing_text = f"member {extensions[0]}" if member is None else ", ".join(sorted(missing))
        raise DamagedIndex(shard.index_path, f"not an index of {column}: it has no {missing_text}")
    rows = np.arange(index.num_rows, dtype=np.int32)
    member_table = index.rename_columns([name.removeprefix(f"{member}_") for name in index.column_names])
    table = member_table.append_column("shard", pa.array(np.full(len(rows), shard.shard_id, np.int32)))
    table = table.append_column("row", pa.array(rows)).select(schema.names)
    try:
        # `take` copies the rows; a view would keep the index mapped.
        return table.take(pa.array(rows)).cast(schema), member
    except pa.ArrowException as error:
        raise DamagedIndex(shard.index_path, f"not an index of {column}: {error}") from error


def _join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate the rows of all parts. Duplicates in the joined dictionary of video IDs are not removed."""
    if len(tables) < 2:
        return tables[0] if tables else pa.table({})
    joined_table = pa.concat_tables([table.replace_schema_metadata() for table in tables])
    if "video_id" in joined_table.column_names:
        chunks = joined_table["video_id"].chunks
        starts = np.cumsum([0, *(len(chunk.dictionary) for chunk in chunks)])
        entries = pa.concat_arrays([chunk.dictionary for chunk in chunks])
        codes = [chunk.indices.to_numpy() + np.int32(start) for chunk, start in zip(chunks, starts, strict=False)]
        video_ids = pa.chunked_array([pa.DictionaryArray.from_arrays(pa.array(part), entries) for part in codes])
        joined_table = joined_table.set_column(joined_table.column_names.index("video_id"), "video_id", video_ids)
    return joined_table.unify_dictionaries() if "dtype" in joined_table.column_names else joined_table


def _metadata(table: pa.Table, key: bytes) -> bytes:
    value: bytes = (table.schema.metadata or {}).get(key, b"")
    return value


def _numbers(table: pa.Table, key: bytes) -> list[int]:
    return [int(digits) for digits in _metadata(table, key).split(b",") if digits]


_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Moments:
    """Order-preserving mapping from moments to integers, defined for all moments.

    Attributes:
        num_rows: Largest row of the moments that the mapping was built from, plus 1.
        low, high: Earliest and latest time of these moments, in the unit of the caller's times.
    """

    num_rows: int
    low: int
    high: int

    @classmethod
    def build(cls, rows: NDArray[np.integer], *times: NDArray[np.integer]) -> "Moments":
        """Build the mapping from moments.

        Args:
            rows: Row of each moment; -1 for no video.
            times: Arrays with one time for each element of `rows`.

        Raises:
            UserError: The videos are too many, or too long, for 64-bit integers.
        """
        if not len(rows):
            return cls(0, 0, 0)
        low, high = min(int(array.min()) for array in times), max(int(array.max()) for array in times)
        moments = cls(int(rows.max()) + 1, low, high)
        if (moments.num_rows + 1) * moments.span > _MAX_INT64:
            raise UserError(
                f"the moments of {moments.num_rows:,} videos with times from {low:,} to {high:,} do not fit into "
                "64-bit integers",
                hint="look for chunks at impossible times, or divide the videos among several data folders",
            )
        return moments

    @property
    def span(self) -> int:
        """Number of integers per row: one per possible time, and one at each end for times out of range."""
        return self.high - self.low + 3

    def numbers(self, rows: NDArray[np.integer], times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the integer of each moment, int64.

        A moment outside the range of times, or in a row after the last row, gets an integer that differs from the
        integers of all moments in the range. The order is preserved.
        """
        row = np.minimum(rows.astype(np.int64), self.num_rows)
        return row * self.span + (np.clip(times, self.low - 1, self.high + 1) - (self.low - 1))


def order_of(rows: NDArray[np.integer], times: NDArray[np.integer]) -> NDArray[np.int64] | None:
    """Return the indices that stably sort moments by row and time; None if they are already sorted."""
    later_row, same_row = rows[1:] > rows[:-1], rows[1:] == rows[:-1]
    if bool((later_row | (same_row & (times[1:] >= times[:-1]))).all()):
        return None
    return np.lexsort((times, rows))
