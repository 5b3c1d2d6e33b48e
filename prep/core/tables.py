"""Parquet tables with checksums, and layouts, which are tables that assign spans (sections) of videos to shards.

Parquet readers do not verify data: a flipped bit often reads as a different value. Layouts and probes therefore store
the SHA-256 of the values of each column in the schema metadata. (The checksums of the manifest's files are in
manifest.json.) With a checksum per column, a reader can verify a few columns without reading the others.

Assignments in a layout never change: adding videos does not move existing spans. Layouts are stored in
`<data>/layout/`. A layout of `video` is named after the chunk length and the other settings that cut videos. All
recipes with these settings share it, so their variants have the same shards. The layout of another column is
`<column>.parquet`. If a layout file is damaged or missing, the layout is rebuilt from the commits, which record the
content of each shard. Spans of shards that were never committed are assigned again when the layout is next extended.
"""

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_atomically, require_regular, tag_errors
from clipmill.shards.columns import COLUMNS, VIDEO
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import commands_of, list_variants, variant_dir
from clipmill.shards.format import RECIPE_FILE
from clipmill.shards.index import open_index
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

_CHECKSUM_KEY = b"clipmill_sha256"


def write_table_file(path: Path, table: pa.Table) -> None:
    """Publish a table with its metadata and checksums. Columns are strings, numbers or lists of numbers."""
    stored_metadata = table.schema.metadata or {}
    header = _header(path.name, table.num_rows, metadata=stored_metadata)
    sha256 = b" ".join(_sha256(header, name, table[name]) for name in table.column_names)
    with publish_atomically(path) as temporary:
        pq.write_table(table.replace_schema_metadata({**stored_metadata, _CHECKSUM_KEY: sha256}), temporary)


def read_table_file(
    path: Path,
    *,
    schema: pa.Schema,
    columns: Collection[str] | None = None,
    expected: Mapping[str, pa.ChunkedArray] | None = None,
) -> pa.Table:
    """Read and verify a table, or some of its columns.

    Args:
        schema: Schema of the complete table.
        columns: Names of the columns to return, in the order of `schema`; None for all columns.
        expected: Columns that the table probably contains. If a column in the file is equal, the expected object is
            returned, so that the values are in memory only once. The file is still read and verified, because a run
            must detect and repair a damaged file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or its columns differ from `schema`.
        OSError: The file cannot be read.
    """
    verified_columns: dict[str, pa.ChunkedArray] = {}
    try:
        require_regular(path, path=path)
        with tag_errors(path), pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(schema):
                raise ValueError(f"unexpected columns: {', '.join(file.schema_arrow.names)}")
            metadata = dict(file.schema_arrow.metadata or {})
            checksums = metadata.pop(_CHECKSUM_KEY, b"").split()
            if len(checksums) != len(schema.names):
                raise ValueError("the checksums of its columns are missing")
            header = _header(path.name, file.metadata.num_rows, metadata=metadata)
            for name, sha256 in zip(schema.names, checksums, strict=True):
                if columns is not None and name not in columns:
                    continue
                column = file.read(columns=[name])[name]  # unlike `read_table`, this reads a small column as one chunk
                if sha256 != _sha256(header, name, column):
                    raise ValueError(f"the checksum of {name} does not match its content")
                is_expected = expected is not None and name in expected and column.equals(expected[name])
                verified_columns[name] = expected[name] if expected and is_expected else column
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        # Thrift reports a damaged footer as an OSError without errno.
        raise ValueError(str(error).removesuffix(".")) from error
    except pa.ArrowException as error:
        raise ValueError(str(error).removesuffix(".")) from error
    fields = [schema.field(name) for name in verified_columns]
    return pa.table(verified_columns, schema=pa.schema(fields, metadata=metadata or None))


def as_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a table column as one array, without the copy that `combine_chunks` makes of a single chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _header(file_name: str, num_rows: int, *, metadata: Mapping[bytes, bytes]) -> bytes:
    """Return the bytes that all checksums cover in addition to the column: file name, number of rows, and metadata.

    The file name is included to detect swapped files with the same schema, such as layouts.
    """
    return b"\0".join(
        [f"{file_name}\0{num_rows}".encode(), *(part for item in sorted(metadata.items()) for part in item)]
    )


