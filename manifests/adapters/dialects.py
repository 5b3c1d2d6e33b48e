"""Tables of captions as people have them: their encoding, their separator, and the names of their columns.

The columns are found by the names that are common for them, in English, German, French and Spanish and in any case:
`Video`, `file name` and `Datei` are all `video`. docs/datasets.md lists the names. Files are UTF-8 or UTF-16, else
Windows-1252 (of which Latin-1 is a part); cells are separated by commas, semicolons, tabs or vertical bars. Every
difference from the documented form is reported.
"""

import codecs
import csv
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clipmill.manifests.adapters.annotation_file import not_utf8, open_annotations, require_file
from clipmill.manifests.adapters.tables import Row, csv_rows, json_rows, require_once, text_lines
from clipmill.manifests.adapters.time_columns import OTHER_TIMES, as_taken, in_seconds, require_frame_rate, superfluous
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line

# Names of a column besides its own, compared without case, spaces, punctuation and accents.
NAMES: Mapping[str, Sequence[str]] = {
    "video": ("videoid", "videoname", "videopath", "videofile", "file", "filename", "filepath", "path", "clip"),
    "text": ("caption", "captions", "sentence", "description", "narration", "transcript", "utterance"),
    "begin_s": ("begin", "start", "starts", "begintime", "starttime", "startsec", "startseconds", "tstart", "from"),
    "end_s": ("end", "ends", "stop", "stops", "endtime", "stoptime", "endsec", "endseconds", "tend", "to"),
    "source": (),
    "likelihood": (),
    "split": ("subset", "partition"),
}
# German, French and Spanish names, which count only where a table has no English one for the column.
TRANSLATED_NAMES: Mapping[str, Sequence[str]] = {
    "video": ("datei", "dateiname", "dateipfad", "pfad", "fichier", "nomdufichier", "chemin", "archivo", "ruta"),
    "text": ("beschreibung", "untertitel", "texte", "legende", "texto", "descripcion", "leyenda"),
    "begin_s": ("von", "beginn", "anfang", "startzeit", "debut", "inicio", "desde"),
    "end_s": ("bis", "ende", "endzeit", "fin", "hasta"),
}
_NUMBERS = ("begin_s", "end_s", "likelihood", *OTHER_TIMES)
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_ENCODING_NAMES = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252 (Latin-1)"}
_HEAD_BYTES = 4096
_MAX_PART_BYTES = 1 << 20  # of a line, which may be as long as the file
_MAX_FORMS = 20  # sets of keys of JSON rows that are remembered, and of notes on them
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_NAMED_SEPARATOR = re.compile(r'"?sep=([,;\t|])"?[\r\n]*', re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_TEXT_SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".txt"})
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = _TEXT_SUFFIXES | _JSON_SUFFIXES


def read_caption_rows(
    path: Path, *, note: Callable[[str], None], required: Sequence[str] = ("video", "text")
) -> Iterator[Row]:
    """Iterate over the rows of a table of captions, with the documented names of the columns.

    The table is text with a header and any of the usual separators, or JSON lines.

    Args:
        note: called with each thing about the table that differs from its documented form.
        required: columns that a table with a header must have.

    Raises:
        UserError: the file is not such a table, lacks a column, or has two that could both be the same.
    """
    require_file(path)
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise UserError(
            f"{path} is neither a .csv, .tsv, .txt nor .jsonl file", hint="give a caption table in one of these formats"
        )
    encoding = encoding_of(path)
    if encoding in _ENCODING_NAMES:
        note(f"{path.name} is not UTF-8, read as {_ENCODING_NAMES[encoding]}")
    if suffix in _JSON_SUFFIXES:
        yield from _named_json_rows(path, encoding=encoding, note=note)
    else:
        yield from _separated_rows(path, encoding=encoding, required=required, note=note)


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
    if not set(required) <= set(names.values()):
        header = on_one_line(header_line.strip())
        found = f"its first line is: {header}" if header else "the file is empty"
        if is_named:
            below = f"the next one is: {header}" if header else "there is nothing below it"
            found = f"its first line says that {_SEPARATORS[separator]} separate the columns, but {below}"
        missing = " and ".join(name for name in required if name not in names.values())
        raise UserError(
            f"{path} has no column for {missing}; {found}",
            hint="remove the first line if it is wrong; the next one must name the columns: video,text or "
            "video,begin_s,end_s,text"
            if is_named
            else "the first line must name the columns, separated by commas, semicolons or tabs: video,text or "
            "video,begin_s,end_s,text; docs/datasets.md lists the other names that are recognized",
        )


