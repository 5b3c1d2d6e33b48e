"""From features and labels to the numbers of a probe.

Shape suffixes: N clips that are scored, M clips of the bank, D width, L labels.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manifests.errors import FailedWork
from train.config.evaluation import Method, ProbeEvaluation
from train.data.classes import ClassList
from train.evaluation.probe.features import Features
from train.evaluation.probe.linear import choose_l2, fit_linear
from train.evaluation.probe.neighbours import Accuracy, accuracy, chance, vote
from train.evaluation.probe.samples import Labelled


@dataclass(frozen=True)
class Known:
    """Features of one tower for clips of which everything is known.

    Attributes:
        features_ND: float32.
        label_NL: int64, on the device of the features; -1 where a clip has none.
        video_N: int64, number of the video of each.
    """

    features_ND: torch.Tensor
    label_NL: torch.Tensor
    video_N: NDArray[np.int64]

    def of_label(self, place: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
        """Features, labels and videos of the clips that have the label."""
        has_label = self.label_NL[:, place] >= 0
        return self.features_ND[has_label], self.label_NL[has_label, place], self.video_N[has_label.cpu().numpy()]


@dataclass(frozen=True)
class Finding:
    """What one method says of one label.

    Attributes:
        found, chance: see `train.evaluation.probe.neighbours`.
        num_samples: clips that are scored.
        num_bank: labelled clips that neighbours, or the linear layer, come from.
        num_classes: of both splits together.
        num_unseen: clips that are scored whose class no clip of the bank is of: they are never right.
        num_unseen_classes: how many classes that are.
        l2, gradient: of the linear layer.
    """

    label: str
    method: Method
    found: Accuracy
    chance: Accuracy
    num_samples: int
    num_bank: int
    num_classes: int
    num_unseen: int
    num_unseen_classes: int
    l2: float | None = None
    gradient: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def known(found: Features, samples: Labelled) -> list[Known]:
    """The features of each tower, with what the manifest says of their clips."""
    rows = found.sample.cpu().numpy()
    label_NL = torch.from_numpy(samples.all_labels[rows]).to(found.sample.device)
    return [Known(features_ND, label_NL, samples.video[rows]) for features_ND in found.of_tower]


def probe(asked: Known, bank: Known, *, wanted: ProbeEvaluation, classes: Sequence[ClassList]) -> list[Finding]:
    """Scores one tower by every method on every label.

    Raises:
        FailedWork: of a label, nothing that could be decoded is left.
    """
    # Not in the precision that the model computes in: cosines that differ in the third digit decide.
    with torch.autocast(asked.features_ND.device.type, enabled=False):
        return [
            _probe(asked, bank, place=place, its=its, method=method, wanted=wanted)
            for place, its in enumerate(classes)
            for method in wanted.methods
        ]


def _probe(
    asked: Known, bank: Known, *, place: int, its: ClassList, method: Method, wanted: ProbeEvaluation
) -> Finding:
    features_ND, label_N, _ = asked.of_label(place)
    bank_MD, bank_label_M, bank_video_M = bank.of_label(place)
    num_there = len(bank_label_M.unique())
    if not len(label_N) or num_there < 2:
        raise FailedWork(
            f"of label {its.label}, {len(label_N)} clips to score and {num_there} classes to learn from could be had"
        )
    l2 = gradient = None
    if method == "knn":
        scores_NK = vote(
            features_ND,
            bank_MD,
            bank_label_M,
            num_classes=len(its),
            neighbours=wanted.neighbours,
            temperature=wanted.temperature,
        )
    else:
        l2 = choose_l2(bank_MD, bank_label_M, bank_video_M)
        layer = fit_linear(bank_MD, bank_label_M, l2=l2)
        scores_NK, gradient = layer.scores(features_ND, num_classes=len(its)), layer.gradient
    unseen_N = label_N[~torch.isin(label_N, bank_label_M)]
    return Finding(
        label=its.label,
        method=method,
        found=accuracy(scores_NK, label_N),
        chance=chance(bank_label_M, label_N, num_classes=len(its)),
        num_samples=len(label_N),
        num_bank=len(bank_label_M),
        num_classes=len(its),
        num_unseen=len(unseen_N),
        num_unseen_classes=len(unseen_N.unique()),
        l2=l2,
        gradient=gradient,
    )
