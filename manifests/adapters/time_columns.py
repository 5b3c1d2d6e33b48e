"""Columns of caption tables with times in milliseconds or frames, which become `begin_s` and `end_s`.

A time in seconds is preferred to the same time in milliseconds, and this to one in frames. Frames count from 0 and need
a column `fps`, since the videos are not opened when a table is read.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.tables import Row
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line, quoted

_EDGES: Mapping[str, Sequence[str]] = {
    "begin": ("start", "begintime", "starttime"),
    "end": ("stop", "endtime", "stoptime"),
}
_UNITS: Mapping[str, Sequence[str]] = {
    "ms": ("ms", "msec", "millis", "milliseconds"),
    "frame": ("frame", "frameidx", "frameindex", "framenumber"),
}
_RATIO = re.compile(r"(\d{1,9}) ?/ ?(\d{1,9})")
_WORDS = {"ms": "milliseconds", "frame": "frames"}
# Column -> its names, as in `dialects`.
OTHER_TIMES: Mapping[str, Sequence[str]] = {
    **{
        f"{edge}_{unit}": tuple(name + ending for name in (edge, *names) for ending in endings)
        for edge, names in _EDGES.items()
        for unit, endings in _UNITS.items()
    },
    "fps": ("framerate", "framespersecond"),
}


def superfluous(names: Collection[str]) -> set[str]:
    """Return the columns that are not needed: the same time is there in a preferred unit, or no time is in frames."""
    left: set[str] = set()
    for edge in _EDGES:
        given = [name for unit in ("s", *_UNITS) if (name := f"{edge}_{unit}") in names]
        left.update(given[1:])
    return left if any(f"{edge}_frame" in set(names) - left for edge in _EDGES) else {*left, "fps"}


def require_frame_rate(columns: Mapping[str, str], *, path: Path) -> None:
    """Raise UserError if times are in frames and there is no frame rate.

    Args:
        columns: name in the header -> column.
    """
    frames = [on_one_line(cell) for cell, name in columns.items() if name.endswith("_frame")]
    if frames and "fps" not in columns.values():
        raise UserError(
            f"{path}: {' and '.join(frames)} cannot be converted to seconds without the frame rate",
            hint="add a column fps with the frame rate of each row's video, or begin_s and end_s in seconds",
        )


def as_taken(name: str) -> str:
    """Return what a column is read as, for notes."""
    edge, _, unit = name.partition("_")
    return f"{edge}_s, from {_WORDS[unit]}" if unit in _WORDS else name


def in_seconds(row: Row) -> Row:
    """Return a row with its times in seconds; a time that cannot be converted is kept as text that is not a number.

    The row has a fault if times are in frames and its frame rate is not a positive number.
    """
    found: dict[str, Any] = {}
    for edge in _EDGES:
        for unit in _UNITS:
            value = row.values.get(f"{edge}_{unit}")
            if value not in (None, ""):
                per_s = 1000.0 if unit == "ms" else _rate(row.values.get("fps"))
                if per_s is None or per_s <= 0:
                    fault = f"fps is {quoted(row.values.get('fps'))}, expected a frame rate such as 25 or 30000/1001"
                    return replace(row, fault=fault, reason=Reason.BAD_FPS)
                number = _number(value)
                found[f"{edge}_s"] = f"{value} ({_WORDS[unit]})" if number is None else number / per_s
    return replace(row, values=row.values | found) if found else row


def _rate(value: object) -> float | None:
    """A frame rate, which may be written as a fraction: 30000/1001."""
    ratio = _RATIO.fullmatch(value.strip()) if isinstance(value, str) else None
    if ratio is None:
        return _number(value)
    return int(ratio[1]) / int(ratio[2]) if int(ratio[2]) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None
