"""What became of each tensor, for the console and for run.json."""

import re
from collections.abc import Sequence

from train.weights.fitting import Change, Shape

_MAX_NAMED = 3
_NOT_USED, _NEW = "not used", "new, not there"
_TITLES = {
    "resized": "resized",
    "created": "created",
    "dropped": _NOT_USED,
    "missing": "MISSING",
    "unexpected": "UNEXPECTED",
    "reshaped": "OTHER SHAPE",
}


def table_of(changes: Sequence[Change]) -> list[str]:
    """Lines that show the changes, equal ones of several blocks in one."""
    rows = []
    for group in _grouped(changes):
        first = group[0]
        name = _pattern(first.origin or first.name) if len(group) > 1 else (first.origin or first.name)
        count = f" ({len(group)} tensors)" if len(group) > 1 else ""
        rows.append((_title(first), f"{name}{count}", _shapes(first), first.why))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    ]


def summary_of(changes: Sequence[Change]) -> str:
    """What nothing explains, in one line."""
    parts = []
    for kind, words in (("missing", "missing"), ("unexpected", "left over"), ("reshaped", "of another shape")):
        names = [change.origin or change.name for change in changes if change.kind == kind]
        if names:
            more = ", ..." if len(names) > _MAX_NAMED else ""
            parts.append(f"{len(names)} {words} ({', '.join(names[:_MAX_NAMED])}{more})")
    return "; ".join(parts)


def _grouped(changes: Sequence[Change]) -> list[list[Change]]:
    groups: dict[tuple[object, ...], list[Change]] = {}
    for change in changes:
        key = (change.kind, _pattern(change.origin or change.name), change.old, change.new, change.why)
        groups.setdefault(key, []).append(change)
    return list(groups.values())


def _title(change: Change) -> str:
    if not change.why or change.kind in ("resized", "created"):
        return _TITLES[change.kind]
    return _NEW if change.kind == "missing" else _NOT_USED


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _shapes(change: Change) -> str:
    if change.old is None or change.new is None:
        return _shape(change.old if change.old is not None else change.new)
    return f"{_shape(change.old)} -> {_shape(change.new)}"


def _shape(shape: Shape | None) -> str:
    return "one number" if shape == () else " x ".join(map(str, shape or ()))