def _best_separator(header_line: str, *, required: Sequence[str]) -> str:
    """Return the separator that splits the header into the most columns with a known name, required ones first."""

    def found(separator: str) -> tuple[int, int]:
        names = columns_of(next(csv.reader([header_line], delimiter=separator), []))
        return len(set(required).intersection(names.values())), len(names)

    return max(_SEPARATORS, key=found)


def columns_of(header: Sequence[str]) -> dict[str, str]:
    """Return the name in the header -> the documented column or one of `OTHER_TIMES`, for the columns that are known.

    Times in other units than those that are taken are left out.
    """
    plain = {cell: re.sub(r"[\W_]+", "", unicodedata.normalize("NFD", cell.lower())) for cell in header}
    names = {**NAMES, **OTHER_TIMES}
    found: dict[str, str] = {}
    for tier in ({name: ("".join(name.split("_")),) for name in names}, names, TRANSLATED_NAMES):
        known = {alias: name for name, aliases in tier.items() if name not in found.values() for alias in aliases}
        found |= {cell: known[name] for cell, name in plain.items() if cell not in found and name in known}
    return {cell: name for cell, name in found.items() if name not in superfluous(set(found.values()))}


def _columns(header: Sequence[str], *, path: Path, note: Callable[[str], None]) -> dict[str, str]:
    """Return `columns_of(header)`, and note what differs from the documented names.

    Raises:
        UserError: two columns have the same name, or could both be the same; or times are in frames of unknown length.
    """
    require_once([cell for cell in header if cell], path=path)
    columns = columns_of(header)
    for name in (*NAMES, *OTHER_TIMES):
        cells = [cell for cell, column in columns.items() if column == name]
        if len(cells) > 1:
            raise UserError(
                f"{path}: {' and '.join(cells)} could both be the column {name}", hint=f"rename one of them to {name}"
            )
    require_frame_rate(columns, path=path)
    taken = [
        f"{on_one_line(cell)} as {as_taken(name)}"
        for cell, name in columns.items()
        if cell.strip().lower() != as_taken(name)
    ]
    if taken:
        note(f"{path.name}: read {', '.join(taken)}")
    ignored = [on_one_line(cell) for cell in header if cell.strip() and cell not in columns]
    if ignored:
        note(f"{path.name}: ignored {', '.join(ignored[:10])}{', ...' if len(ignored) > 10 else ''}")
    return columns


def _separated_rows(
    path: Path, *, encoding: str, required: Sequence[str], note: Callable[[str], None]
) -> Iterator[Row]:
    header_line, named = _head(path, encoding=encoding)
    separator = named or _best_separator(header_line, required=required)
    _require_columns(header_line, separator, is_named=named is not None, required=required, path=path)
    if separator != ",":
        note(f"{path.name}: cells separated by {_SEPARATORS[separator]}")
    rows = csv_rows(text_lines(path, encoding=encoding), path=path, separator=separator)
    if named:
        next(rows)
    header = next(rows)
    columns = _columns(header, path=path, note=note)
    for number, cells in enumerate(rows):
        if len(cells) != len(header):
            yield Row(number, {}, f"{len(cells)} cells, expected {len(header)} (one per column)")
            continue
        given = zip(header, cells, strict=True)
        row = Row(number, {columns[name]: cell for name, cell in given if name in columns})
        yield in_seconds(row if separator == "," else _with_points(row))


def _with_points(row: Row) -> Row:
    """Return a row whose numbers have points: other separators are used where numbers are written with commas."""
    cells = {name: row.values.get(name, "").strip() for name in _NUMBERS}
    found = {name: cell.replace(",", ".") for name, cell in cells.items() if _DECIMAL_COMMA.fullmatch(cell)}
    return replace(row, values=row.values | found) if found else row


def _named_json_rows(path: Path, *, encoding: str, note: Callable[[str], None]) -> Iterator[Row]:
    known: dict[tuple[str, ...], dict[str, str]] = {}
    noted: set[str] = set()

    def note_once(text: str) -> None:
        if text not in noted and len(noted) < _MAX_FORMS:
            noted.add(text)
            note(text)

    for row in json_rows(path, encoding=encoding):
        keys = tuple(row.values)
        if keys not in known:
            if len(known) == _MAX_FORMS:
                known.clear()
            known[keys] = _columns(keys, path=path, note=note_once)
        columns = known[keys]
        values = {columns[key]: value for key, value in row.values.items() if key in columns}
        yield in_seconds(replace(row, values=values))


def line_numbers(path: Path, rows: Collection[int]) -> dict[int, int]:
    """Return the line, from 1, at which each of some rows of a table of captions begins.

    Raises:
        UserError: the file is not such a table any more.
    """
    encoding, left = encoding_of(path), set(rows)
    if path.suffix.lower() in _JSON_SUFFIXES:
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
