"""Read annotation files: numbered rows of CSV and JSON Lines, values of cells, names of splits, codes of rejected rows.

Errors contain the path of the file. Malformed rows are yielded as faults, never skipped.
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

_MAX_PART_BYTES = 1 << 20  # number of bytes read at a time, because a line may be as long as the file


@contextmanager
def open_annotations(path: Path, mode: str = "r", **options: Any) -> Iterator[IO[Any]]:
    """Open `path`, like `path.open(mode, **options)`; raise UserError if opening or reading fails.

    Only regular files are accepted: an adapter may read a file twice, which a pipe does not allow, and opening a named
    pipe blocks until another process writes to it.

    Raises:
        UserError: The file cannot be opened or read, or is a folder, a pipe, a socket or a device.
    """
    with reading(path):
        require_file(path)
        with path.open(mode, **options) as file:
            yield file


def require_file(path: Path) -> None:
    """Raise UserError if `path` exists and is not a regular file. Opening it reports that a file is missing."""
    with reading(path):
        try:
            kind = stat_kind(path.stat().st_mode)
        except FileNotFoundError:
            return
    if kind is not None:
        hint = "pass the path of a file" if kind == "a folder" else "save its content to a file, and pass that file"
        raise UserError(f"cannot read {path}: it is {kind}, not a file", hint=hint)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError into a UserError with `path`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {why}", hint="check the path of the annotation file") from error


def not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    """Return the error for a file that is not UTF-8. The file is read again to find the line number."""
    line_number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError), open_annotations(path, "rb") as file:
        while part := file.readline(_MAX_PART_BYTES):
            decoder.decode(part)
            line_number += part.endswith(b"\n")
    return UserError(f"{path}, line {line_number}: not UTF-8 ({error.reason})", hint="save it as UTF-8, uncompressed")


def stat_kind(mode: int) -> str | None:
    """Describe the file type of this st_mode; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


LONGEST_S = 1e7  # limit of 115 days; a later time is a mistake, such as a wrong unit
# Lines are read as a unit, so a file without line breaks, such as a sparse file of zeros, must not exhaust the memory.
_MAX_LINE_CHARS = 1 << 26
_UTF8 = "utf-8-sig"
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# Hours, minutes and seconds, as in 00:01:02.5 and 1:02,500.
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:[.,]\d+)?)")


@dataclass(frozen=True)
class Row:
    """A row of a table; `fault` describes why its values cannot be used."""

    number: int  # 0-based, excluding the header
    values: dict[str, Any]
    fault: str | None = None


def read_csv(path: Path, *, required: Sequence[str], separator: str = ",") -> Iterator[Row]:
    """Iterate over the rows of a CSV file with a header.

    Raises:
        UserError: The file cannot be read as text, lacks a required column, or has two columns with the same name.
    """
    rows = csv_rows(text_lines(path), path=path, separator=separator)
    header = next(rows, [])
    missing = [name for name in required if name not in header]
    if missing:
        hint = f"the first line must contain the column names; required: {', '.join(required)}"
        for other, name in _OTHER_SEPARATORS.items():
            if separator == "," and len(header) == 1 and other in header[0]:
                hint = f"its columns are separated by {name}: save it with commas"
        raise UserError(
            f"{path} has no column {', '.join(missing)} (its columns: {', '.join(header) or 'none'})", hint=hint
        )
    require_once([name for name in header if name], path=path)
    for number, cells in enumerate(rows):
        if len(cells) != len(header):
            yield Row(number, {}, f"{len(cells)} cells, expected {len(header)} (one per column)")
        else:
            yield Row(number, dict(zip(header, cells, strict=True)))


def csv_rows(lines: Iterable[str], *, path: Path, separator: str = ",") -> Iterator[list[str]]:
    """Iterate over the cells of each row of a CSV file, without blank lines.

    Raises:
        UserError: A cell is longer than the csv module allows; text follows the closing quotation mark of a cell; or
            the closing quotation mark is missing, so that the cell would include later rows.
    """
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if reader.line_num > begin:
                raise UserError(
                    f"{path}, line {begin}: a quotation mark that opens a cell here is not closed, so line "
                    f"{reader.line_num} would belong to the same cell",
                    hint="close it; in a cell between quotation marks, double each quotation mark",
                ) from error
            raise UserError(
                f"{path}, line {begin}: {error}",
                hint='use a valid CSV file, in which a cell with quotation marks has the form "say ""stop"" twice"',
            ) from error
        if cells is None:
            return
        if cells:
            yield cells


def header_cells(line: str, *, separator: str = ",") -> list[str]:
    """Return the cells of a possible header of a CSV file; empty if a cell is longer than the csv module allows."""
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


