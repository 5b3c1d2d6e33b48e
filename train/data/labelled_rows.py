"""Which captions have labels: rows of the manifest, and the number of the class of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from train.data.classes import ClassList, names_of, numbers_of


@dataclass(frozen=True)
class LabelledRows:
    """The captions of a split that have at least one of some labels.

    Attributes:
        row: int64 [R], place of each in the table of captions, ascending.
        label: int64 [R, L], the class by each of the class lists; -1 where it has none of them.
        num_captions: captions of the split, with labels or without.
        num_unlabelled: those that have none of the labels.
        num_strange: those that have labels, but of none of the classes.
    """

    row: NDArray[np.int64]
    label: NDArray[np.int64]
    num_captions: int
    num_unlabelled: int
    num_strange: int

    def remarks(self) -> list[str]:
        """What is left out, with numbers."""
        counts = {
            f"{self.num_unlabelled:,} without label": self.num_unlabelled,
            f"{self.num_strange:,} of other classes": self.num_strange,
        }
        return [text for text, count in counts.items() if count]


def labelled_rows(captions: pa.Table, *, is_of_split: NDArray[np.bool_], classes: Sequence[ClassList]) -> LabelledRows:
    """Numbers the labels of a split's captions.

    Raises:
        UserError: the captions have no such label, or can have several of it.
    """
    of_split = np.flatnonzero(is_of_split)
    label_RL = np.empty((len(of_split), len(classes)), np.int64)
    has_any = np.zeros(len(of_split), bool)
    for place, its in enumerate(classes):
        names = names_of(captions, label=its.label).take(pa.array(of_split))
        label_RL[:, place] = numbers_of(names, its)
        has_any |= names.is_valid().to_numpy()
    is_kept = (label_RL >= 0).any(axis=1)
    return LabelledRows(
        row=of_split[is_kept],
        label=label_RL[is_kept],
        num_captions=len(of_split),
        num_unlabelled=int((~has_any).sum()),
        num_strange=int((has_any & ~is_kept).sum()),
    )
