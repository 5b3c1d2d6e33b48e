"""Tables of captions of any kind: text with a header and separated cells, JSON, or Parquet.

All of them have the same columns (`column_names`) and cells (`caption_rows`). The schema metadata of a Parquet file may
have the model that wrote the captions (clipmill.manifests.pseudo_captions).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.adapters.annotation_file import open_annotations, require_file
from clipmill.manifests.adapters.caption_rows import CaptionRow, caption_row, is_in_brackets
from clipmill.manifests.adapters.column_names import missing_columns, take_columns
from clipmill.manifests.adapters.dialects import LINE_SUFFIXES, TEXT_SUFFIXES, read_separated_rows
from clipmill.manifests.adapters.json_tables import JSON_SUFFIX, json_table_rows
from clipmill.manifests.adapters.reasons import Unusable
from clipmill.manifests.adapters.row_buffer import ROWS_PER_CHUNK
from clipmill.manifests.adapters.tables import Row
from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.checked_json import parse_json
from clipmill.manifests.errors import UserError
from clipmill.manifests.pseudo_captions import METADATA_KEY, PSEUDO_CAPTIONS
from clipmill.manifests.quoting import on_one_line, quote_value

_PARQUET_SUFFIX = ".parquet"
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
    why: Unusable


@dataclass(frozen=True)
class Batch:
    """Captions of a table.

    Attributes:
        numbers: int64[N], the row of each, 0-based, excluding a header.
        rows: schema COLUMNS; video, text, source and likelihood may be null, and values have not been validated.
        faults: rows that have no captions.
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


def read_caption_rows(
    path: Path, *, note: Callable[[str], None], required: Sequence[str] = ("video", "text")
) -> Iterator[CaptionRow]:
    """Iterate over the rows of a table of captions.

    Args:
        note: called with each thing about the table that differs from its documented form.
        required: columns that a table with a header must have; a label stands in for a text.

    Raises:
        UserError: the file is not such a table, lacks a column, has two that could both be the same, or times that are
            not understood.
    """
    is_noted = False
    for row in map(caption_row, _named_rows(path, note=note, required=required)):
        if not is_noted and (text := next(filter(is_in_brackets, row.texts), None)) is not None:
            is_noted = True
            note(f"{path.name}: read {on_one_line(text, max_chars=60)} as one caption: lists have quotation marks")
        yield row


def label_columns(path: Path, *, required: Sequence[str]) -> list[str]:
    """Return the label columns of a table, in alphabetical order.

    Args:
        required: see `read_caption_rows`.

    Raises:
        UserError: as `read_caption_rows`.
    """
    names = dict[str, None]()
    for row in _named_rows(path, note=_ignore_note, required=required):
        names |= dict.fromkeys(row.values)
        if path.suffix.lower() not in (*LINE_SUFFIXES, JSON_SUFFIX) and row.fault is None:
            break  # the columns of all rows
    return sorted(name for name in names if name.startswith(LABEL_PREFIX))


def open_caption_table(path: Path, *, note: Callable[[str], None], source: str | None = None) -> OpenTable:
    """Open a table of captions; its rows are read while `batches` is iterated over.

    Labels and splits belong to a dataset: they are not read, which is noted.

    Args:
        note: see `read_caption_rows`.
        source: the source of all captions, in place of the column. Captions without one have the name of the file.

    Raises:
        UserError: the file cannot be read, has another format, or lacks a column; `batches` raises it as well.
    """
    require_file(path)
    model = _model(path) if path.suffix.lower() == _PARQUET_SUFFIX else None
    # What a model wrote has a column more than is read, which nobody has to know.
    return OpenTable(path, model, _batches(path, note=note if model is None else _ignore_note, source=source))


def _ignore_note(_: str) -> None:
    """Ignore a note."""


