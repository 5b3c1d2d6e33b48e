"""Read the rows of caption tables in text and JSON, find their columns by common names, and convert times to seconds.

Text files are encoded in UTF-8, UTF-16 or Windows-1252 (which includes Latin-1). Cells are separated by commas,
semicolons, tabs or vertical bars. A JSON file has one of these shapes:

    {"video": "a.mp4", "text": "..."}                               lines with one row each
    [{"video": "a.mp4", "text": "..."}, ...]                        a list of rows
    {"video": ["a.mp4", ...], "text": ["...", ...]}                 columns as lists of equal length, or as pandas
    {"video": {"0": "a.mp4", ...}, "text": {"0": "...", ...}}       writes them, with an index
    {"a.mp4": ["...", ...], "b.mp4": {"start": 0, "text": "..."}}   videos: a caption, a row, or a list of these
    {"annotations": [{"video": "a.mp4", "text": "..."}, ...]}       lists of rows under any name; other keys, such as
                                                                    "info", are omitted and noted

A file with one row per line may also have the extension .json, as the files of Hugging Face `datasets` do.

Names of columns may be in English, German, French or Spanish, in any case: `Video`, `file name` and `Datei` all mean
`video`. docs/datasets.md lists the names. Each difference from the documented format is noted. A table is rejected if
it seems to contain times that cannot be interpreted.

Times are in seconds, milliseconds or frames, with an end or a duration. If a table contains a time in several units,
seconds take precedence over milliseconds, and milliseconds over frames. Frames count from 0 and require a column `fps`,
because the videos are not opened when a table is read.
"""

import codecs
import csv
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotations import (
    Reason,
    Row,
    UnusableRow,
    csv_rows,
    header_cells,
    json_rows,
    not_utf8_error,
    open_annotations,
    parse_seconds,
    require_unique_keys,
    require_unique_names,
    text_lines,
)
from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line, quote_value

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_ENCODING_NAMES = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252 (Latin-1)"}
_HEAD_BYTES = 4096
_MAX_READ_BYTES = 1 << 20  # maximum number of bytes that are read at once, because a line may be as long as the file
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|])"?[\r\n]*', re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
TEXT_SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".txt"})
LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})


def note_encoding(path: Path, *, note: Callable[[str], None]) -> str:
    """Return the encoding of a text file, and add a note if it is not UTF-8."""
    encoding = encoding_of(path)
    if encoding in _ENCODING_NAMES:
        note(f"{path.name}: read as {_ENCODING_NAMES[encoding]} instead of UTF-8")
    return encoding


