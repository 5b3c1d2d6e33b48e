"""Accuracy: which predictions count as correct."""

import pytest
import torch

from clipmill.train.evaluation.probe_classifiers import accuracy


def test_shares_are_counted_by_clip_and_by_class() -> None:
    # The correct classes have ranks 1, 2, 1 and 6 of 6.
    scores = torch.tensor(
        [[9.0, 1, 0, 0, 0, 0], [9, 5, 0, 0, 0, 0], [0, 1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6]], dtype=torch.float64
    )
    accuracies = accuracy(scores, torch.tensor([0, 1, 5, 0]))
    assert accuracies.top1 == 0.5 and accuracies.top5 == 0.75
    assert accuracies.mean_class == pytest.approx((1 / 2 + 0 + 1) / 3)  # of classes 0, 1 and 5


def test_ties_count_against_what_is_probed() -> None:
    alike = accuracy(torch.zeros(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3]))
    assert (alike.top1, alike.top5, alike.mean_class) == (0, 0, 0)
    # A class without votes ranks below all other classes, even if they have no votes either.
    none = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert accuracy(none, torch.tensor([3])).top5 == 0