def require_once(columns: Sequence[str], *, path: Path) -> None:
    """Raise UserError if two columns of a table have the same name, which would be ambiguous."""
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise UserError(
            f"{path} has two columns named {on_one_line(', '.join(twice))}", hint="rename or remove one of them"
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
        # Besides JSONDecodeError, an integer with more digits than Python converts raises a plain ValueError.
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
    """Return an object as an `object_pairs_hook` of the JSON parser; raise RepeatedKey if it contains a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RepeatedKey(f"an object has two values for {quote_value(name)}")
    return values


def text_lines(path: Path, *, encoding: str = _UTF8) -> Iterator[str]:
    """Iterate over the lines of a file in UTF-8, with or without a byte order mark, or in the given encoding.

    Raises:
        UserError: The file cannot be read, or has a different encoding; the message includes the line number.
    """
    try:
        with open_annotations(path, encoding=encoding, newline="") as file:
            for line_number, line in enumerate(iter(partial(file.readline, _MAX_LINE_CHARS), ""), start=1):
                if "\0" in line:
                    raise UserError(f"{path}, line {line_number}: a NUL byte", hint="use a text file")
                if len(line) == _MAX_LINE_CHARS:
                    raise UserError(
                        f"{path}, line {line_number}: longer than {_MAX_LINE_CHARS} characters", hint="use a text file"
                    )
                yield line
    except UnicodeError as error:
        if encoding != _UTF8 or not isinstance(error, UnicodeDecodeError):
            raise UserError(f"{path} is not {encoding.upper()}: {error}", hint="save it as UTF-8") from error
        raise not_utf8(path, error) from error


def seconds(value: object, *, default: float) -> float:
    """Convert a cell to seconds, a finite number; return `default` for an empty cell.

    A time may also be in clock form: 00:01:02.5, or 1:02 for a minute and two seconds.

    Raises:
        ValueError: The value has neither form, is infinite, or cannot be represented as a float.
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
    """Describe the problem with a caption's times; None if they are valid. An end of +inf is the end of the video."""
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
        ValueError: The value is not a number, or is above 0; the message begins with the value.
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
_NAMES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validate", "validation"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
_WORD = re.compile(r"[a-z]+")


def find_split(name: str) -> str | None:
    """Return the split that a dataset calls `name` (`val` for `validation`); None if the name is unknown."""
    return _NAMES.get(name.strip().lower())


def split_in_file_name(file_name: str) -> str:
    """Return the split that is a separate word in a file name (`EPIC_100_validation.csv`); train by default."""
    words = _WORD.findall(file_name.lower())
    return next((_NAMES[word] for word in words if word in _NAMES), TRAIN)


def split_of_list(path: Path, *, example: str) -> str:
    """Return the split in the file name of a list of videos.

    Args:
        example: Published name of such a list.

    Raises:
        UserError: The name contains no split.
    """
    if not any(word in _NAMES for word in _WORD.findall(path.name.lower())):
        raise UserError(
            f"the name of {path} does not contain the split of its videos",
            hint=f"rename it so that test, val or train is a word of the name, as in {example}",
        )
    return split_in_file_name(path.name)


def split_of_folders(relative_path: str) -> str:
    """Return the split in the name of the innermost folder whose name is a split (`val/a/b.mp4`); train by default."""
    folders = relative_path.split("/")[:-1]
    return next((_NAMES[folder.lower()] for folder in reversed(folders) if folder.lower() in _NAMES), TRAIN)


class Reason(StrEnum):
    """Reason codes of rejected rows, in rejected.parquet and manifest.json. The docs explain them."""

    MISSING_FILE = "missing_file"  # an annotated video does not exist; one row per video, with its lost captions
    MISSING_CHUNK = "missing_chunk"  # a model's caption of a chunk that no longer exists
    AMBIGUOUS_VIDEO = "ambiguous_video"  # the name matches several files
    DUPLICATE_ID = "duplicate_id"  # another video or narration already has this ID
    BAD_NAME = "bad_name"  # the file name is not valid Unicode, or an object with such a name cannot be read
    EMPTY_FILE = "empty_file"  # a video of zero bytes
    NOT_A_FILE = "not_a_file"  # a folder, pipe, socket or device with the name of a video
    UNREADABLE = "unreadable"  # the file or folder is inaccessible: a broken or circular link, or no permission
    EMPTY_ID = "empty_id"  # the row does not identify a video
    EMPTY_CAPTION = "empty_caption"
    BAD_TIME = "bad_time"  # not a finite number, negative, later than any video, or an end that is not after the start
    BAD_FPS = "bad_fps"  # times are in frames, but fps is not a frame rate
    BAD_LIKELIHOOD = "bad_likelihood"  # not a number, or above 0, which the logarithm of a probability cannot be
    BAD_SOURCE = "bad_source"  # a source with characters other than letters, digits, ".", "-" and "_"
    BAD_SPLIT = "bad_split"  # not train, val or test; or the same complete video in two splits
    BAD_LABEL = "bad_label"
    NO_INTERVAL = "no_interval"  # a timestamp that the interval rule cannot expand
    UNSURE = "unsure"  # the annotator marked it as unsure
    LEFT_OUT = "left_out"  # excluded by a list; one row per video, with its lost captions
    REDACTED = "redacted"  # withheld by the dataset
    MALFORMED_ROW = "malformed_row"  # not in the format documented by the dataset


class Unusable(Exception):
    """A row cannot be used for the given reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
