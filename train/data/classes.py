"""Classes of clips, taken from the label columns of captions, and files with class names.

The classes of a label are collected from all captions of the training and evaluation splits, even from captions whose
videos are missing. An action of EPIC-KITCHENS-100 is a string "verb:noun" of two class numbers, and actions are sorted
as strings: "0:10" comes before "0:2". Other classes are sorted as numbers if all names are numbers, and otherwise as
strings.

Suffixes: R rows of the table of captions, L labels.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.adapters.annotations import header_cells, read_csv, text_lines
from clipmill.manifests.divided_videos import is_in_splits
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.store import read_captions, read_videos

ACTION = "action"
_PREFIX = "label_"
_NUM_SHOWN = 5  # maximum number of class names in a message
_VERB, _NOUN = "label_verb", "label_noun"
_PAIR = re.compile(r"-?\d+:-?\d+")


@dataclass(frozen=True)
class ClassList:
    """Classes of a label, in the order of their class numbers.

    Attributes:
        label: Name of the label, as in the settings.
        names: Names of the classes; "verb:noun" for actions.
    """

    label: str
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def parts(self) -> dict[str, NDArray[np.int64]]:
        """Verb class and noun class of each action; {} for other labels, or if a name is not "verb:noun"."""
        if self.label != ACTION or not all(map(_PAIR.fullmatch, self.names)):
            return {}
        pairs = np.array([name.split(":") for name in self.names], np.int64).reshape(-1, 2)
        return {"verb": pairs[:, 0], "noun": pairs[:, 1]}

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict for a settings file."""
        return {"label": self.label, "names": list(self.names)}

    def describe(self, label: NDArray[np.int64]) -> str:
        """Return a remark on how many of the classes occur in `label`, the class numbers of samples (-1 for none)."""
        return f"{len(np.unique(label[label >= 0])):,} of {count_noun(len(self), 'class', 'classes')} ({self.label})"


def read_classes(*data_dirs: Path, label: str, splits: Collection[str], more_names: Collection[str] = ()) -> ClassList:
    """Return all classes of a label in these splits of one or more data folders.

    Args:
        more_names: Additional class names from other data.

    Raises:
        UserError: The captions of a folder lack the label, or there are fewer than two classes.
    """
    class_names = set(more_names)
    for data_dir in data_dirs:
        captions, videos = read_captions(data_dir), read_videos(data_dir)
        is_selected = pa.array(is_in_splits(captions, videos, splits))
        source = f" of {data_dir}" if len(data_dirs) > 1 else ""
        names = class_names_of(captions, label=label, source=source).filter(is_selected)
        class_names.update(pc.unique(names.drop_null()).to_pylist())
    if len(class_names) < 2:
        values = f"only the value {min(class_names)!r}" if class_names else "no value"
        raise UserError(
            f"the data of split {' and '.join(sorted(set(splits)))} have {values} of {label!r}, and a classifier needs "
            "at least two",
            hint="use a dataset with labels (docs/classification.md), or a different --label",
            flags=("--label",),
        )
    are_numbers = all(name.removeprefix("-").isdecimal() for name in class_names)
    return ClassList(label, tuple(sorted(class_names, key=int) if are_numbers else sorted(class_names)))


def class_labels(schema: pa.Schema) -> tuple[str, ...]:
    """Return the labels that can be used as classes: labels that are not lists, and `action` for verbs and nouns."""
    columns = [field.name for field in schema if field.name.startswith(_PREFIX) and not pa.types.is_nested(field.type)]
    action = [ACTION] if _has_pairs(schema) else []
    return (*(name.removeprefix(_PREFIX) for name in columns), *action)


def _has_pairs(schema: pa.Schema) -> bool:
    """Return True if actions are pairs: captions have class numbers of verbs and nouns, but no label `action`."""
    are_numbers = all(name in schema.names and pa.types.is_integer(schema.field(name).type) for name in (_VERB, _NOUN))
    return are_numbers and f"{_PREFIX}{ACTION}" not in schema.names


