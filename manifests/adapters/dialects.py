"""Tables of captions as text: their encoding, and the separator of their cells.

Files are UTF-8 or UTF-16, else Windows-1252 (of which Latin-1 is a part); cells are separated by commas, semicolons,
tabs or vertical bars. Every difference from the documented form is reported.
"""

import codecs
import csv
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from clipmill.manifests.adapters.annotation_file import not_utf8, open_annotations
from clipmill.manifests.adapters.column_names import NUMBERS, columns_of, missing_columns, take_columns
from clipmill.manifests.adapters.tables import Row, csv_rows, text_lines
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_ENCODING_NAMES = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252 (Latin-1)"}
_HEAD_BYTES = 4096
_MAX_PART_BYTES = 1 << 20  # of a line, which may be as long as the file
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_NAMED_SEPARATOR = re.compile(r'"?sep=([,;\t|])"?[\r\n]*', re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
TEXT_SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".txt"})
LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})


def note_encoding(path: Path, *, note: Callable[[str], None]) -> str:
    """Return `encoding_of(path)`, and note one that is not UTF-8."""
    encoding = encoding_of(path)
    if encoding in _ENCODING_NAMES:
        note(f"{path.name} is not UTF-8, read as {_ENCODING_NAMES[encoding]}")
    return encoding


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file, as Python names it.

    A file that is not UTF-8 although some of its lines are, beyond ASCII, is damaged rather than in another encoding.

    Raises:
        UserError: it is not a text file, or is damaged; the message has the line number.
    """
    with open_annotations(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
        for mark, encoding in _MARKS:
            if head.startswith(mark):
                return encoding
        for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
            if head[first::2].count(0) > len(head) // 4 > head[1 - first :: 2].count(0):
                return encoding
        file.seek(0)
        first_error: UnicodeDecodeError | None = None
        has_utf8 = has_binary = False
        for line in iter(lambda: file.readline(_MAX_PART_BYTES), b""):
            if line.isascii():
                has_binary = has_binary or _BINARY.search(line) is not None
                continue
            has_binary = has_binary or _BINARY.search(line) is not None
            try:
                line.decode("utf-8")
                has_utf8 = True
            except UnicodeDecodeError as error:
                first_error = first_error or error
    if first_error is None:
        return "utf-8-sig"
    if has_utf8 or has_binary:
        raise not_utf8(path, first_error)
    return "cp1252"


def _head(path: Path, *, encoding: str) -> tuple[str, str | None]:
    """Return the header of a table, and the separator that a line above it names for Excel (`sep=;`)."""
    lines = (line for line in text_lines(path, encoding=encoding) if line.strip())
    first = next(lines, "")
    named = _NAMED_SEPARATOR.fullmatch(first)
    return (first, None) if named is None else (next(lines, ""), named[1])


def _require_columns(header_line: str, separator: str, *, is_named: bool, required: Sequence[str], path: Path) -> None:
    """Raise UserError if a header lacks a required column.

    Args:
        is_named: whether a line above the header names the separator.
    """
    names = columns_of(next(csv.reader([header_line], delimiter=separator), []))
    if lacking := missing_columns(names.values(), required):
        header = on_one_line(header_line.strip())
        found = f"its first line is: {header}" if header else "the file is empty"
        if is_named:
            below = f"the next one is: {header}" if header else "there is nothing below it"
            found = f"its first line says that {_SEPARATORS[separator]} separate the columns, but {below}"
        raise UserError(
            f"{path} has no column for {' and '.join(lacking)}; {found}",
            hint="remove the first line if it is wrong; the next one must name the columns: video,text or "
            "video,begin_s,end_s,text"
            if is_named
            else "the first line must name the columns, separated by commas, semicolons or tabs: video,text or "
            "video,begin_s,end_s,text; docs/datasets.md lists the other names that are recognized",
        )


def _best_separator(header_line: str, *, required: Sequence[str]) -> str:
    """Return the separator that splits the header into the most columns with a known name, required ones first."""

    def score_separator(separator: str) -> tuple[int, int]:
        names = columns_of(next(csv.reader([header_line], delimiter=separator), []))
        return -len(missing_columns(names.values(), required)), len(names)

    return max(_SEPARATORS, key=score_separator)


def read_separated_rows(path: Path, *, required: Sequence[str], note: Callable[[str], None]) -> Iterator[Row]:
    """Iterate over the rows of a table with a header, with the documented names of the columns.

    Args:
        note: called with each thing about the table that differs from its documented form.
        required: columns that it must have.

    Raises:
        UserError: the file is not such a table, lacks a column, or has two that could both be the same.
    """
    encoding = note_encoding(path, note=note)
    header_line, named = _head(path, encoding=encoding)
    separator = named or _best_separator(header_line, required=required)
    _require_columns(header_line, separator, is_named=named is not None, required=required, path=path)
    if separator != ",":
        note(f"{path.name}: cells separated by {_SEPARATORS[separator]}")
    rows = csv_rows(text_lines(path, encoding=encoding), path=path, separator=separator)
    if named:
        next(rows)
    header = next(rows)
    columns = take_columns(header, path=path, note=note)
    for number, cells in enumerate(rows):
        if len(cells) != len(header):
            yield Row(number, {}, f"{len(cells)} cells, expected {len(header)} (one per column)")
            continue
        given = zip(header, cells, strict=True)
        row = Row(number, {columns[name]: cell for name, cell in given if name in columns})
        yield row if separator == "," else _with_points(row)


def _with_points(row: Row) -> Row:
    """Return a row whose numbers have points: other separators are used where numbers are written with commas."""
    cells = {name: row.values.get(name, "").strip() for name in NUMBERS}
    found = {name: cell.replace(",", ".") for name, cell in cells.items() if _DECIMAL_COMMA.fullmatch(cell)}
    return replace(row, values=row.values | found) if found else row


def line_numbers(path: Path, rows: Collection[int]) -> dict[int, int]:
    """Return the line, from 1, at which each of some rows of a table of captions begins.

    Raises:
        UserError: the file is not such a table any more.
    """
    encoding, left = encoding_of(path), set(rows)
    if path.suffix.lower() in LINE_SUFFIXES:
        lines = (number for number, line in enumerate(text_lines(path, encoding=encoding), start=1) if line.strip())
        return {row: number for row, number in enumerate(lines) if row in left}
    header_line, named = _head(path, encoding=encoding)
    separator = named or _best_separator(header_line, required=())
    reader = csv.reader(text_lines(path, encoding=encoding), delimiter=separator)
    found: dict[int, int] = {}
    row = -3 if named else -2  # before the header
    try:
        while left - found.keys():
            begin, cells = reader.line_num + 1, next(reader)
            row += bool(cells)
            if cells and row in left:
                found[row] = begin
    except (csv.Error, StopIteration):  # the file has changed
        pass
    return found
