"""Classes of clips, from the label columns of the captions.

The classes are those of all captions of the training and the evaluation split, whether or not their videos could be
obtained. An action of EPIC-KITCHENS-100 is a string "verb:noun" of two class numbers, and actions are sorted as
strings: "0:10" comes before "0:2". Other classes are sorted as numbers if all are numbers, otherwise as strings.

Suffixes: R rows of the captions, L labels.
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

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.store import read_captions, read_videos

ACTION = "action"
_PREFIX = "label_"
_NUM_SHOWN = 5  # classes in a message
_VERB, _NOUN = "label_verb", "label_noun"
_PAIR = re.compile(r"-?\d+:-?\d+")


@dataclass(frozen=True)
class ClassList:
    """The classes of a label, in order.

    Attributes:
        label: name of the label, as in the settings.
        names: of each class; of an action "verb:noun".
    """

    label: str
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def parts(self) -> dict[str, NDArray[np.int64]]:
        """The verb and the noun of each action; empty for other labels, and for actions with names of their own."""
        if self.label != ACTION or not all(map(_PAIR.fullmatch, self.names)):
            return {}
        pairs = np.array([name.split(":") for name in self.names], np.int64).reshape(-1, 2)
        return {"verb": pairs[:, 0], "noun": pairs[:, 1]}

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"label": self.label, "names": list(self.names)}

    def describe(self, label: NDArray[np.int64]) -> str:
        """How many of the classes occur among samples of these classes (-1: none)."""
        return f"{len(np.unique(label[label >= 0])):,} of {count_noun(len(self), 'class', 'classes')} ({self.label})"


def read_classes(*data_dirs: Path, label: str, splits: Collection[str], also: Collection[str] = ()) -> ClassList:
    """The classes of some splits: of several data folders, those of all, by their names.

    Args:
        also: names of classes of other data.

    Raises:
        UserError: captions of a folder have no such label, or there are fewer than two classes.
    """
    found = set(also)
    for data_dir in data_dirs:
        captions, videos = read_captions(data_dir), read_videos(data_dir)
        own = videos.filter(pc.is_in(videos["split"], value_set=pa.array(list(splits))))["video_id"].combine_chunks()
        is_own = pc.is_in(captions["video_id"].cast(pa.string()), value_set=own)
        of = f" of {data_dir}" if len(data_dirs) > 1 else ""
        names = class_names_of(captions, label=label, of=of).filter(is_own)
        found.update(pc.unique(names.drop_null()).to_pylist())
    if len(found) < 2:
        values = f"only the value {min(found)!r}" if found else "no value"
        raise UserError(
            f"the data of split {' and '.join(sorted(set(splits)))} have {values} of {label!r}: nothing to tell apart",
            hint="use a dataset with labels (see docs/classification.md), or another --label",
            flags=("--label",),
        )
    are_numbers = all(name.removeprefix("-").isdecimal() for name in found)
    return ClassList(label, tuple(sorted(found, key=int) if are_numbers else sorted(found)))


def class_labels(schema: pa.Schema) -> tuple[str, ...]:
    """The labels of captions that can be classes: not lists; `action` too where there are verbs and nouns."""
    found = [one.name for one in schema if one.name.startswith(_PREFIX) and not pa.types.is_nested(one.type)]
    action = [ACTION] if _has_pairs(schema) else []
    return (*(name.removeprefix(_PREFIX) for name in found), *action)


def _has_pairs(schema: pa.Schema) -> bool:
    """Return True if captions have the class numbers of verbs and nouns, as those of EPIC-KITCHENS-100 have, and no
    label `action` of their own.
    """
    are_numbers = all(name in schema.names and pa.types.is_integer(schema.field(name).type) for name in (_VERB, _NOUN))
    return are_numbers and f"{_PREFIX}{ACTION}" not in schema.names


def proposed_label(labels: Sequence[str]) -> str:
    """The label to propose: actions, whose verbs and nouns are scored too, or else the first one."""
    return ACTION if ACTION in labels else labels[0]


def list_labels(labels: Sequence[str]) -> str:
    """Labels and a proposal, for hints."""
    if not labels:
        return "none; see docs/classification.md for datasets with labels"
    return f"{', '.join(labels)}; for example --label {proposed_label(labels)}"


def class_names_of(captions: pa.Table, *, label: str, of: str = "") -> pa.ChunkedArray:
    """The name of each caption's class, null if it has none.

    Args:
        of: whose captions these are, for the message.

    Raises:
        UserError: there is no such label, or a caption can have several values of it.
    """
    is_pair = label == ACTION and _has_pairs(captions.schema)
    wanted = (_VERB, _NOUN) if is_pair else (f"{_PREFIX}{label}",)
    for name in wanted:
        if name not in captions.column_names:
            raise UserError(
                f"the captions{of} have no column {name} (asked for as label {label!r})",
                hint=f"labels there: {list_labels(class_labels(captions.schema))}",
                flags=("--label",),
            )
        if pa.types.is_nested(captions[name].type):
            raise UserError(
                f"captions can have several {label}, which cannot be a class",
                hint=f"labels there: {list_labels(class_labels(captions.schema))}",
            )
    texts = [captions[name].cast(pa.string()) for name in wanted]
    return pc.binary_join_element_wise(*texts, ":") if is_pair else texts[0]


def class_numbers_of(names: pa.ChunkedArray, classes: ClassList) -> NDArray[np.int64]:
    """The class of each name, int64; -1 if it is null or none of the classes."""
    found = pc.index_in(names, value_set=pa.array(classes.names))
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)


@dataclass(frozen=True)
class LabelledRows:
    """The captions of a split that have at least one of some labels.

    Attributes:
        row: int64 [R], row of each in the table of captions, ascending.
        label: int64 [R, L], the class in each class list; -1 if it has none of them.
        num_captions: captions of the split, with or without labels.
        num_unlabelled: captions with none of the labels.
        num_other_classes: captions with labels, but with none of the classes.
        other_classes: some names of these, and of the classes, if no caption has one of the classes; '' otherwise.
    """

    row: NDArray[np.int64]
    label: NDArray[np.int64]
    num_captions: int
    num_unlabelled: int
    num_other_classes: int
    other_classes: str = ""

    def remarks(self) -> list[str]:
        """Excluded captions, by reason."""
        counts = {
            f"{self.num_unlabelled:,} without label": self.num_unlabelled,
            f"{self.num_other_classes:,} of other classes{self.other_classes}": self.num_other_classes,
        }
        return [text for text, count in counts.items() if count]


def labelled_rows(captions: pa.Table, *, is_of_split: NDArray[np.bool_], classes: Sequence[ClassList]) -> LabelledRows:
    """Find the labelled captions of a split and number their classes.

    Raises:
        UserError: the captions have no such label, or can have several values of it.
    """
    of_split = np.flatnonzero(is_of_split)
    label_RL = np.empty((len(of_split), len(classes)), np.int64)
    has_any = np.zeros(len(of_split), bool)
    for column, its in enumerate(classes):
        names = class_names_of(captions, label=its.label).take(pa.array(of_split))
        label_RL[:, column] = class_numbers_of(names, its)
        has_any |= names.is_valid().to_numpy()
    is_kept = (label_RL >= 0).any(axis=1)
    other_classes = ""
    if has_any.any() and not is_kept.any():
        here = class_names_of(captions, label=classes[-1].label).take(pa.array(of_split)).drop_null().unique()
        other_classes = f" ({_some_names(here.to_pylist())}; those of the model: {_some_names(classes[-1].names)})"
    return LabelledRows(
        row=of_split[is_kept],
        label=label_RL[is_kept],
        num_captions=len(of_split),
        num_unlabelled=int((~has_any).sum()),
        num_other_classes=int((has_any & ~is_kept).sum()),
        other_classes=other_classes,
    )


def _some_names(names: Sequence[str]) -> str:
    shown = ", ".join(map(on_one_line, names[:_NUM_SHOWN]))
    return f"{shown}, ..." if len(names) > _NUM_SHOWN else shown