def source_of_file(path: Path) -> str:
    """Return the source of captions whose table has none: the name of the file, without its extension.

    Raises:
        UserError: it has no character that a source can have.
    """
    name = re.sub(r"[^\w.-]+", "-", path.stem).strip("-.")
    if not name:
        raise UserError(f"{path} has no column source, nor a name that can be one", hint="give --source NAME")
    return name


def _named_rows(path: Path, *, note: Callable[[str], None], required: Sequence[str]) -> Iterator[Row]:
    """Iterate over the rows of a table, with the documented names of the columns."""
    require_file(path)
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return read_separated_rows(path, required=required, note=note)
    if suffix in LINE_SUFFIXES or suffix == JSON_SUFFIX:
        return json_table_rows(path, required=required, note=note)
    if suffix == _PARQUET_SUFFIX:
        return _parquet_rows(path, required=required, note=note)
    raise UserError(
        f"{path} is not a .csv, .tsv, .txt, .jsonl, .json or .parquet file",
        hint="give a table of captions in one of these formats",
    )


def _parquet_rows(path: Path, *, required: Sequence[str], note: Callable[[str], None]) -> Iterator[Row]:
    header = _schema(path).names
    columns = take_columns(header, path=path, note=note)
    if missing := missing_columns(columns.values(), required):
        raise UserError(
            f"{path} has no column for {' and '.join(missing)} (its columns: {', '.join(header) or 'none'})",
            hint="name them video and text; docs/datasets.md lists the other names that are recognized",
        )
    number = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_CHUNK, columns=list(columns)):
                batch.validate(full=True)  # strings that are not UTF-8
                cells = [batch[name].to_pylist() for name in columns]
                for values in zip(*cells, strict=True):
                    yield Row(number, dict(zip(columns.values(), values, strict=True)))
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise _damage_error(path, error) from error


def _schema(path: Path) -> pa.Schema:
    try:
        with open_annotations(path, "rb") as file:
            return pq.read_schema(file)
    except pa.ArrowException as error:
        raise _damage_error(path, error) from error


def _batches(path: Path, *, note: Callable[[str], None], source: str | None) -> Iterator[Batch]:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
    numbers, faults, name_of_file, is_noted = list[int](), list[Fault](), None, False

    def take_batch() -> Batch:
        return Batch(np.array(numbers, np.int64), pa.table(columns, schema=COLUMNS), tuple(faults))

    for row in read_caption_rows(path, note=note):
        if not is_noted and (row.labels or row.split):
            is_noted = True
            note(f"{path.name}: splits and labels are not read here, but by `prep manifest folder --captions`")
        if row.fault is not None:
            faults.append(Fault(row.number, row.video, row.fault))
        elif (of_row := source or row.source) is None and name_of_file is None:
            of_row = name_of_file = source_of_file(path)
            note(f"{path.name}: captions without a source have the source {name_of_file}; --source gives another")
        for text in row.texts:
            numbers.append(row.number)
            cells = (row.video, row.begin_s, row.end_s, text, of_row or name_of_file, row.likelihood)
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell)
        if len(numbers) + len(faults) >= ROWS_PER_CHUNK:
            yield take_batch()
            columns, numbers, faults = {name: [] for name in COLUMNS.names}, [], []
    yield take_batch()


def _model(path: Path) -> dict[str, Any] | None:
    """Return the metadata of the model that wrote a Parquet file; None if the file has none."""
    content = (_schema(path).metadata or {}).get(METADATA_KEY)
    if content is None:
        return None
    try:
        model = parse_json(content)
    except ValueError as error:
        raise UserError(
            f"the metadata {METADATA_KEY.decode()} of {path} is not JSON: {error}", hint="write the table again"
        ) from error
    if not isinstance(model, dict) or model.get("kind") != PSEUDO_CAPTIONS:
        raise UserError(
            f"the metadata {METADATA_KEY.decode()} of {path} is not that of {PSEUDO_CAPTIONS}: {quote_value(model)}",
            hint="give a table of captions",
        )
    return model


def _damage_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as Parquet: {error}", hint="write the table again, or copy it again")
