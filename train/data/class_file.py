"""Names of classes in files: a plain list, or the table that EPIC-KITCHENS-100 publishes.

plain list   one class per line, its names separated by `|`; a numeric label is the line number, from 0
table        EPIC_100_verb_classes.csv, EPIC_100_noun_classes.csv: `id,key,instances,category`; the name of class `id`
             is its `key`, and the other columns are not used
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.adapters.annotations import read_csv, text_lines
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line

Names = tuple[tuple[str, ...], ...]
_TABLE, _UNUSED = ("id", "key"), ("instances", "category")
_FORMS = "give EPIC_100_verb_classes.csv as it was published (id,key,instances,category), or one class name per line"
# A first line of such words, several of them, is a header rather than the name of a class.
_OF_HEADERS = frozenset({"id", "key", "name", "label", "class", "category", "index", "class_id", "class_name"})
_WORD = re.compile(r"\w+")


def read_class_file(path: Path) -> Names:
    """The names of each class, one or more.

    Raises:
        UserError: the file cannot be read, is empty, is a table with other columns, or has a name twice.
    """
    lines = [line.strip() for line in text_lines(path) if line.strip()]
    header = next(csv.reader(lines[:1]), [])
    if set(_TABLE) <= set(header) <= {*_TABLE, *_UNUSED}:
        found = _names_of_table(path)
    elif path.suffix.lower() == ".csv" or _is_header(header):
        raise UserError(f"{path} begins with the line {on_one_line(lines[0]) if lines else ''!r}", hint=_FORMS)
    else:
        found = tuple(tuple(name.strip() for name in line.split("|") if name.strip()) for line in lines)
    names = [name for its in found for name in its]
    if not all(found) or not names:
        raise UserError(f"{path} has a line without a name", hint="one class per line, its names separated by |")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path} has {twice!r} twice", hint="a name belongs to one class")
    return found


def require_names(classes: NDArray[np.integer], names: Sequence[object], *, path: Path, label: str) -> None:
    """Raise a UserError if a class number of a label has no name: the list is of another label, or not whole."""
    most = int(classes.max(initial=-1))
    if most >= len(names):
        raise UserError(
            f"{path} names {count_noun(len(names), 'class', 'classes')}, numbered from 0, and the captions "
            f"have {label} "
            f"{most}",
            hint="give the names of all classes of this label, in the order of their numbers",
        )


def _is_header(cells: Sequence[str]) -> bool:
    words = [cell.strip().lower() for cell in cells]
    return len(words) > 1 and all(map(_WORD.fullmatch, words)) and not _OF_HEADERS.isdisjoint(words)


def _names_of_table(path: Path) -> Names:
    key_of: dict[int, str] = {}
    for row in read_csv(path, required=_TABLE):
        number = row.values.get("id", "").strip()
        if row.fault is not None or not re.fullmatch(r"\d{1,9}", number) or int(number) in key_of:
            fault = row.fault or f"id is {number!r}, expected a number that no other row has"
            raise UserError(f"{path}, row {row.number}: {fault}", hint="give the file as it was published")
        key_of[int(number)] = row.values["key"].strip()
    missing = next((number for number in range(len(key_of)) if number not in key_of), None)
    if missing is not None:
        raise UserError(
            f"{path} has {count_noun(len(key_of), 'row')}, and none with id {missing}",
            hint="give the file as it was published",
        )
    return tuple((key_of[number],) if key_of[number] else () for number in range(len(key_of)))
