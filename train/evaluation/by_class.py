"""Results by class: how many clips of each class are recognised, which are taken for which, and the majority baseline.

The majority baseline always predicts the classes that are most frequent among the evaluated clips, which is the best
that a model can do without looking at them.

Shape suffixes: N clips, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_TOP = 5
_NUM_IN_MATRIX = 12
_NUM_PAIRS = 15


@dataclass(frozen=True)
class Predictions:
    """Predictions of clips, all [N] on one device.

    Attributes:
        label_N, predicted_N: int64, the class of each clip and the predicted one.
        is_among_N: bool, whether its class is among the first five.
    """

    label_N: torch.Tensor
    predicted_N: torch.Tensor
    is_among_N: torch.Tensor

    @staticmethod
    def of(scores_NK: torch.Tensor, label_N: torch.Tensor, *, rank_N: torch.Tensor) -> Predictions:
        """Predictions from scores of classes and the rank (1 is best) of each clip's class.

        A clip whose class is not first is predicted to be the best of the other classes, also where scores are tied.
        """
        best_other_N = scores_NK.scatter(1, label_N[:, None], float("-inf")).argmax(dim=1)
        return Predictions(label_N, label_N.where(rank_N == 1, best_other_N), rank_N <= _TOP)

    @staticmethod
    def joined(parts: Sequence[Predictions]) -> Predictions:
        """The clips of several parts, of which there is at least one."""
        import torch

        names = ("label_N", "predicted_N", "is_among_N")
        return Predictions(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def by_class(self, names: Sequence[str], *, title: str) -> dict[str, Any]:
        """Plain values for a result file, of the classes that occur.

        Args:
            names: of all classes.
            title: what the classes are.

        Returns:
            `names` of the classes that clips have or that are predicted; `num`, `num_first` and `num_among`: clips of
            each, those that are recognised, and those whose class is among the first five; `confused`: rows
            [class, predicted class, number of clips], indices into `names`, the most frequent first.
        """
        label_N, predicted_N = self.label_N.cpu().numpy(), self.predicted_N.cpu().numpy()
        there = np.unique(np.concatenate([label_N, predicted_N]))
        label_N, predicted_N = np.searchsorted(there, label_N), np.searchsorted(there, predicted_N)
        is_right_N, is_among_N = label_N == predicted_N, self.is_among_N.cpu().numpy()

        def counts(of_N: NDArray[np.int64]) -> list[int]:
            return [int(count) for count in np.bincount(of_N, minlength=len(there))]

        pairs, num_of_pair = np.unique(
            np.stack([label_N[~is_right_N], predicted_N[~is_right_N]]), axis=1, return_counts=True
        )
        order = np.argsort(-num_of_pair, kind="stable")
        return {
            "title": title,
            "names": [names[index] for index in there.tolist()],
            "num": counts(label_N),
            "num_first": counts(label_N[is_right_N]),
            "num_among": counts(label_N[is_among_N]),
            "confused": np.concatenate([pairs, num_of_pair[None]])[:, order].T.tolist(),
        }


BASELINE_KEYS = ("top1", "top5", "mean_class")


def majority_baseline(by_class: Mapping[str, Any]) -> dict[str, float]:
    """Top-1, top-5 and mean class accuracy of always predicting the most frequent classes of the evaluated clips."""
    num = sorted(by_class["num"], reverse=True)
    total, num_seen = sum(num), sum(count > 0 for count in num)
    return dict(zip(BASELINE_KEYS, (num[0] / total, sum(num[:_TOP]) / total, 1 / num_seen), strict=True))


def class_view(by_class: Mapping[str, Any]) -> dict[str, Any]:
    """What the section of a page shows of `Predictions.by_class`, the most frequent classes first.

    Returns:
        `rows` of all classes with clips; `matrix`, the rows of the confusion matrix of the 12 most frequent classes,
        each with its cells and the clips that are taken for yet other classes; `pairs`, the most confused, empty if
        the matrix has all classes.
    """
    names, num = by_class["names"], by_class["num"]
    taken: dict[int, list[tuple[int, int]]] = {}
    for label, predicted, count in by_class["confused"]:
        taken.setdefault(label, []).append((predicted, count))
    order = sorted((index for index in range(len(names)) if num[index]), key=lambda index: -num[index])
    rows = [
        {
            "name": names[index],
            "num": num[index],
            "first": by_class["num_first"][index] / num[index],
            "among": by_class["num_among"][index] / num[index],
            "taken_for": names[taken[index][0][0]] if index in taken else "",
            "num_taken": taken[index][0][1] if index in taken else 0,
        }
        for index in order
    ]
    shown = order[:_NUM_IN_MATRIX]
    matrix = []
    for index in shown:
        counts = {**dict(taken.get(index, [])), index: by_class["num_first"][index]}
        its = [counts.get(other, 0) for other in shown]
        cells = [
            {"count": count, "share": count / num[index], "is_own": at == index}
            for at, count in zip(shown, its, strict=True)
        ]
        matrix.append({"name": names[index], "cells": cells, "others": num[index] - sum(its)})
    pairs = [
        {"name": names[label], "taken_for": names[predicted], "count": count, "share": count / num[label]}
        for label, predicted, count in by_class["confused"][:_NUM_PAIRS]
    ]
    is_whole = len(shown) == len(order) and not any(row["others"] for row in matrix)
    return {
        "title": by_class["title"],
        "rows": rows,
        "has_among": len(names) > _TOP,
        "matrix": matrix,
        "has_others": not is_whole,
        "pairs": [] if is_whole else pairs,
        "num_shown": len(shown),
    }
