"""Which classes there are, and which of them a clip has: from the label columns of the captions.

Classes are those of the captions of the training and of the evaluation split together, whether their videos could be
had or not as long as the manifest names them. An action of EPIC-KITCHENS-100 is a string "verb:noun" of two class
numbers, and actions are in the order of these strings: "0:10" comes before "0:2". Other classes are in the order of
numbers where all are numbers, else in that of strings.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.store import read_captions, read_videos

ACTION = "action"
_PREFIX = "label_"
_VERB, _NOUN = "label_verb", "label_noun"


@dataclass(frozen=True)
class ClassList:
    """The classes, in their order.

    Attributes:
        label: as in the settings.
        names: of each class; of an action "verb:noun".
    """

    label: str
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def parts(self) -> dict[str, NDArray[np.int64]]:
        """The verb and the noun of each action; nothing for other labels."""
        if self.label != ACTION:
            return {}
        pairs = np.array([name.split(":") for name in self.names], np.int64).reshape(-1, 2)
        return {"verb": pairs[:, 0], "noun": pairs[:, 1]}

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"label": self.label, "names": list(self.names)}


def read_classes(data_dir: Path, *, label: str, splits: Collection[str]) -> ClassList:
    """The classes of some splits.

    Raises:
        UserError: captions have no such label, or there are fewer than two classes.
    """
    captions = read_captions(data_dir)
    videos = read_videos(data_dir)
    own = videos.filter(pc.is_in(videos["split"], value_set=pa.array(list(splits))))["video_id"].combine_chunks()
    names = names_of(captions, label=label).filter(pc.is_in(captions["video_id"].cast(pa.string()), value_set=own))
    there = pc.unique(names.drop_null()).to_pylist()
    if len(there) < 2:
        raise UserError(
            f"captions of {' and '.join(sorted(set(splits)))} have {len(there)} different values of {label!r}: "
            "there is nothing to tell apart",
            hint="use a data set with labels (see train/classify), or another --label",
        )
    return ClassList(label, tuple(_in_order(there)))


def label_names(captions: pa.Table) -> list[str]:
    """The labels that captions have."""
    return [one.removeprefix(_PREFIX) for one in captions.column_names if one.startswith(_PREFIX)]


def names_of(captions: pa.Table, *, label: str) -> pa.ChunkedArray:
    """The name of each caption's class, null where it has none.

    Raises:
        UserError: there is no such label, or a caption can have several of it.
    """
    wanted = (_VERB, _NOUN) if label == ACTION else (f"{_PREFIX}{label}",)
    for name in wanted:
        if name not in captions.column_names:
            there = label_names(captions)
            raise UserError(
                f"the captions have no column {name} (asked for as label {label!r})",
                hint=f"labels there: {', '.join(there) or 'none'}",
            )
        if pa.types.is_nested(captions[name].type):
            raise UserError(f"a caption has several {label}: they are no class", hint="use another --label")
    texts = [captions[name].cast(pa.string()) for name in wanted]
    return pc.binary_join_element_wise(*texts, ":") if label == ACTION else texts[0]


def numbers_of(names: pa.ChunkedArray, classes: ClassList) -> NDArray[np.int64]:
    """The class of each name, int64; -1 where it is null or none of the classes."""
    found = pc.index_in(names, value_set=pa.array(classes.names))
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)


def _in_order(names: list[str]) -> list[str]:
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)