def _sha256(header: bytes, name: str, column: pa.ChunkedArray) -> bytes:
    """Return the SHA-256 (hex) of a column, over its name, type, nulls and values."""
    digest = hashlib.sha256(header + f"\0{name}\0{column.type}\0".encode())
    if column.null_count:
        digest.update(np.packbits(np.asarray(pc.is_valid(column))).data)
    # Hash the lengths of lists and strings before their values. Do not combine the chunks, to avoid a copy.
    chunks = column.chunks
    if pa.types.is_list(column.type):
        for chunk in chunks:
            digest.update(np.asarray(pc.fill_null(pc.list_value_length(chunk), 0)).data)
        chunks = [chunk.flatten() for chunk in chunks]
    if not pa.types.is_string(column.type):
        for chunk in chunks:
            digest.update(np.asarray(pc.fill_null(chunk, 0) if chunk.null_count else chunk).data)
        return digest.hexdigest().encode()
    for chunk in chunks:
        digest.update(np.asarray(pc.fill_null(pc.binary_length(chunk), 0)).data)
    for chunk in chunks:
        filled = pc.fill_null(chunk, "") if chunk.null_count else chunk
        offsets = np.frombuffer(filled.buffers()[1], np.int32)[filled.offset : filled.offset + len(filled) + 1]
        if len(filled) and (content := filled.buffers()[2]) is not None:
            digest.update(memoryview(content)[int(offsets[0]) : int(offsets[-1])])
    return digest.hexdigest().encode()


LAYOUT_FOLDER = "layout"
SpanId = tuple[str, int]  # (video ID, index of the span in the video)

