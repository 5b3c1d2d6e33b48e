"""Read tables of captions: delimited text with a header, JSON, or Parquet.

All formats have the same columns (`table_formats`). Each row is checked and converted to a `CaptionRow`. A cell may
contain a list of captions. In a text table, the list has the form that Python, NumPy or JSON prints, such as
['a dog runs', "it's a cat"]. The schema metadata of a Parquet file may identify the model that wrote the captions
(clipmill.manifests.caption_table).
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.adapters.annotations import (
    Reason,
    Row,
    UnusableRow,
    log_probability,
    open_annotations,
    require_file,
)
from clipmill.manifests.adapters.reading import ROWS_PER_CHUNK, is_encodable
from clipmill.manifests.adapters.table_formats import (
    JSON_SUFFIX,
    LINE_SUFFIXES,
    TEXT_SUFFIXES,
    json_table_rows,
    missing_columns,
    read_separated_rows,
    take_columns,
    times_of,
)
from clipmill.manifests.caption_table import LABEL_PREFIX, METADATA_KEY, PSEUDO_CAPTIONS
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line, quote_value
from clipmill.manifests.publish import parse_json

CLASS_SOURCE = "class"  # source of captions that are class names
_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
# Items are separated by commas, or by whitespace as in NumPy arrays.
_LIST = re.compile(rf"\[\s*{_STRING}(?:[\s,]+{_STRING})*[\s,]*\]", re.DOTALL)
_LIST_BEGIN = re.compile(r"""\[\s*(?:['"]|\])""")
_BOOLEANS = frozenset({"true", "false"})
_IN_BRACKETS = re.compile(r"\[[^\[\]]*,[^\[\]]*\]")


class CaptionRow(NamedTuple):
    """A row of a table of captions.

    Attributes:
        number: 0-based index of the row, not counting the header.
        video: Name of the video; None if it is missing or not a string.
        texts: Captions; an item is None if the caption is missing.
        source: Source; None if the row has no source.
        split: Value of the column `split`, not validated.
        group, view: Name of the moment, and name of the camera that recorded it; None if missing.
        labels: Class in each label column, by column name. Empty labels are omitted.
        fault: Reason why the row is unusable, or None. In an unusable row, only `number`, `video` and `fault` are set.
    """

    number: int
    video: str | None
    texts: tuple[str | None, ...] = ()
    begin_s: float = 0.0
    end_s: float = inf
    source: str | None = None
    likelihood: float | None = None
    split: object = None
    group: str | None = None
    view: str | None = None
    labels: Mapping[str, str] = MappingProxyType({})
    fault: UnusableRow | None = None


def caption_row(row: Row) -> CaptionRow:
    """Convert a row whose columns have the documented names."""
    values = row.values
    video = values.get("video")
    name = video if isinstance(video, str) else None
    try:
        if row.fault is not None:
            raise UnusableRow(Reason.MALFORMED_ROW, row.fault)
        _string(values, "video")
        begin_s, end_s = times_of(values)
        labels = _labels(values)
        texts = texts_of(values.get("text"))
        source = _string(values, "source") or None
        try:
            likelihood = log_probability(values.get("likelihood"))
        except ValueError as error:
            raise UnusableRow(Reason.BAD_LIKELIHOOD, f"likelihood is {error}") from error
        if labels and texts in ((None,), ("",)):
            texts, source = (" ".join(labels.values()),), source or CLASS_SOURCE
        return CaptionRow(
            number=row.number,
            video=name,
            texts=texts,
            begin_s=begin_s,
            end_s=end_s,
            source=source,
            likelihood=likelihood,
            split=values.get("split"),
            group=_name(values, "group"),
            view=_name(values, "view"),
            labels=labels,
        )
    except UnusableRow as fault:
        return CaptionRow(row.number, name, fault=fault)


def texts_of(value: object) -> tuple[str | None, ...]:
    """Return the captions in a cell.

    Raises:
        UnusableRow: The value is neither a string nor a list of strings, or begins like a printed list but is not one.
    """
    if isinstance(value, str) and _LIST_BEGIN.match(stripped := value.strip()):
        value = _parse_list(stripped)
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise UnusableRow(Reason.EMPTY_CAPTION, "the list of captions is empty")
    for text in texts:
        if not isinstance(text, str) and not (text is None and text is value):
            raise UnusableRow(
                Reason.MALFORMED_ROW, f"text is {quote_value(value)}, expected a string or a list of strings"
            )
        if text is not None and not is_encodable(text):
            raise UnusableRow(Reason.MALFORMED_ROW, f"text is not valid Unicode: {quote_value(text)}")
    return tuple(texts)


def _parse_list(cell: str) -> list[Any]:
    try:
        items = json.loads(cell)
        return items if isinstance(items, list) else [items]
    except (ValueError, RecursionError):
        pass
    if _LIST.fullmatch(cell) is not None:
        try:
            return [ast.literal_eval(item) for item in re.findall(_STRING, cell, re.DOTALL)]
        except (ValueError, SyntaxError):
            pass
    raise UnusableRow(Reason.MALFORMED_ROW, f"text begins like a list of captions, but is not one: {quote_value(cell)}")


def _labels(values: Mapping[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for name, value in values.items():
        if not name.startswith(LABEL_PREFIX) or value is None or value != value:  # pandas writes NaN for an empty cell
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas writes integers as floats if the column has empty cells
        if not isinstance(value, str | int | float) or not is_encodable(str(value)):
            detail = f"{name} is {quote_value(value)}, expected the name or number of a class"
            raise UnusableRow(Reason.BAD_LABEL, detail)
        label = str(value).strip()
        if label:
            # JSON writes true, Python True, and spreadsheets TRUE for the same class.
            labels[name] = label.lower() if label.lower() in _BOOLEANS else label
    return labels


def _name(values: Mapping[str, Any], name: str) -> str | None:
    """Return the name in a column, which may be stored as an integer; None for an empty cell."""
    value = values.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes integers as floats if the column has empty cells
    elif value != value:  # pandas writes NaN for an empty cell
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (_string({name: str(value) if is_number else value}, name) or "").strip() or None


def _string(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and not (isinstance(value, str) and is_encodable(value)):
        raise UnusableRow(Reason.MALFORMED_ROW, f"{name} is {quote_value(value)}, expected a string")
    return value


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
    """A row without usable captions.

    Attributes:
        row: 0-based index of the row, not counting the header.
        video: Name of the video in the row, if the row contains one.
        error: Reason why the row is unusable.
    """

    row: int
    video: str | None
    error: UnusableRow


@dataclass(frozen=True)
class Batch:
    """A batch of captions from a table.

    Attributes:
        row_indices: int64[N], 0-based index of each caption's row, not counting the header.
        rows: Table of COLUMNS with N rows. Video, text, source and likelihood may be null. Values are not validated.
        faults: Rows without usable captions.
    """

    row_indices: np.ndarray
    rows: pa.Table
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class OpenTable:
    """A table of captions that is being read.

    Attributes:
        path: Path of the table.
        model: Metadata of the model that wrote the table; None if the table has no such metadata.
        batches: Iterator over the captions.
    """

    path: Path
    model: dict[str, Any] | None
    batches: Iterator[Batch]


def read_caption_rows(
    path: Path, *, note: Callable[[str], None], required: Sequence[str] = ("video", "text")
) -> Iterator[CaptionRow]:
    """Iterate over the rows of a table of captions.

    Args:
        note: Function that is called with a note about each difference from the documented format.
        required: Columns that the table must have. A label column can replace the column `text`.

    Raises:
        UserError: The file is not a table of captions, lacks a column, has two columns with the same meaning, or has
            times that cannot be interpreted.
    """
    has_noted = False
    for row in map(caption_row, _named_rows(path, note=note, required=required)):
        # A text in brackets may be meant as a list of items without quotation marks: [one, two].
        bracketed = (text for text in row.texts if text is not None and text.startswith("["))
        if not has_noted and (text := next((text for text in bracketed if _IN_BRACKETS.fullmatch(text.strip())), None)):
            has_noted = True
            note(f"{path.name}: read {on_one_line(text, max_chars=60)} as one caption; lists need quotation marks")
        yield row


def label_columns(path: Path, *, required: Sequence[str]) -> list[str]:
    """Return the names of the label columns of a table, in alphabetical order.

    Args:
        required: Columns that the table must have. A label column can replace the column `text`.

    Raises:
        UserError: The table cannot be read; see `read_caption_rows`.
    """
    names = dict[str, None]()
    for row in _named_rows(path, note=lambda _: None, required=required):
        names |= dict.fromkeys(row.values)
        if path.suffix.lower() not in (*LINE_SUFFIXES, JSON_SUFFIX) and row.fault is None:
            break  # all rows have the same columns
    return sorted(name for name in names if name.startswith(LABEL_PREFIX))


def open_caption_table(path: Path, *, note: Callable[[str], None], source: str | None = None) -> OpenTable:
    """Open a table of captions. The rows are read during the iteration over `batches`.

    Labels, splits, groups and views are ignored with a note, because only a dataset can have them.

    Args:
        note: Function that is called with each note for the user.
        source: Source of all captions, which overrides the column `source`. By default, the file name is the source of
            captions without a source.

    Raises:
        UserError: The file cannot be read, has a different format, or lacks a column. The iteration over `batches` may
            raise this error as well.
    """
    require_file(path)
    model = _model(path) if path.suffix.lower() == _PARQUET_SUFFIX else None
    # Tables from models contain a column `sample`, which is ignored. No note about this column is needed.
    return OpenTable(path, model, _batches(path, note=note if model is None else lambda _: None, source=source))


def source_of_file(path: Path) -> str:
    """Return the source for captions without a source: the name of their table without the extension.

    Raises:
        UserError: The name does not contain any character that is allowed in a source.
    """
    name = re.sub(r"[^\w.-]+", "-", path.stem).strip("-.")
    if not name:
        raise UserError(
            f"{path} has captions without a source, and its name is not valid as a source", hint="use --source NAME"
        )
    return name


def _named_rows(path: Path, *, note: Callable[[str], None], required: Sequence[str]) -> Iterator[Row]:
    """Iterate over the rows of a table in any format. The rows have the documented column names."""
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
        hint="use a table of captions in one of these formats",
    )


def _parquet_rows(path: Path, *, required: Sequence[str], note: Callable[[str], None]) -> Iterator[Row]:
    header = _schema(path).names
    columns = take_columns(header, path=path, note=note)
    if missing := missing_columns(columns.values(), required):
        columns_text = f"its columns: {', '.join(header)}" if header else "it has no columns"
        raise UserError(
            f"{path} has no column for {' and '.join(missing)} ({columns_text})",
            hint="name the columns video and text; docs/datasets.md lists the other names that are recognized",
        )
    number = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_CHUNK, columns=list(columns)):
                batch.validate(full=True)  # raises an error for strings that are not UTF-8
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
    numbers, faults, file_source, has_noted = list[int](), list[Fault](), None, False

    def take_batch() -> Batch:
        return Batch(np.array(numbers, np.int64), pa.table(columns, schema=COLUMNS), tuple(faults))

    for row in read_caption_rows(path, note=note):
        if not has_noted and (row.labels or row.split or row.group or row.view):
            has_noted = True
            names = "splits, labels, groups and views"
            note(f"{path.name}: {names} are ignored; `prep manifest folder --captions` reads them")
        if row.fault is not None:
            faults.append(Fault(row.number, row.video, row.fault))
        elif (row_source := source or row.source) is None and file_source is None:
            row_source = file_source = source_of_file(path)
            note(f"{path.name}: captions without a source get the source {file_source}; --source sets a different one")
        for text in row.texts:
            numbers.append(row.number)
            cells = (row.video, row.begin_s, row.end_s, text, row_source or file_source, row.likelihood)
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell)
        if len(numbers) + len(faults) >= ROWS_PER_CHUNK:
            yield take_batch()
            columns, numbers, faults = {name: [] for name in COLUMNS.names}, [], []
    yield take_batch()


def _model(path: Path) -> dict[str, Any] | None:
    """Return the metadata of the model that wrote a Parquet file, or None if the file has no such metadata."""
    content = (_schema(path).metadata or {}).get(METADATA_KEY)
    if content is None:
        return None
    try:
        model = parse_json(content)
    except ValueError as error:
        raise UserError(
            f"the metadata {METADATA_KEY.decode()} of {path} is not JSON: {error}", hint="rewrite the table"
        ) from error
    if not isinstance(model, dict) or model.get("kind") != PSEUDO_CAPTIONS:
        raise UserError(
            f"the metadata {METADATA_KEY.decode()} of {path} does not have the kind {PSEUDO_CAPTIONS}: "
            f"{quote_value(model)}",
            hint="use a table of captions",
        )
    return model


def _damage_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as Parquet: {error}", hint="rewrite the table, or copy it again")
