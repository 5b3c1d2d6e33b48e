"""Read annotation files (CSV, JSON Lines), and parse times, likelihoods and splits; list the reasons for rejection.

Errors contain the path of the file. A malformed row is yielded with a fault, and never skipped.
"""

import codecs
import csv
import json
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import IO, Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line, quote_value

_MAX_READ_BYTES = 1 << 20  # maximum number of bytes that are read at once, because a line may be as long as the file


@contextmanager
def open_annotations(path: Path, mode: str = "r", **options: Any) -> Iterator[IO[Any]]:
    """Open an annotation file, like `path.open(mode, **options)`.

    The file must be a regular file, because an adapter may read it twice, and because opening a named pipe would block
    until another process writes to it.

    Raises:
        UserError: The file cannot be opened or read, or is a folder, a pipe, a socket or a device.
    """
    with convert_read_errors(path):
        require_file(path)
        with path.open(mode, **options) as file:
            yield file


def require_file(path: Path) -> None:
    """Raise UserError if `path` is not a regular file. A missing file is accepted; opening it raises an error."""
    with convert_read_errors(path):
        try:
            kind = file_kind(path.stat().st_mode)
        except FileNotFoundError:
            return
    if kind is not None:
        hint = "pass the path of a file" if kind == "a folder" else "save its content to a file, and pass that file"
        raise UserError(f"cannot read {path}: it is {kind}, not a file", hint=hint)


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError to a UserError that contains `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {reason}", hint="check the path of the annotation file") from error


def not_utf8_error(path: Path, error: UnicodeDecodeError) -> UserError:
    """Return the error for a file that is not UTF-8. The file is read again to find the line number."""
    line_number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError), open_annotations(path, "rb") as file:
        while part := file.readline(_MAX_READ_BYTES):
            decoder.decode(part)
            line_number += part.endswith(b"\n")
    return UserError(f"{path}, line {line_number}: not UTF-8 ({error.reason})", hint="save it as UTF-8, uncompressed")


def file_kind(mode: int) -> str | None:
    """Describe the type of a file, such as "a folder", from its `st_mode`; return None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


LONGEST_S = 1e7  # maximum time in a video, 115 days; a later time is a mistake, such as a wrong unit
# Maximum length of a line. A file without line breaks, such as a sparse file of zeros, must not exhaust the memory.
_MAX_LINE_CHARS = 1 << 26
_UTF8 = "utf-8-sig"
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# Time with colons, as in 00:01:02.5 or 1:02,500.
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:[.,]\d+)?)")


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        number: 0-based index of the row, not counting the header.
        values: Values by column.
        fault: Reason why the values cannot be used, or None.
    """

    number: int
    values: dict[str, Any]
    fault: str | None = None


def read_csv(path: Path, *, required: Sequence[str], separator: str = ",") -> Iterator[Row]:
    """Iterate over the rows of a CSV file with a header.

    Args:
        required: Names of the columns that the file must have.

    Raises:
        UserError: The file is not a valid CSV file, lacks a required column, or has two columns with the same name.
    """
    rows = csv_rows(text_lines(path), path=path, separator=separator)
    header = next(rows, [])
    missing = [name for name in required if name not in header]
    if missing:
        hint = f"the first line must contain the column names; required: {', '.join(required)}"
        for other_separator, name in _OTHER_SEPARATORS.items():
            if separator == "," and len(header) == 1 and other_separator in header[0]:
                hint = f"the columns of the file are separated by {name}: save the file with commas"
        content = f"its columns: {', '.join(header)}" if header else "the file is empty"
        raise UserError(f"{path} has no column {', '.join(missing)} ({content})", hint=hint)
    require_unique_names([name for name in header if name], path=path)
    for number, cells in enumerate(rows):
        if len(cells) != len(header):
            yield Row(number, {}, f"{len(cells)} cells, expected {len(header)} (one per column)")
        else:
            yield Row(number, dict(zip(header, cells, strict=True)))


def csv_rows(lines: Iterable[str], *, path: Path, separator: str = ",") -> Iterator[list[str]]:
    """Iterate over the rows of a CSV file as lists of cells, skipping blank lines.

    Raises:
        UserError: A cell is longer than the csv module allows, text follows the closing quotation mark of a cell, or
            the closing quotation mark is missing, so that the cell would include later rows.
    """
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        line_number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if reader.line_num > line_number:
                raise UserError(
                    f"{path}, line {line_number}: a quotation mark that opens a cell here is not closed, so line "
                    f"{reader.line_num} would belong to the same cell",
                    hint="close it; in a cell between quotation marks, double each quotation mark",
                ) from error
            raise UserError(
                f"{path}, line {line_number}: {error}",
                hint='use a valid CSV file, in which a cell with quotation marks has the form "say ""stop"" twice"',
            ) from error
        if cells is None:
            return
        if cells:
            yield cells


def header_cells(line: str, *, separator: str = ",") -> list[str]:
    """Split a line that may be the header of a CSV file into cells; return [] if the csv module rejects the line."""
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


def require_unique_names(columns: Sequence[str], *, path: Path) -> None:
    """Raise UserError if two columns of a table have the same name."""
    duplicates = [name for name, count in Counter(columns).items() if count > 1]
    if duplicates:
        raise UserError(
            f"{path} has two columns named {on_one_line(', '.join(duplicates))}", hint="rename or remove one of them"
        )


def json_rows(path: Path, *, encoding: str = _UTF8) -> Iterator[Row]:
    """Iterate over the rows of a JSON Lines file.

    Raises:
        UserError: The file cannot be read as text.
    """
    for number, line in enumerate(line for line in text_lines(path, encoding=encoding) if line.strip()):
        try:
            values = json.loads(line, object_pairs_hook=require_unique_keys)
        except RepeatedKey as error:
            yield Row(number, {}, str(error))
            continue
        except RecursionError:
            yield Row(number, {}, "not JSON: nested too deeply")
            continue
        # This is a JSONDecodeError, or a plain ValueError for an integer with more digits than Python converts.
        except ValueError as error:
            yield Row(number, {}, f"not JSON: {error}")
            continue
        if isinstance(values, dict):
            yield Row(number, values)
        else:
            yield Row(number, {}, f"not a JSON object: {line.strip():.80}")


class RepeatedKey(ValueError):
    """A JSON object contains the same key twice."""


def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these pairs; raise RepeatedKey if a key occurs twice.

    This function is an `object_pairs_hook` for a JSON parser.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RepeatedKey(f"an object has two values for {quote_value(name)}")
    return values


def text_lines(path: Path, *, encoding: str = _UTF8) -> Iterator[str]:
    """Iterate over the lines of a text file.

    Args:
        encoding: Encoding of the file. By default, UTF-8 with or without a byte order mark.

    Raises:
        UserError: The file cannot be read, has a different encoding, or contains a NUL byte or a line that is too long.
    """
    try:
        with open_annotations(path, encoding=encoding, newline="") as file:
            for line_number, line in enumerate(iter(partial(file.readline, _MAX_LINE_CHARS), ""), start=1):
                if "\0" in line:
                    raise UserError(f"{path}, line {line_number}: the line contains a NUL byte", hint="use a text file")
                if len(line) == _MAX_LINE_CHARS:
                    raise UserError(
                        f"{path}, line {line_number}: the line has more than {_MAX_LINE_CHARS:,} characters",
                        hint="use a text file",
                    )
                yield line
    except UnicodeError as error:
        if encoding != _UTF8 or not isinstance(error, UnicodeDecodeError):
            raise UserError(f"{path} is not {encoding.upper()}: {error}", hint="save it as UTF-8") from error
        raise not_utf8_error(path, error) from error


def parse_seconds(value: object, *, default: float) -> float:
    """Convert a cell to a finite number of seconds.

    Args:
        value: Number of seconds, or a time with colons: 00:01:02.5, or 1:02 for one minute and two seconds.
        default: Return value for an empty cell.

    Raises:
        ValueError: The value has neither form, is not finite, or cannot be represented as a float.
    """
    if value is None or value == "":
        return default
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{quote_value(value)} is not a number of seconds")
    clock = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if clock is None:
            number = float(value)
        else:
            hours, minutes, rest = clock[1], int(clock[2]), float(clock[3].replace(",", "."))
            is_valid = rest < 60 and (minutes < 60 or hours is None)
            number = int(hours or 0) * 3600 + minutes * 60 + rest if is_valid else nan
    except (ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise ValueError(f"{quote_value(value)} is not a number of seconds, nor a time such as 00:01:02.5")
    return number


def interval_fault(begin_s: float, end_s: float) -> str | None:
    """Describe the fault of a caption's times, or return None if they are valid. `end_s` may be +inf."""
    if not isfinite(begin_s) or begin_s < 0:
        return f"begin_s is {begin_s}, expected a number of seconds, 0 or more"
    if not end_s > begin_s:
        return f"end_s is {end_s}, expected a time after begin_s, {begin_s}"
    for name, time_s in (("begin_s", begin_s), ("end_s", end_s)):
        if LONGEST_S < time_s < inf:
            return f"{name} is {time_s}, expected at most {LONGEST_S:,.0f} seconds"
    return None


def log_probability(value: object) -> float | None:
    """Convert a cell to the logarithm of a probability; return None for an empty cell.

    Raises:
        ValueError: The value is not a number, or is above 0. The message begins with the value.
    """
    if value is None or value == "":
        return None
    try:
        number = nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = nan
    if not (isfinite(number) and number <= 0):
        raise ValueError(f"{quote_value(value)}, expected the logarithm of a probability, 0 or less")
    return number


TRAIN = "train"
VAL = "val"
TEST = "test"
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validate", "validation"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
_WORD = re.compile(r"[a-z]+")


def find_split(name: str) -> str | None:
    """Return the split for a name that a dataset uses, such as `val` for `validation`; None for unknown names."""
    return _SPLIT_NAMES.get(name.strip().lower())


def split_in_file_name(file_name: str) -> str:
    """Return the first split that a file name contains as a word, as in `EPIC_100_validation.csv`; train by default."""
    words = _WORD.findall(file_name.lower())
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), TRAIN)


def split_of_list(path: Path, *, example: str) -> str:
    """Return the split in the file name of a list of videos.

    Args:
        example: Published file name of such a list, for the hint.

    Raises:
        UserError: The name does not contain a split.
    """
    if not any(word in _SPLIT_NAMES for word in _WORD.findall(path.name.lower())):
        raise UserError(
            f"the name of {path} does not contain the split of its videos",
            hint=f"rename the file so that its name contains the word test, val or train, as in {example}",
        )
    return split_in_file_name(path.name)


def split_of_folders(relative_path: str) -> str:
    """Return the split of the innermost folder that is named after a split, as in `val/a/b.mp4`; train by default."""
    folders = relative_path.split("/")[:-1]
    return next((_SPLIT_NAMES[folder.lower()] for folder in reversed(folders) if folder.lower() in _SPLIT_NAMES), TRAIN)


class Reason(StrEnum):
    """Reasons for rejected rows, as codes in rejected.parquet and manifest.json."""

    MISSING_FILE = "missing_file"  # annotated video without a file; one row per video, with the number of captions
    MISSING_CHUNK = "missing_chunk"  # caption that a model wrote for a chunk that no longer exists
    AMBIGUOUS_VIDEO = "ambiguous_video"  # name that matches several files
    DUPLICATE_ID = "duplicate_id"  # ID of an earlier video or narration
    BAD_NAME = "bad_name"  # file name that is not valid Unicode, or object whose name obstore cannot handle
    EMPTY_FILE = "empty_file"  # video of zero bytes
    NOT_A_FILE = "not_a_file"  # folder, pipe, socket or device with the name of a video
    UNREADABLE = "unreadable"  # file or folder that cannot be read, such as a broken link; damaged subtitle file
    EMPTY_ID = "empty_id"  # row that does not identify a video
    EMPTY_CAPTION = "empty_caption"
    BAD_TIME = "bad_time"  # time that is negative, too late or not finite, or an end that is not after the start
    BAD_FPS = "bad_fps"  # times in frames with an fps that is not a frame rate
    BAD_LIKELIHOOD = "bad_likelihood"  # likelihood that is not a number, or is above 0
    BAD_SOURCE = "bad_source"  # source with characters other than letters, digits, ".", "-" and "_"
    BAD_SPLIT = "bad_split"  # split that is not train, val or test, or a second split for a complete video
    BAD_LABEL = "bad_label"
    NO_INTERVAL = "no_interval"  # timestamp of a narration that cannot be expanded to an interval
    UNSURE = "unsure"  # narration that the annotator marked as unsure
    LEFT_OUT = "left_out"  # video that a list excludes; one row per video, with the number of captions
    REDACTED = "redacted"  # content that the dataset withholds
    MALFORMED_ROW = "malformed_row"  # row that does not have the documented format of the dataset


class UnusableRow(Exception):
    """A row of annotations cannot be used.

    Attributes:
        reason: Code of the reason.
        detail: Description of the fault.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