def proposed_label(labels: Sequence[str]) -> str:
    """Return the label to propose: `action` if possible, because verbs and nouns are then scored too."""
    return ACTION if ACTION in labels else labels[0]


def label_hint(labels: Sequence[str]) -> str:
    """Return a hint that lists the available labels and proposes one of them."""
    if not labels:
        return "use a dataset with labels (docs/classification.md), because these captions have none"
    return f"use an available label: {', '.join(labels)}; for example --label {proposed_label(labels)}"


def class_names_of(captions: pa.Table, *, label: str, source: str = "") -> pa.ChunkedArray:
    """Return the name of each caption's class; null for captions without a class.

    Args:
        source: Suffix that identifies the captions in the error message, such as " of FOLDER".

    Raises:
        UserError: The label does not exist, or a caption may have several values for the label.
    """
    is_pair = label == ACTION and _has_pairs(captions.schema)
    columns = (_VERB, _NOUN) if is_pair else (f"{_PREFIX}{label}",)
    for name in columns:
        if name not in captions.column_names:
            raise UserError(
                f"the captions{source} have no column {name}, which label {label!r} needs",
                hint=label_hint(class_labels(captions.schema)),
                flags=("--label",),
            )
        if pa.types.is_nested(captions[name].type):
            raise UserError(
                f"a caption can have several values of {label!r}, so they cannot be classes",
                hint=label_hint(class_labels(captions.schema)),
            )
    texts = [captions[name].cast(pa.string()) for name in columns]
    return pc.binary_join_element_wise(*texts, ":") if is_pair else texts[0]


def class_numbers_of(names: pa.ChunkedArray, classes: ClassList) -> NDArray[np.int64]:
    """Return the class number of each name, int64; -1 for null and for unknown names."""
    numbers = pc.index_in(names, value_set=pa.array(classes.names))
    return pc.fill_null(numbers, -1).to_numpy().astype(np.int64)


@dataclass(frozen=True)
class LabelledRows:
    """Captions of a split whose class is in at least one class list.

    Attributes:
        row: Rows of the captions in the table, ascending, int64 [R].
        label: Class number in each class list, int64 [R, L]; -1 if the list does not contain the caption's class.
        num_captions: Number of captions of the split, with or without labels.
        num_unlabelled: Number of captions without any of the labels.
        num_other_classes: Number of captions that have a label, but whose classes are not in the lists.
        other_classes: Suffix for a remark. If no caption has a class in the lists, the suffix contains some class
            names; otherwise the suffix is empty.
    """

    row: NDArray[np.int64]
    label: NDArray[np.int64]
    num_captions: int
    num_unlabelled: int
    num_other_classes: int
    other_classes: str = ""

    def remarks(self) -> list[str]:
        """Return remarks on omitted captions, by reason."""
        counts = {
            f"{self.num_unlabelled:,} without label": self.num_unlabelled,
            f"{self.num_other_classes:,} of other classes{self.other_classes}": self.num_other_classes,
        }
        return [text for text, count in counts.items() if count]


def labelled_rows(captions: pa.Table, *, is_of_split: NDArray[np.bool_], classes: Sequence[ClassList]) -> LabelledRows:
    """Return the labelled captions of a split, with their class numbers.

    Args:
        is_of_split: Mask of the captions that belong to the split.

    Raises:
        UserError: The captions lack a label, or a caption can have several values for the label.
    """
    rows = np.flatnonzero(is_of_split)
    label_RL = np.empty((len(rows), len(classes)), np.int64)
    has_label = np.zeros(len(rows), bool)
    for column, class_list in enumerate(classes):
        names = class_names_of(captions, label=class_list.label).take(pa.array(rows))
        label_RL[:, column] = class_numbers_of(names, class_list)
        has_label |= names.is_valid().to_numpy()
    is_kept = (label_RL >= 0).any(axis=1)
    other_classes = ""
    if has_label.any() and not is_kept.any():
        other_names = class_names_of(captions, label=classes[-1].label).take(pa.array(rows)).drop_null().unique()
        other_classes = (
            f" ({_first_names(other_names.to_pylist())}; classes of the model: {_first_names(classes[-1].names)})"
        )
    return LabelledRows(
        row=rows[is_kept],
        label=label_RL[is_kept],
        num_captions=len(rows),
        num_unlabelled=int((~has_label).sum()),
        num_other_classes=int((has_label & ~is_kept).sum()),
        other_classes=other_classes,
    )


