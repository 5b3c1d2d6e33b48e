"""Numbered rows of CSV and JSON Lines files; malformed rows are yielded as faults, never skipped."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotation_file import not_utf8, open_annotations
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line, quote_value

LONGEST_S = 1e7  # 115 days; a later time is a mistake, such as another unit
# Lines are read whole, so a file without line ends, such as a sparse file of zeros, must not exhaust the memory.
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
        UserError: the file cannot be read as text, lacks a required column, or has two columns of the same name.
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
    """Iterate over the cells of each row of a CSV file, blank lines left out.

    Raises:
        UserError: a cell is longer than csv allows, or between quotation marks that are followed by further text, or
            are not closed in its line, nor at the end of a cell of a later line: it would swallow the rows between.
    """
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if reader.line_num > begin:
                raise UserError(
                    f"{path}, line {begin}: a quotation mark that opens a cell here is not closed, and line "
                    f"{reader.line_num} would belong to the same cell",
                    hint="close it, or write it twice in a cell between quotation marks",
                ) from error
            raise UserError(
                f"{path}, line {begin}: {error}",
                hint='give a valid CSV file: a cell with quotation marks is written as "say ""stop"" twice"',
            ) from error
        if cells is None:
            return
        if cells:
            yield cells


def require_once(columns: Sequence[str], *, path: Path) -> None:
    """Raise UserError if two columns of a table have the same name: it is unclear which one is meant."""
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise UserError(
            f"{path} has two columns named {on_one_line(', '.join(twice))}", hint="rename or remove one of them"
        )


def json_rows(path: Path, *, encoding: str = _UTF8) -> Iterator[Row]:
    """Iterate over the rows of a JSON Lines file.

    Raises:
        UserError: the file cannot be read as text.
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
    """A JSON object has a key twice."""


def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as `object_pairs_hook` of the parser; raise RepeatedKey if it has a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RepeatedKey(f"an object has two values of {quote_value(name)}")
    return values


def text_lines(path: Path, *, encoding: str = _UTF8) -> Iterator[str]:
    """Iterate over the lines of a file: of UTF-8, with or without a byte order mark, or of another encoding.

    Raises:
        UserError: the file cannot be read, or has another encoding; the message includes the line number.
    """
    try:
        with open_annotations(path, encoding=encoding, newline="") as file:
            for line_number, line in enumerate(iter(partial(file.readline, _MAX_LINE_CHARS), ""), start=1):
                if "\0" in line:
                    raise UserError(f"{path}, line {line_number}: a NUL byte", hint="give a text file")
                if len(line) == _MAX_LINE_CHARS:
                    raise UserError(
                        f"{path}, line {line_number}: longer than {_MAX_LINE_CHARS} characters", hint="give a text file"
                    )
                yield line
    except UnicodeError as error:
        if encoding != _UTF8 or not isinstance(error, UnicodeDecodeError):
            raise UserError(f"{path} is not {encoding.upper()}: {error}", hint="save it as UTF-8") from error
        raise not_utf8(path, error) from error


def seconds(value: object, *, default: float) -> float:
    """Convert a cell to seconds, a finite number; an empty cell gives `default`. A time may be written as a clock shows
    it: 00:01:02.5, or 1:02 for a minute and two seconds.

    Raises:
        ValueError: the value is neither, infinite, or not representable as a float.
    """
    if value is None or value == "":
        return default
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{quote_value(value)} is not a number of seconds")
    clock = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        number = float(value) if clock is None else _of_clock(*clock.groups())
    except (ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise ValueError(f"{quote_value(value)} is not a number of seconds, nor a time such as 00:01:02.5")
    return number


def _of_clock(hours: str | None, minutes: str, seconds: str) -> float:
    rest = float(seconds.replace(",", "."))
    if (int(minutes) >= 60 and hours is not None) or rest >= 60:
        return nan
    return int(hours or 0) * 3600 + int(minutes) * 60 + rest


def interval_fault(begin_s: float, end_s: float) -> str | None:
    """Describe what is wrong with a caption's times, or return None. An end of +inf means the end of the video."""
    if not isfinite(begin_s) or begin_s < 0:
        return f"begin_s is {begin_s}, expected a number of seconds, 0 or more"
    if not end_s > begin_s:
        return f"end_s is {end_s}, expected a time after begin_s, {begin_s}"
    for name, time_s in (("begin_s", begin_s), ("end_s", end_s)):
        if LONGEST_S < time_s < inf:
            return f"{name} is {time_s}, expected at most {LONGEST_S:,.0f} seconds"
    return None


def log_probability(value: object) -> float | None:
    """Convert a cell to the logarithm of a probability; an empty cell gives None.

    Raises:
        ValueError: the value is not a number, or more than 0; the message begins with the value.
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