def encoding_of(path: Path) -> str:
    """Detect the encoding of a text file, and return Python's name for it.

    If a file is not UTF-8, but some of its non-ASCII lines are valid UTF-8, it is regarded as damaged.

    Raises:
        UserError: The file is not a text file, or is damaged. The message contains the number of the line.
    """
    with open_annotations(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
        for mark, encoding in _BYTE_ORDER_MARKS:
            if head.startswith(mark):
                return encoding
        for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
            if head[first::2].count(0) > len(head) // 4 > head[1 - first :: 2].count(0):
                return encoding
        file.seek(0)
        first_error: UnicodeDecodeError | None = None
        has_utf8 = has_binary = False
        for line in iter(lambda: file.readline(_MAX_READ_BYTES), b""):
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
        raise not_utf8_error(path, first_error)
    return "cp1252"


def _read_header(path: Path, *, encoding: str) -> tuple[str, str | None]:
    """Return the line with the header, and the separator that a line above it declares for Excel (`sep=;`), or None."""
    lines = (line for line in text_lines(path, encoding=encoding) if line.strip())
    first_line = next(lines, "")
    match = _SEPARATOR_LINE.fullmatch(first_line)
    return (first_line, None) if match is None else (next(lines, ""), match[1])


def _best_separator(header_line: str, *, required: Sequence[str]) -> str:
    """Return the separator that yields the most required columns in the header; in a tie, the most known columns."""

    def score(separator: str) -> tuple[int, int]:
        names = columns_of(header_cells(header_line, separator=separator))
        return -len(missing_columns(names.values(), required)), len(names)

    return max(_SEPARATORS, key=score)


def read_separated_rows(path: Path, *, required: Sequence[str], note: Callable[[str], None]) -> Iterator[Row]:
    """Iterate over the rows of a text table with a header. The rows have the documented column names.

    Args:
        required: Columns that the table must have. A label column can replace the column `text`.
        note: Function that is called with a note about each difference from the documented format.

    Raises:
        UserError: The file is not a text table, lacks a column, has two columns with the same meaning, or has times
            that cannot be interpreted.
    """
    encoding = note_encoding(path, note=note)
    header_line, declared_separator = _read_header(path, encoding=encoding)
    separator = declared_separator or _best_separator(header_line, required=required)
    is_declared = declared_separator is not None
    names = columns_of(header_cells(header_line, separator=separator))
    if missing := missing_columns(names.values(), required):
        first_line = on_one_line(header_line.strip())
        content = f"its first line is: {first_line}" if first_line else "the file is empty"
        if is_declared:
            next_line = f"the next line is: {first_line}" if first_line else "there is no other line"
            content = f"its first line declares {_SEPARATORS[separator]} as separators, but {next_line}"
        raise UserError(
            f"{path} has no column for {' and '.join(missing)}; {content}",
            hint="remove the first line if it is wrong; the next line must contain the column names: video,text or "
            "video,begin_s,end_s,text"
            if is_declared
            else "the first line must contain the column names, separated by commas, semicolons or tabs: video,text or "
            "video,begin_s,end_s,text; docs/datasets.md lists the other names that are recognized",
        )
    if separator != ",":
        note(f"{path.name}: the cells are separated by {_SEPARATORS[separator]}")
    rows = csv_rows(text_lines(path, encoding=encoding), path=path, separator=separator)
    if declared_separator:
        next(rows)
    header = next(rows)
    columns = take_columns(header, path=path, note=note)
    for number, cells in enumerate(rows):
        if len(cells) != len(header):
            yield Row(number, {}, f"{len(cells)} cells, expected {len(header)} (one per column)")
            continue
        values = {columns[name]: cell for name, cell in zip(header, cells, strict=True) if name in columns}
        if separator != ",":  # numbers in tables with other separators may have decimal commas
            for name in NUMBER_COLUMNS:
                if _DECIMAL_COMMA.fullmatch(cell := values.get(name, "").strip()):
                    values[name] = cell.replace(",", ".")
        yield Row(number, values)


def line_numbers(path: Path, rows: Collection[int]) -> dict[int, int]:
    """Return the 1-based number of the line where each of the given rows of a caption table begins.

    Raises:
        UserError: The file cannot be read, or is no longer a text file.
    """
    encoding, requested_rows = encoding_of(path), set(rows)
    if path.suffix.lower() in LINE_SUFFIXES:
        lines = (number for number, line in enumerate(text_lines(path, encoding=encoding), start=1) if line.strip())
        return {row: number for row, number in enumerate(lines) if row in requested_rows}
    header_line, declared_separator = _read_header(path, encoding=encoding)
    separator = declared_separator or _best_separator(header_line, required=())
    reader = csv.reader(text_lines(path, encoding=encoding), delimiter=separator)
    line_of: dict[int, int] = {}
    row = -3 if declared_separator else -2  # number of the row before the first one; the header has the number -1
    try:
        while requested_rows - line_of.keys():
            line_number, cells = reader.line_num + 1, next(reader)
            row += bool(cells)
            if cells and row in requested_rows:
                line_of[row] = line_number
    except (csv.Error, StopIteration):  # the file has changed
        pass
    return line_of


JSON_SUFFIX = ".json"
_MAX_KEY_SETS = 20  # maximum number of different key sets that are cached, and of notes about them
_MAX_LINE_CHARS = 1 << 20
_MAX_LISTED = 5
# Names of lists in files from COCO, ActivityNet and MSR-VTT. These are not names of videos.
_LIST_NAMES = frozenset({"annotations", "database", "sentences"})
_SHAPE_HINT = (
    'use a list of rows ([{"video": ..., "text": ...}, ...]), columns ({"video": [...], "text": [...]}), or videos '
    'with their captions ({"a.mp4": ["...", ...]})'
)


def json_table_rows(path: Path, *, required: Sequence[str], note: Callable[[str], None]) -> Iterator[Row]:
    """Iterate over the rows of a JSON table. The rows have the documented column names.

    Args:
        required: Columns that at least one row must have. A label can replace the text.
        note: Function that is called with a note about each difference from the documented format.

    Raises:
        UserError: The file is not JSON or not a caption table, or no row has a required column. A missing column is
            reported after the last row.
    """
    missing: Sequence[str] = required
    first_keys: tuple[str, ...] = ()
    columns_of_keys: dict[tuple[str, ...], dict[str, str]] = {}
    notes: set[str] = set()

    def note_once(text: str) -> None:
        if text not in notes and len(notes) < _MAX_KEY_SETS:
            notes.add(text)
            note(text)

    for row in _rows(path, note=note):
        keys = tuple(row.values)
        if keys not in columns_of_keys:
            if len(columns_of_keys) == _MAX_KEY_SETS:
                columns_of_keys.clear()
            columns_of_keys[keys] = take_columns(keys, path=path, note=note_once)
        columns = columns_of_keys[keys]
        if missing and row.fault is None:
            missing, first_keys = missing_columns(columns.values(), missing), first_keys or keys
        yield Row(row.number, {columns[key]: value for key, value in row.values.items() if key in columns}, row.fault)
    if first_keys and missing:
        raise UserError(
            f"{path} has no column for {' and '.join(missing)} (the keys of its first row: "
            f"{', '.join(map(on_one_line, first_keys[:_MAX_KEY_SETS]))})",
            hint="name the columns video and text; docs/datasets.md lists the other names that are recognized",
        )


def _rows(path: Path, *, note: Callable[[str], None]) -> Iterator[Row]:
    """Iterate over the rows of a JSON table of any shape. The rows keep the keys of the file."""
    if path.suffix.lower() in LINE_SUFFIXES or _has_lines(path):
        yield from json_rows(path, encoding=note_encoding(path, note=note))
        return
    with open_annotations(path, encoding="utf-8-sig", errors="replace") as file:
        lines = iter(lambda: file.readline(_MAX_LINE_CHARS), "")
        first_character = next((line.strip()[0] for line in lines if line.strip()), "")
    if first_character == "[":
        for number, item in enumerate(array_items(path, hook=require_unique_keys)):
            yield _row(number, item)
    else:
        yield from _object_rows(path, note=note)


def _has_lines(path: Path) -> bool:
    """Return True if the first line of a file is a JSON object and is not the only line."""
    with open_annotations(path, encoding="utf-8-sig", errors="replace") as file:
        lines = (line for line in iter(lambda: file.readline(_MAX_LINE_CHARS), "") if line.strip())
        first_line = next(lines, "")
        try:
            return isinstance(json.loads(first_line), dict) and next(lines, None) is not None
        except (ValueError, RecursionError):
            return False


def _row(number: int, item: object, *, video: str | None = None) -> Row:
    """Return the row for a JSON object, or for one or several captions of `video`."""
    if video is not None and (isinstance(item, str) or _is_text_list(item)):
        return Row(number, {"video": video, "text": item})
    if not isinstance(item, dict):
        return Row(number, {} if video is None else {"video": video}, f"not a JSON object: {quote_value(item)}")
    return Row(number, dict(item) if video is None else {"video": video, **item})


def _is_text_list(item: object) -> bool:
    return isinstance(item, list) and all(isinstance(text, str) for text in item)


def _object_rows(path: Path, *, note: Callable[[str], None]) -> Iterator[Row]:
    content: dict[str, Any] = {}
    for key, value in object_items(path, hook=require_unique_keys):
        if key in content:
            raise UserError(f"{path} contains the key {quote_value(key)} twice", hint="remove or rename one of them")
        content[key] = value
    if not missing_columns(columns_of(list(content)).values(), ("video", "text")):
        yield from _column_rows(content, path=path)
        return
    if other_keys := [key for key, value in content.items() if not _has_complete_rows(value)]:
        if len(other_keys) < len(content):
            content = {key: value for key, value in content.items() if key not in other_keys}
            more = ", ..." if len(other_keys) > _MAX_LISTED else ""
            omitted = ", ".join(map(quote_value, other_keys[:_MAX_LISTED])) + more
            note(f"{path.name}: the rows are under {', '.join(map(quote_value, content))}; not read: {omitted}")
        elif lists := sorted(_LIST_NAMES.intersection(content)):
            raise UserError(
                f"{path}: {lists[0]} is not a list of rows with a video and a text",
                hint=f"{_SHAPE_HINT}; prep manifest --help lists the datasets that are read in their own form",
            )
    number = 0
    for video, value in content.items():
        items = value if isinstance(value, list) and not _is_text_list(value) else [value]
        for item in items:
            # If the rows contain their videos, the keys are an index from pandas, or the name of the list.
            is_row = isinstance(item, dict) and "video" in columns_of(list(item)).values()
            yield _row(number, item, video=None if is_row else video)
            number += 1


def _has_complete_rows(value: object) -> bool:
    """Return True for a list with at least one row that has a video, and a text or label."""
    return isinstance(value, list) and any(
        isinstance(item, dict) and not missing_columns(columns_of(list(item)).values(), ("video", "text"))
        for item in value
    )


def _column_rows(columns: Mapping[str, Any], *, path: Path) -> Iterator[Row]:
    """Yield the rows of an object that contains columns, or is itself a single row."""
    if all(isinstance(column, dict) for column in columns.values()):
        index = list(next(iter(columns.values())))
        for name, column in columns.items():
            if column.keys() != set(index):
                raise UserError(
                    f"{path}: the rows of the column {on_one_line(name)} differ from the rows of the first column",
                    hint=_SHAPE_HINT,
                )
        columns = {name: [column[key] for key in index] for name, column in columns.items()}
    elif not any(isinstance(column, list | dict) for column in columns.values()):
        columns = {name: [value] for name, value in columns.items()}
    lengths = {name: len(column) if isinstance(column, list) else None for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        details = ", ".join(
            f"{on_one_line(name)} {'is not a list' if length is None else 'has ' + count_noun(length, 'value')}"
            for name, length in lengths.items()
        )
        raise UserError(f"{path}: its columns are not lists of the same length: {details}", hint=_SHAPE_HINT)
    values: Sequence[Sequence[Any]] = list(columns.values())
    for number, cells in enumerate(zip(*values, strict=True)):
        yield Row(number, dict(zip(columns, cells, strict=True)))


_ROUNDING_S = 0.1  # tolerance when an end is compared with a start plus a duration, because tables have rounded values
_EDGES: Mapping[str, Sequence[str]] = {
    "begin": ("start", "begintime", "starttime"),
    "end": ("stop", "endtime", "stoptime"),
    "duration": ("dur",),
}
_UNITS: Mapping[str, Sequence[str]] = {
    "ms": ("ms", "msec", "millis", "milliseconds"),
    "frame": ("frame", "frames", "frameidx", "frameindex", "framenumber"),
}
_RATIO = re.compile(r"(\d{1,9}) ?/ ?(\d{1,9})")
_UNIT_NOUNS = {"ms": "milliseconds", "frame": "frames"}
# Words in names of columns that indicate the start of a caption, the end, or both.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_BEGIN_WORDS = frozenset({"begin", "begins", "beginning", "start", "starts", "starting", "tmin"})
_END_WORDS = frozenset({"end", "ends", "ending", "stop", "stops", "finish", "tmax"})
_BOTH_WORDS = frozenset({"timestamp", "timestamps", "timecode", "timecodes", "timespan", "interval", "span", "offset"})
_BOTH_NAMES = frozenset({"time", "times", "in", "out", "frame", "frames"})
# Additional columns with their names, which are compared in the same way as in `NAMES`.
OTHER_TIMES: Mapping[str, Sequence[str]] = {
    **{
        f"{edge}_{unit}": tuple(name + ending for name in (edge, *names) for ending in endings)
        for edge, names in _EDGES.items()
        for unit, endings in _UNITS.items()
    },
    "fps": ("framerate", "framespersecond"),
}


def require_known_times(ignored: Sequence[str], *, columns: Collection[str], path: Path) -> None:
    """Raise UserError if an ignored column seems to contain times that the known columns do not contain.

    Without these times, the captions would apply to complete videos, or extend to the ends of the videos.

    Args:
        ignored: Names of unknown columns in the header.
        columns: Documented names of the known columns.
    """
    edges = {name.partition("_")[0] for name in columns}
    has_begin, has_end = "begin" in edges, not edges.isdisjoint(("end", "duration"))
    words = (frozenset() if has_begin else _BEGIN_WORDS) | (frozenset() if has_end else _END_WORDS)
    words |= frozenset() if has_begin and has_end else _BOTH_WORDS
    names = frozenset() if has_begin and has_end else _BOTH_NAMES
    time_columns = [
        on_one_line(cell)
        for cell in ignored
        if cell.strip().lower() in names or not words.isdisjoint(word.lower() for word in _WORD.findall(cell))
    ]
    if time_columns:
        effect = "extend to the ends of their videos" if has_begin else "apply to complete videos"
        raise UserError(
            f"{path}: the times in {' and '.join(time_columns)} are not understood, so the captions would {effect}",
            hint="name the columns begin_s and end_s or duration_s, in seconds or in clock form (begin_ms for "
            "milliseconds, begin_frame with fps for frames); remove columns that do not contain caption times",
        )


def column_meaning(name: str) -> str:
    """Describe a column for notes. For a time that is converted, include the original unit."""
    edge, _, unit = name.partition("_")
    return f"{edge}_s, from {_UNIT_NOUNS[unit]}" if unit in _UNIT_NOUNS else name


def times_of(values: Mapping[str, Any]) -> tuple[float, float]:
    """Return the start and end of a row in seconds. A row without times applies to the complete video, 0 to +inf.

    Raises:
        UnusableRow: A time cannot be converted, the end contradicts the duration, or a frame rate is not positive.
    """
    begin_s, end_s, duration_s = (_time_s(values, edge) for edge in _EDGES)
    begin_s = 0.0 if begin_s is None else begin_s
    if duration_s is None:
        return begin_s, inf if end_s is None else end_s
    if end_s is not None and not abs(begin_s + duration_s - end_s) <= _ROUNDING_S:
        raise UnusableRow(
            Reason.BAD_TIME,
            f"it ends at {end_s:g} s, but its duration implies an end at {begin_s + duration_s:g} s; remove the "
            "duration column if it contains the duration of the video",
        )
    return begin_s, begin_s + duration_s if end_s is None else end_s


def _time_s(values: Mapping[str, Any], edge: str) -> float | None:
    for unit in ("s", *_UNITS):
        value = values.get(f"{edge}_{unit}")
        if value is None or value == "":
            continue
        try:
            if unit == "s":
                return parse_seconds(value, default=0.0)
            per_s: float | None = 1000.0
            if unit == "frame":
                rate = values.get("fps")
                ratio = _RATIO.fullmatch(rate.strip()) if isinstance(rate, str) else None  # 30000/1001
                per_s = _number(rate) if ratio is None else int(ratio[1]) / (int(ratio[2]) or inf)
            if per_s is None or per_s <= 0:
                fault = f"fps is {quote_value(values.get('fps'))}, expected a frame rate such as 25 or 30000/1001"
                raise UnusableRow(Reason.BAD_FPS, fault)
            number = _number(value)
            return parse_seconds(f"{value} ({_UNIT_NOUNS[unit]})" if number is None else number / per_s, default=0.0)
        except ValueError as error:
            raise UnusableRow(Reason.BAD_TIME, str(error)) from None
    return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


CLASS = f"{LABEL_PREFIX}class"
# Columns with their additional names. Comparisons ignore case, spaces, punctuation and accents.
NAMES: Mapping[str, Sequence[str]] = {
    "video": ("videoid", "videoname", "videopath", "videofile", "file", "filename", "filepath", "path", "clip"),
    "text": ("caption", "captions", "sentence", "description", "narration", "transcript", "utterance"),
    "begin_s": (
        "begin",
        "start",
        "starts",
        "begintime",
        "starttime",
        "startsec",
        "startseconds",
        "tstart",
        "onset",
        "from",
    ),
    "end_s": ("end", "ends", "stop", "stops", "endtime", "stoptime", "endsec", "endseconds", "tend", "to"),
    "duration_s": ("duration", "dur", "durationsec", "durationseconds"),
    "source": (),
    "likelihood": (),
    "split": ("subset", "partition"),
    "group": ("moment",),
    "view": ("camera",),
    CLASS: ("label", "class"),
}
# Names that apply only if a table has no other column with the same meaning: German, French and Spanish names, and
# names of instructions in robot datasets.
SECONDARY_NAMES: Mapping[str, Sequence[str]] = {
    "video": ("datei", "dateiname", "dateipfad", "pfad", "fichier", "nomdufichier", "chemin", "archivo", "ruta"),
    "text": (
        *("beschreibung", "untertitel", "texte", "legende", "texto", "descripcion", "leyenda"),
        *("languageinstruction", "instruction", "task", "tasks"),
    ),
    "begin_s": ("von", "beginn", "anfang", "startzeit", "debut", "inicio", "desde"),
    "end_s": ("bis", "ende", "endzeit", "fin", "hasta"),
    "duration_s": ("dauer", "duree", "duracion"),
}
_DURATIONS = frozenset(("durations", *NAMES["duration_s"], *SECONDARY_NAMES["duration_s"]))
NUMBER_COLUMNS = ("begin_s", "end_s", "duration_s", "likelihood", *OTHER_TIMES)
_LABEL = re.compile(r"label[\W_]+(?=\w)(.+)", re.IGNORECASE)
_ELAN_FORMAT = re.compile(r" - (?:hh:mm:ss\.ms|ss\.msec)$")  # format of times, which ELAN adds to names of columns


def columns_of(header: Sequence[str]) -> dict[str, str]:
    """Map the names of known columns in a header to documented columns, keys of `OTHER_TIMES`, or labels.

    A time is omitted if the table also has the time in a preferred unit.
    """
    stripped = {cell: _strip_name(cell) for cell in header}
    names = {**NAMES, **OTHER_TIMES}
    columns: dict[str, str] = {}
    for tier in ({name: ("".join(name.split("_")),) for name in names}, names, SECONDARY_NAMES):
        known = {alias: name for name, aliases in tier.items() if name not in columns.values() for alias in aliases}
        columns |= {cell: known[name] for cell, name in stripped.items() if cell not in columns and name in known}
    labels = {cell: _LABEL.fullmatch(cell.strip()) for cell in header if cell not in columns}
    columns |= {
        cell: LABEL_PREFIX + re.sub(r"\W+", "_", match[1].strip().lower())
        for cell, match in labels.items()
        if match is not None
    }
    # A column is unneeded if the table has the same time in a preferred unit, if it is a frame rate but no time is in
    # frames, or if it is a duration but there is no start, so that it is the duration of the video.
    known_names = set(columns.values())
    unneeded: set[str] = set()
    for edge in _EDGES:
        time_columns = [name for unit in ("s", *_UNITS) if (name := f"{edge}_{unit}") in known_names]
        is_video_duration = edge == "duration" and not any(name.startswith("begin_") for name in known_names)
        unneeded.update(time_columns if is_video_duration else time_columns[1:])
    if known_names.isdisjoint({f"{edge}_frame" for edge in _EDGES} - unneeded):
        unneeded.add("fps")
    return {cell: name for cell, name in columns.items() if name not in unneeded}


def _strip_name(cell: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFD", _ELAN_FORMAT.sub("", cell.strip()).lower()))


def take_columns(header: Sequence[str], *, path: Path, note: Callable[[str], None]) -> dict[str, str]:
    """Return `columns_of(header)`, and note the differences from the documented names.

    Raises:
        UserError: Two columns have the same name or meaning, times are in frames but there is no frame rate, or a
            column seems to contain times that cannot be interpreted.
    """
    require_unique_names([cell for cell in header if cell], path=path)
    columns = columns_of(header)
    for name in dict.fromkeys(columns.values()):
        cells = [on_one_line(cell) for cell, column in columns.items() if column == name]
        if len(cells) > 1:
            raise UserError(
                f"{path}: {' and '.join(cells)} could both be the column {name}", hint=f"rename one of them to {name}"
            )
    frames = [on_one_line(cell) for cell, name in columns.items() if name.endswith("_frame")]
    if frames and "fps" not in columns.values():
        raise UserError(
            f"{path}: {' and '.join(frames)} cannot be converted to seconds without the frame rate",
            hint="add a column fps with the frame rate of each row's video, or begin_s and end_s in seconds",
        )
    ignored = [cell for cell in header if cell.strip() and cell not in columns]
    require_known_times(ignored, columns=columns.values(), path=path)
    if unused := [on_one_line(cell) for cell in ignored if _strip_name(cell) in _DURATIONS]:
        note(f"{path.name}: {unused[0]} is not used, because no column contains the start of the captions")
        ignored = [cell for cell in ignored if _strip_name(cell) not in _DURATIONS]
    differences = [
        f"{on_one_line(cell)} as {column_meaning(name)}"
        for cell, name in columns.items()
        if cell.strip().lower() != column_meaning(name)
    ]
    if differences:
        note(f"{path.name}: read {', '.join(differences)}")
    if ignored:
        more = ", ..." if len(ignored) > 10 else ""
        note(f"{path.name}: ignored {', '.join(on_one_line(cell) for cell in ignored[:10])}{more}")
    return columns


def missing_columns(names: Collection[str], required: Sequence[str]) -> list[str]:
    """Return the required columns that a table lacks. A label can replace the text."""
    has_label = any(name.startswith(LABEL_PREFIX) for name in names)
    return [name for name in required if name not in names and not (name == "text" and has_label)]