def _first_names(names: Sequence[str]) -> str:
    text = ", ".join(map(on_one_line, names[:_NUM_SHOWN]))
    return f"{text}, ..." if len(names) > _NUM_SHOWN else text


Names = tuple[tuple[str, ...], ...]
_TABLE, _UNUSED = ("id", "key"), ("instances", "category")
_FORMAT_HINT = "use the published EPIC_100_verb_classes.csv (id,key,instances,category), or one class name per line"
# A first line of several single words is a header and not a class name, if one of the words is in this set.
_HEADER_WORDS = frozenset({"id", "key", "name", "label", "class", "category", "index", "class_id", "class_name"})
_WORD = re.compile(r"\w+")


def read_class_file(path: Path) -> Names:
    """Read the names of each class from a file with one class per line. A class may have several names.

    Raises:
        UserError: The file cannot be read, contains no class names, is a table with other columns, has a line without a
            name, or contains a duplicate name.
    """
    lines = [line.strip() for line in text_lines(path) if line.strip()]
    header = header_cells(lines[0]) if lines else []
    words = [cell.strip().lower() for cell in header]
    is_header = len(words) > 1 and all(map(_WORD.fullmatch, words)) and not _HEADER_WORDS.isdisjoint(words)
    if set(_TABLE) <= set(header) <= {*_TABLE, *_UNUSED}:
        classes = _names_of_table(path)
    elif lines and (path.suffix.lower() == ".csv" or is_header):
        first_line = on_one_line(lines[0])
        raise UserError(f"{path} is not a list of classes: it begins with the line {first_line!r}", hint=_FORMAT_HINT)
    else:
        classes = tuple(tuple(name.strip() for name in line.split("|") if name.strip()) for line in lines)
    names = [name for names_of_class in classes for name in names_of_class]
    if not classes:
        raise UserError(f"{path} contains no class names", hint=_FORMAT_HINT)
    if not all(classes):
        raise UserError(
            f"{path} has a line without a name", hint="write one class per line, with | between several names"
        )
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path} contains {repeated!r} twice", hint="use each name for only one class")
    return classes


def require_names(classes: NDArray[np.integer], names: Sequence[object], *, path: Path, label: str) -> None:
    """Raise a UserError if a class number has no name, because a file is incomplete or belongs to another label.

    Args:
        classes: Class numbers of the label.
        names: Names from the file at `path`, in the order of class numbers.
    """
    largest = int(classes.max(initial=-1))
    if largest >= len(names):
        raise UserError(
            f"{path} names {count_noun(len(names), 'class', 'classes')}, numbered from 0, but the captions "
            f"have {label} {largest}",
            hint="use a file with all classes of this label, in the order of their class numbers",
        )


def _names_of_table(path: Path) -> Names:
    key_of: dict[int, str] = {}
    for row in read_csv(path, required=_TABLE):
        number = row.values.get("id", "").strip()
        if row.fault is not None or not re.fullmatch(r"\d{1,9}", number) or int(number) in key_of:
            fault = row.fault or f"id is {number!r}, not a unique number"
            raise UserError(f"{path}, row {row.number}: {fault}", hint="use the published file")
        key_of[int(number)] = row.values["key"].strip()
    missing_id = next((number for number in range(len(key_of)) if number not in key_of), None)
    if missing_id is not None:
        raise UserError(
            f"{path} has {count_noun(len(key_of), 'row')}, but none with id {missing_id}",
            hint="use the published file",
        )
    return tuple((key_of[number],) if key_of[number] else () for number in range(len(key_of)))
