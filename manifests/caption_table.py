"""Write tables of captions (captions.parquet, and files of pseudo-captions), and compute digests of captions.

captions.parquet is written as a stream that merges new captions with the captions that are kept from the previous
table, in the order of their IDs. The commands of `prep` compare the digests to detect changed captions.

Pseudo-captions are captions that a model wrote. `train caption-chunks` and `prep captions` write them to a Parquet
file, which `prep manifest captions` adds to the manifest. The schema metadata of the file contains a JSON object under
METADATA_KEY: `kind`, `weights`, `weights_sha256` (null if unknown), `video_variant`, `settings`, and keys that
depend on the command. The source of a pseudo-caption is `<name>@<8 hexadecimal digits>`, where the digits identify the
version of the model. A new version replaces all captions of the earlier version.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_atomically
from clipmill.manifests.schema import CAPTIONS, OPTIONAL_CAPTIONS

LABEL_PREFIX = "label_"
_PLAIN_COLUMNS = frozenset({"caption_id", "begin_s", "end_s", "text", "likelihood"})  # without dictionary encoding
ROWS_PER_GROUP = 131_072  # fixed, so that equal tables yield identical bytes
# Function that takes a table with the columns caption_id, video_id and source (the last two dictionary-encoded) and
# returns a mask of the selected rows, bool[N].
Selection = Callable[[pa.Table], np.ndarray]


@dataclass(frozen=True)
class CaptionChange:
    """Difference between the captions of two consecutive manifests.

    Attributes:
        captions: New captions, with the columns that `write_manifest` takes.
        ids: IDs of the new captions, int64[N].
        next_id: Lowest ID that has never been assigned to a caption.
        keep: Function that selects the previous captions to keep. None keeps no captions.
        keep_labels: True to keep the label columns of the previous captions.
    """

    captions: pa.Table
    ids: np.ndarray
    next_id: int
    keep: Selection | None
    keep_labels: bool


def write_caption_table(
    path: Path, change: CaptionChange, *, old_path: Path | None, metadata: dict[bytes, bytes]
) -> None:
    """Write the kept captions and the new captions to the file `path` atomically, ordered by ID.

    Args:
        old_path: Path of the previous table of captions, if there is one.
        metadata: Metadata of the schema.

    Raises:
        UserError: A label column has a different type in the previous table.
    """
    captions, keep = change.captions, change.keep
    kept_tables: Iterator[pa.Table] = iter(())
    optional = _optional_columns(captions)
    if old_path is not None and keep is not None:
        kept_tables = selected_batches(old_path, keep)
        # An optional column of the previous table is kept only if it has a value for at least one kept caption.
        if candidates := set(OPTIONAL_CAPTIONS.names).intersection(pq.read_schema(old_path).names) - optional:
            columns = ["caption_id", "video_id", "source", *sorted(candidates)]
            for table in selected_batches(old_path, keep, columns=columns):
                optional |= _optional_columns(table)
    # The schema consists of the columns of CAPTIONS, the optional columns with at least one value, and all labels. It
    # contains no dictionary types.
    labeled_path = old_path if change.keep_labels else None
    labels = {field.name: field for field in captions.schema if field.name.startswith(LABEL_PREFIX)}
    labels = {name: field.with_type(_plain_type(field.type)) for name, field in labels.items()}
    if labeled_path is not None:
        for field in pq.read_schema(labeled_path):
            if field.name.startswith(LABEL_PREFIX) and labels.setdefault(field.name, field).type != field.type:
                raise UserError(
                    f"column {field.name} has type {field.type} in this manifest, but {labels[field.name].type} in the "
                    "new dataset",
                    hint="use a separate data folder for the new dataset (--data)",
                )
    fields = [field.with_type(_plain_type(field.type)) for field in CAPTIONS]
    fields += [field for field in OPTIONAL_CAPTIONS if field.name in optional]
    schema = pa.schema(fields + [labels[name].with_nullable(True) for name in sorted(labels)])
    with (
        publish_atomically(path) as temporary,
        pq.ParquetWriter(
            temporary,
            schema.with_metadata(metadata),
            compression="zstd",
            use_dictionary=[name for name in schema.names if name not in _PLAIN_COLUMNS],
        ) as writer,
    ):
        for table in _regroup_rows(_merge_rows(kept_tables, captions=captions, ids=change.ids, schema=schema)):
            writer.write_table(table, row_group_size=ROWS_PER_GROUP)


def take_rows(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Take rows (int64[N], N >= 1) from a table in the given order, and return them as one chunk.

    `pa.Table.take` would concatenate all chunks of a string column on each call. This function concatenates only the
    range of rows from the first to the last.
    """
    first, last = int(rows.min()), int(rows.max())
    part = table.slice(first, last + 1 - first).combine_chunks()
    if len(rows) == len(part) and (np.diff(rows) == 1).all():
        return part
    return part.take(pa.array(rows - first))


