"""Probe labelled features: train each method on the bank, and score the queries.

Shape suffixes: N queries (clips that are scored), M clips of the bank, D width, L labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.evaluation import Method, ProbeEvaluation
from clipmill.train.data.classes import ClassList
from clipmill.train.evaluation.by_class import Predictions
from clipmill.train.evaluation.probe.classifiers import (
    Accuracy,
    accuracy,
    choose_l2,
    class_ranks,
    fit_linear,
    vote,
)


@dataclass(frozen=True)
class LabelledFeatures:
    """Features of one tower with the labels of their clips.

    Attributes:
        features_ND: float32.
        label_NL: int64, on the device of the features; -1 for no label.
        video_N: int64, index of the clip's video.
    """

    features_ND: torch.Tensor
    label_NL: torch.Tensor
    video_N: NDArray[np.int64]

    def of_label(self, index: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
        """Features, labels and videos of the clips that have the label."""
        has_label = self.label_NL[:, index] >= 0
        return self.features_ND[has_label], self.label_NL[has_label, index], self.video_N[has_label.cpu().numpy()]


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy of one method on one label; the fields are keys of result files.

    Attributes:
        found: accuracy of the probe.
        num_samples: number of queries.
        num_bank: number of labelled clips in the bank.
        num_classes: of both splits together.
        num_unseen: number of queries whose class does not occur in the bank; they always count as wrong.
        num_unseen_classes: number of these classes.
        predictions: of the queries; not a key of result files.
        l2, gradient: of the linear layer (clipmill.train.evaluation.probe.classifiers).
    """

    label: str
    method: Method
    found: Accuracy
    num_samples: int
    num_bank: int
    num_classes: int
    num_unseen: int
    num_unseen_classes: int
    predictions: Predictions
    l2: float | None = None
    gradient: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "predictions"}
        return {**plain, "found": self.found.as_json()}


def probe(
    queries: LabelledFeatures, bank: LabelledFeatures, *, wanted: ProbeEvaluation, classes: Sequence[ClassList]
) -> list[ProbeResult]:
    """Score one tower by every method on every label.

    Raises:
        FailedWork: nothing could be decoded for one of the labels.
    """
    # Without autocast: neighbours differ in the third digit of their cosines.
    with torch.autocast(queries.features_ND.device.type, enabled=False):
        return [
            _probe(queries, bank, index=index, its=its, method=method, wanted=wanted)
            for index, its in enumerate(classes)
            for method in wanted.methods
        ]


def _probe(
    queries: LabelledFeatures,
    bank: LabelledFeatures,
    *,
    index: int,
    its: ClassList,
    method: Method,
    wanted: ProbeEvaluation,
) -> ProbeResult:
    features_ND, label_N, _ = queries.of_label(index)
    bank_MD, bank_label_M, bank_video_M = bank.of_label(index)
    num_there = len(bank_label_M.unique())
    if not len(label_N) or num_there < 2:
        raise FailedWork(
            f"label {its.label}: only {count_noun(len(label_N), 'clip')} to score and "
            f"{count_noun(num_there, 'training class', 'training classes')} could be decoded"
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
    return ProbeResult(
        label=its.label,
        method=method,
        found=accuracy(scores_NK, label_N),
        num_samples=len(label_N),
        num_bank=len(bank_label_M),
        num_classes=len(its),
        num_unseen=len(unseen_N),
        num_unseen_classes=len(unseen_N.unique()),
        predictions=Predictions.of(scores_NK, label_N, rank_N=class_ranks(scores_NK, label_N)),
        l2=l2,
        gradient=gradient,
    )