LAYOUT = pa.schema(
    [
        pa.field("shard_id", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("video_id", pa.string(), nullable=False),
        pa.field("span_index", pa.int32(), nullable=False),
    ]
)


def owner_of_layout(path: Path) -> str:
    """Return the column that a layout belongs to: the column that the file is named after, or `video`."""
    name = path.name.partition(".")[0]
    is_column = name in COLUMNS or any((path.parent.parent / name).glob(f"*/{RECIPE_FILE}"))
    return name if is_column else VIDEO


class DamagedLayout(UserError):
    """A layout file is damaged."""

    def __init__(self, path: Path, why: str) -> None:
        command = commands_of(path.parent.parent, owner_of_layout(path))
        super().__init__(
            f"the layout {path} is damaged: {why}",
            hint=f"run {command} again with the same settings as before, to rebuild the layout from the commits",
        )


def read_layout(path: Path, *, expected: Mapping[str, pa.ChunkedArray] | None = None) -> pa.Table:
    """Read a layout; return an empty layout if the file does not exist.

    Args:
        expected: Columns that the layout probably contains (see `read_table_file`).

    Raises:
        DamagedLayout: The file is damaged.
    """
    try:
        return read_table_file(path, schema=LAYOUT, expected=expected)
    except FileNotFoundError:
        return LAYOUT.empty_table()
    except ValueError as error:
        raise DamagedLayout(path, str(error)) from None


def stored_or_rebuilt_layout(
    path: Path, rebuild: Callable[[], pa.Table], *, video_ids: pa.Array, splits: pa.Array
) -> pa.Table:
    """Read a layout, or rebuild it from the commits if the file is damaged or missing.

    Args:
        rebuild: Function that rebuilds the layout.
        video_ids: IDs of the videos, in manifest order.
        splits: Splits of the videos, in the same order. If each video has one span and all videos have the same split,
            the two columns of the layout equal these arrays, and share their memory.
    """
    try:
        if path.exists():
            arrays = {"video_id": video_ids, "split": splits}
            return read_layout(path, expected={name: pa.chunked_array([array]) for name, array in arrays.items()})
        layout, why = rebuild(), f"the layout {path} is missing"
    except DamagedLayout as damage:
        layout, why = rebuild(), str(damage)
    if len(layout):
        sys.stderr.write(f"warning: {why}; using the layout recorded in the commits\n")
    return layout


def write_layout(path: Path, layout: pa.Table) -> None:
    """Publish a layout unless the file already contains it. Call this function before any work that uses the layout."""
    try:
        expected = dict(zip(layout.column_names, layout.columns, strict=True))
        if path.exists() and read_layout(path, expected=expected).equals(layout):
            return
    except DamagedLayout:
        pass  # replace the file
    path.parent.mkdir(exist_ok=True)
    write_table_file(path, layout)


def video_rows_of(layout: pa.Table, video_ids: pa.Array) -> np.ndarray:
    """Return, for each row of a layout, the row of its video in `video_ids` (int64); -1 if the video is unknown."""
    if not len(layout):
        return np.zeros(0, np.int64)
    ids = layout["video_id"]
    if ids.equals(pa.chunked_array([video_ids])):  # one span per video: avoid millions of slow look-ups
        return np.arange(len(ids))
    return np.asarray(pc.fill_null(pc.index_in(ids, value_set=video_ids), -1)).astype(np.int64)


def wanted_spans(
    layout: pa.Table, *, video_rows: np.ndarray, splits: pa.Array, num_spans: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows of a layout whose span is still needed.

    A span is needed if its video is in the manifest, has the split of the shard, and is long enough.

    Args:
        layout: Table with schema LAYOUT.
        video_rows: Row of the video in the manifest for each row of the layout (`video_rows_of`).
        splits: Splits of the videos, in manifest order.
        num_spans: Number of spans of each video, int64.

    Returns:
        Rows of the layout in ascending order, and the manifest row of the video for each of these rows.
    """
    if not len(layout):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    is_known = video_rows >= 0
    same_split = np.zeros(len(layout), bool)
    same_split[is_known] = np.asarray(
        pc.equal(as_array(layout["split"]).filter(pa.array(is_known)), splits.take(pa.array(video_rows[is_known])))
    )
    exists = np.zeros(len(layout), bool)
    exists[is_known] = np.asarray(layout["span_index"])[is_known] < num_spans[video_rows[is_known]]
    rows = np.flatnonzero(same_split & exists)
    return rows, video_rows[rows]


def variants_of(data_dir: Path, column: str) -> Iterator[Variant]:
    """Open all variants of a column."""
    for name in list_variants(data_dir, column):
        yield Variant(variant_dir(data_dir, column, name))


def layout_of_commits(
    variants: list[Variant],
    video_ids: pa.Array,
    *,
    spans: Callable[[pa.Table], list[SpanId]],
    span_of_failure: Callable[[Failure], SpanId | None],
) -> pa.Table:
    """Rebuild a layout (schema LAYOUT) from the commits of variants.

    Args:
        variants: Variants that share the layout.
        video_ids: IDs of the videos, in manifest order.
        spans: Function that takes the index of a shard and returns the spans in the shard.
        span_of_failure: Function that takes a failure and returns the span that failed, or None.
    """
    video_rows = {video_id: row for row, video_id in enumerate(video_ids.to_pylist())} if variants else {}
    shards: dict[int, tuple[str, list[SpanId]]] = {}
    for variant in variants:
        for commit in variant.commits.values():
            try:
                files = commit.files
                shard_spans = [] if files is None else spans(open_index(variant.directory / files.index))
            except (Damaged, OSError):
                continue  # the spans will be assigned to a new shard
            failed_spans = {span for span in map(span_of_failure, commit.failures) if span is not None}
            if missing_spans := failed_spans.difference(shard_spans):
                # Restore the order of the layout, which is the order of the manifest.
                shard_spans = sorted(
                    [*shard_spans, *missing_spans],
                    key=lambda span: (video_rows.get(span[0], len(video_rows)), span[1]),
                )
            if len(shard_spans) > len(shards.get(commit.shard_id, ("", []))[1]):
                shards[commit.shard_id] = (commit.split, shard_spans)
    rows = [(shard_id, split, *span) for shard_id, (split, ids) in sorted(shards.items()) for span in ids]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, LAYOUT, strict=True)]
    return pa.table(arrays, schema=LAYOUT)