def selected_batches(path: Path, selection: Selection, *, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yield the captions that `selection` selects from a Parquet file, in batches. No batch is empty.

    Args:
        columns: Names of the columns to read, which must include caption_id, video_id and source. Default: all columns.
    """
    with pq.ParquetFile(path, read_dictionary=["video_id", "source"], pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP, columns=columns):
            table = pa.Table.from_batches([batch]).replace_schema_metadata()
            table = table.filter(pa.array(selection(table)))
            if table.num_rows:
                yield table


def caption_blocks(captions: pa.Table | pq.ParquetFile, columns: Sequence[str], *, num_rows: int) -> Iterator[pa.Table]:
    """Yield columns of all captions in row order, in blocks of about `num_rows` rows.

    A block from a file consists of complete row groups. Each block except the last contains at least `num_rows` rows.
    Within a block, all chunks of a dictionary-encoded column share one dictionary.
    """
    if isinstance(captions, pa.Table):
        for begin in range(0, captions.num_rows, num_rows):
            yield captions.select(columns).slice(begin, num_rows).unify_dictionaries()
        return
    groups: list[int] = []
    count = 0
    for group in range(captions.num_row_groups):
        groups.append(group)
        count += captions.metadata.row_group(group).num_rows
        if count >= num_rows or group == captions.num_row_groups - 1:
            yield captions.read_row_groups(groups, columns=list(columns)).unify_dictionaries()
            groups, count = [], 0


def _optional_columns(captions: pa.Table) -> set[str]:
    """Return the names of the columns in OPTIONAL_CAPTIONS that have at least one value."""
    names = set(OPTIONAL_CAPTIONS.names).intersection(captions.column_names)
    return {name for name in names if captions[name].null_count < captions.num_rows}


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _merge_rows(
    kept_tables: Iterator[pa.Table], *, captions: pa.Table, ids: np.ndarray, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Merge the kept captions with the new captions, and yield tables in the order of the IDs."""
    order = np.argsort(ids)
    sorted_ids = ids[order]
    num_done = 0  # number of new captions that have been yielded

    def new_rows(end: int) -> Iterator[pa.Table]:
        for start in range(num_done, end, ROWS_PER_GROUP):
            rows = order[start : min(start + ROWS_PER_GROUP, end)]
            part = take_rows(captions, rows).append_column("caption_id", pa.array(ids[rows]))
            yield cast_to_schema(part, schema)

    for table in kept_tables:
        table = cast_to_schema(table, schema)
        last_id = table["caption_id"][-1].as_py()
        end = int(np.searchsorted(sorted_ids, last_id))
        if end > num_done:
            table = pa.concat_tables([table, *new_rows(end)]).sort_by("caption_id")
            num_done = end
        yield table
    yield from new_rows(len(order))


def cast_to_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a table that are in a schema, cast to the types of the schema. Missing columns are null."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _regroup_rows(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Regroup consecutive tables into tables of exactly ROWS_PER_GROUP rows. The last table may be shorter."""
    pending: list[pa.Table] = []
    num_pending = 0
    for table in tables:
        pending.append(table)
        num_pending += table.num_rows
        if num_pending >= ROWS_PER_GROUP:
            joined_table = pa.concat_tables(pending)
            num_rows = num_pending // ROWS_PER_GROUP * ROWS_PER_GROUP
            for start in range(0, num_rows, ROWS_PER_GROUP):
                yield joined_table.slice(start, ROWS_PER_GROUP).combine_chunks()
            pending, num_pending = [joined_table.slice(num_rows)], num_pending - num_rows
    if num_pending:
        yield pa.concat_tables(pending).combine_chunks()


_ROWS_PER_BATCH = 131_072


def captions_sha256(
    captions: pa.Table, *, caption_ids: np.ndarray, video_rows: np.ndarray, num_videos: int
) -> list[str]:
    """Compute the SHA-256 of each video's captions (IDs, times, texts, sources, labels), sorted by start, end and ID.

    A column of OPTIONAL_CAPTIONS affects the digest of a video only if a caption of the video has a value in it.

    Args:
        captions: All columns of the captions except caption_id, N rows.
        caption_ids: ID of each caption, int64[N].
        video_rows: Index of each caption's video, int[N], in [0, num_videos).

    Returns:
        One digest per video, as hexadecimal digits. A video without captions has the hash of the empty string.
    """
    order = np.lexsort((caption_ids, captions["end_s"].to_numpy(), captions["begin_s"].to_numpy(), video_rows))
    bounds = np.searchsorted(video_rows[order], np.arange(num_videos + 1))
    digests = [hashlib.sha256(b"").hexdigest()] * num_videos
    columns = captions.drop_columns(["video_id"])
    optional_names = [name for name in OPTIONAL_CAPTIONS.names if name in columns.column_names]
    # Ranges of videos that have about _ROWS_PER_BATCH captions in total. The first video of each range has captions.
    ranges: list[tuple[int, int]] = []
    first = 0
    while first < num_videos and bounds[first] < bounds[-1]:
        first = int(np.searchsorted(bounds, bounds[first], side="right")) - 1
        last = int(np.searchsorted(bounds, bounds[first] + _ROWS_PER_BATCH, side="right")) - 1
        last = min(max(last, first + 1), num_videos)
        ranges.append((first, last))
        first = last
    for first, last in ranges:
        rows = order[bounds[first] : bounds[last]]
        part = take_rows(columns, rows).combine_chunks()
        optional = [_optional_streams(name, part[name].chunk(0)) for name in optional_names]
        streams = [_Stream.from_numbers(caption_ids[rows])]
        for name in part.drop_columns(optional_names).column_names:
            streams += _streams(part[name].chunk(0))
        part_bounds = bounds[first : last + 1] - bounds[first]
        for video in np.flatnonzero(np.diff(part_bounds)):
            start, end = int(part_bounds[video]), int(part_bounds[video + 1])
            sha256 = hashlib.sha256((end - start).to_bytes(8, "little"))
            for stream in streams:
                sha256.update(stream.rows(start, end))
            for name, has_value, values in optional:
                if has_value[start:end].any():
                    sha256.update(name)
                    for stream in values:
                        sha256.update(stream.rows(start, end))
            digests[first + int(video)] = sha256.hexdigest()
    return digests


class TextDigest:
    """SHA-256 of a sequence of strings, which does not depend on how the sequence is divided into blocks."""

    def __init__(self) -> None:
        self._lengths, self._bytes = hashlib.sha256(), hashlib.sha256()

    def add(self, texts: pa.StringArray) -> None:
        """Add the next block of strings."""
        lengths, content = _streams(texts)[-2:]
        self._lengths.update(lengths.rows(0, len(texts)))
        self._bytes.update(content.rows(0, len(texts)))

    def hexdigest(self) -> str:
        """Return the digest of all strings that have been added."""
        return hashlib.sha256(self._lengths.digest() + self._bytes.digest()).hexdigest()


@dataclass(frozen=True)
class _Stream:
    """Bytes of a column, divided into rows.

    Rows a to b are data[offsets[a]:offsets[b]]. If `offsets` is None, each row has `row_bytes` bytes.
    """

    data: memoryview
    offsets: np.ndarray | None = None
    row_bytes: int = 0

    @staticmethod
    def from_numbers(values: np.ndarray) -> "_Stream":
        values = np.ascontiguousarray(values)
        return _Stream(values.view(np.uint8).data, row_bytes=values.itemsize)

    def rows(self, start: int, end: int) -> memoryview:
        if self.offsets is None:
            return self.data[start * self.row_bytes : end * self.row_bytes]
        return self.data[int(self.offsets[start]) : int(self.offsets[end])]


def _streams(array: pa.Array) -> list[_Stream]:
    """Return the streams of a column. Lengths precede the values, so that different columns yield different bytes."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    streams = []
    if array.null_count:
        streams.append(_Stream.from_numbers(array.is_null().to_numpy(zero_copy_only=False)))
    if pa.types.is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        values = np.ascontiguousarray(array.flatten().to_numpy(zero_copy_only=False))
        offsets = np.concatenate(([0], np.cumsum(lengths))) * values.itemsize
        return [*streams, _Stream.from_numbers(lengths), _Stream(values.view(np.uint8).data, offsets=offsets)]
    if pa.types.is_string(array.type):
        array = pc.fill_null(array, "")
        _, offset_buffer, data = array.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
        return [
            *streams,
            _Stream.from_numbers(np.diff(offsets)),
            _Stream(memoryview(data if data is not None else b""), offsets=offsets),
        ]
    return [*streams, _Stream.from_numbers(pc.fill_null(array, 0).to_numpy(zero_copy_only=False))]


def _optional_streams(name: str, array: pa.Array) -> tuple[bytes, np.ndarray, list[_Stream]]:
    """Return an optional column for digests: a prefix, a mask of the rows with a value (bool[N]), and the streams."""
    has_value = array.is_valid().to_numpy(zero_copy_only=False)
    prefix = b"" if name == "likelihood" else name.encode()  # digests of likelihoods predate the prefixes
    values = array.fill_null("" if pa.types.is_string(array.type) else 0)
    return prefix, has_value, [_Stream.from_numbers(has_value), *_streams(values)]


PSEUDO_CAPTIONS = "pseudo-captions"  # value of `kind`
METADATA_KEY = b"clipmill"
SCHEMA = pa.schema(
    [
        ("video", pa.string()),
        ("begin_s", pa.float64()),
        ("end_s", pa.float64()),
        ("text", pa.string()),
        ("source", pa.string()),
        ("likelihood", pa.float32()),
        ("sample", pa.int16()),  # index of the caption among the captions of its clip
    ]
)


def write_pseudo_captions(path: Path, tables: Iterable[pa.Table], *, record: Mapping[str, Any]) -> None:
    """Write tables with the schema SCHEMA to a Parquet file atomically. Each table starts a new row group.

    Args:
        record: JSON object for the schema metadata.
    """
    schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(record, sort_keys=True).encode()})
    with publish_atomically(path) as temporary, pq.ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
        for rows in tables:
            writer.write_table(rows.replace_schema_metadata(schema.metadata))
