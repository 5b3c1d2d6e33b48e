"""Reading tables of captions in batches: Parquet, text with a header and separated cells, or JSON lines.

The columns are `video` and `text`, and optionally `begin_s`, `end_s`, `source` and `likelihood`; others are ignored.
The schema metadata of a Parquet file may have the key `clipmill`, the model that wrote the captions: JSON
{"kind": "pseudo-captions", "weights", "weights_sha256", "video_variant", "settings"}.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.adapters.annotation_file import open_annotations, require_file
from clipmill.manifests.adapters.dialects import TABLE_SUFFIXES, columns_of, read_caption_rows
from clipmill.manifests.adapters.reading import encodable
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.row_buffer import ROWS_PER_CHUNK
from clipmill.manifests.adapters.tables import Row, log_probability, require_once, seconds
from clipmill.manifests.errors import UserError
from clipmill.manifests.json_text import parse_json
from clipmill.manifests.quoting import quoted

PSEUDO_CAPTIONS = "pseudo-captions"  # kind of a table that a model wrote
_METADATA_KEY = "clipmill"
_REQUIRED = ("video", "text")
COLUMNS = pa.schema(
    [
        pa.field("video", pa.string()),
        pa.field("begin_s", pa.float64()),
        pa.field("end_s", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("source", pa.string()),
        pa.field("likelihood", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Fault:
    """A row that could not be read."""

    row: int
    video: str | None
    reason: Reason
    detail: str


@dataclass(frozen=True)
class Batch:
    """Rows of a table.

    Attributes:
        numbers: int64[N], 0-based, excluding a header.
        rows: schema COLUMNS; values may be null, and have not been validated.
        faults: other rows of the file, which have no values.
    """

    numbers: np.ndarray
    rows: pa.Table
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class OpenTable:
    """A table of captions.

    Attributes:
        model: metadata of the model that wrote it; None if it has none.
    """

    path: Path
    model: dict[str, Any] | None
    batches: Iterator[Batch]


def open_caption_table(path: Path, *, note: Callable[[str], None], source: str | None = None) -> OpenTable:
    """Open a table of captions; its rows are read while `batches` is iterated over.

    Args:
        note: see `read_caption_rows`.
        source: the source of all captions, in place of the column.

    Raises:
        UserError: the file cannot be read, has another format, or lacks a column; `batches` raises it as well.
    """
    require_file(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _open_parquet(path, source=source)
    if suffix not in TABLE_SUFFIXES:
        raise UserError(
            f"{path} is not a .parquet, .csv, .tsv, .txt or .jsonl file",
            hint="give a table of captions in one of these formats",
        )
    return OpenTable(path, None, _typed(read_caption_rows(path, note=note), source=source))


def _open_parquet(path: Path, *, source: str | None) -> OpenTable:
    try:
        with open_annotations(path, "rb") as file:
            schema = pq.read_schema(file)
    except pa.ArrowException as error:
        raise _damaged(path, error) from error
    required = _REQUIRED if source is not None else (*_REQUIRED, "source")
    missing = [name for name in required if name not in schema.names]
    if missing:
        hint = "give --source NAME" if missing == ["source"] else f"required columns: {', '.join(required)}"
        columns = ", ".join(schema.names) or "none"
        raise UserError(f"{path} has no column {', '.join(missing)} (its columns: {columns})", hint=hint)
    require_once([name for name in schema.names if name in COLUMNS.names], path=path)
    _require_times(schema.names, path=path)
    for field in COLUMNS:
        if field.name in schema.names and not _fits(schema.field(field.name).type, field.type):
            raise UserError(
                f"column {field.name} of {path} has type {schema.field(field.name).type}, expected {field.type}",
                hint="write the table again with this type",
            )
    names = [name for name in COLUMNS.names if name in schema.names and (source is None or name != "source")]
    return OpenTable(path, _model(path, schema.metadata), _parquet_batches(path, names, source=source))


def _require_times(names: Sequence[str], *, path: Path) -> None:
    """Raise UserError if times seem to be in a column with another name: captions would apply to whole videos."""
    for wanted in ("begin_s", "end_s"):
        meant = [cell for cell, name in columns_of(names).items() if name.startswith(wanted.removesuffix("s"))]
        if meant and wanted not in names:
            raise UserError(
                f"{path} has no column {wanted}, but {' and '.join(meant)}",
                hint=f"write {wanted}, in seconds, or drop {' and '.join(meant)}: other columns are ignored",
            )


def _parquet_batches(path: Path, names: list[str], *, source: str | None) -> Iterator[Batch]:
    begin = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_CHUNK, columns=names):
                columns = {name: batch[name] for name in names}
                for field in COLUMNS:
                    given = source if field.name == "source" else None
                    columns.setdefault(field.name, pa.repeat(pa.scalar(given, field.type), len(batch)))
                rows = pa.table([columns[name] for name in COLUMNS.names], names=COLUMNS.names).cast(COLUMNS)
                rows.validate(full=True)  # strings that are not UTF-8
                yield Batch(np.arange(begin, begin + len(batch)), rows)
                begin += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _typed(rows: Iterator[Row], *, source: str | None) -> Iterator[Batch]:
    """Convert rows of text to batches."""
    numbers, values, faults = list[int](), list[dict[str, Any]](), list[Fault]()
    for row in rows:
        try:
            values.append(_values(row, source=source))
            numbers.append(row.number)
        except _BadCell as error:
            name = row.values.get("video")
            faults.append(Fault(row.number, name if isinstance(name, str) else None, error.reason, str(error)))
        if len(numbers) + len(faults) == ROWS_PER_CHUNK:
            yield Batch(np.array(numbers, np.int64), pa.Table.from_pylist(values, schema=COLUMNS), tuple(faults))
            numbers, values, faults = [], [], []
    yield Batch(np.array(numbers, np.int64), pa.Table.from_pylist(values, schema=COLUMNS), tuple(faults))


class _BadCell(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _values(row: Row, *, source: str | None) -> dict[str, Any]:
    """Return the values of a row.

    Raises:
        _BadCell: one of them has another type.
    """
    if row.fault is not None:
        raise _BadCell(row.reason, row.fault)
    values = {name: row.values.get(name) for name in COLUMNS.names}
    values["source"] = values["source"] if source is None else source
    for name in ("video", "text", "source"):
        value = values[name]
        if value is not None and not (isinstance(value, str) and encodable(value)):
            raise _BadCell(Reason.MALFORMED_ROW, f"{name} is {quoted(value)}, expected a string")
    try:
        begin_s, end_s = seconds(values["begin_s"], default=0.0), seconds(values["end_s"], default=inf)
    except ValueError as error:
        raise _BadCell(Reason.BAD_TIME, str(error)) from error
    try:
        likelihood = log_probability(values["likelihood"])
    except ValueError as error:
        raise _BadCell(Reason.BAD_LIKELIHOOD, f"likelihood is {error}") from error
    return {**values, "begin_s": begin_s, "end_s": end_s, "likelihood": likelihood}


def _model(path: Path, metadata: dict[bytes, bytes] | None) -> dict[str, Any] | None:
    """Return the metadata of the model that wrote a Parquet file; None if the file has none."""
    content = (metadata or {}).get(_METADATA_KEY.encode())
    if content is None:
        return None
    try:
        model = parse_json(content)
    except ValueError as error:
        raise UserError(
            f"the metadata {_METADATA_KEY} of {path} is not JSON: {error}", hint="write the table again"
        ) from error
    if not isinstance(model, dict) or model.get("kind") != PSEUDO_CAPTIONS:
        raise UserError(
            f"the metadata {_METADATA_KEY} of {path} is not that of {PSEUDO_CAPTIONS}: {quoted(model)}",
            hint="give a table of captions",
        )
    return model


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    found = found.value_type if pa.types.is_dictionary(found) else found
    if pa.types.is_null(found):
        return True
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found))
    return bool(pa.types.is_floating(found) or pa.types.is_integer(found))


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as Parquet: {error}", hint="write the table again, or copy it again")
