"""The vote of the nearest neighbours compared with loops in float64."""

import math

import pytest
import torch

from clipmill.train.evaluation import probe_classifiers as neighbours
from clipmill.train.evaluation.probe_classifiers import find_nearest, vote


def draw_rows(num: int, width: int, *, seed: int) -> torch.Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed))


def naive_votes(
    features: torch.Tensor, bank: torch.Tensor, label: torch.Tensor, *, num_classes: int, count: int, temperature: float
) -> list[list[float]]:
    """Compute the votes exactly as Wu et al. 2018, section 3.4, define them."""
    rows = []
    for row in features.double().tolist():
        cosines = []
        for other in bank.double().tolist():
            product = sum(a * b for a, b in zip(row, other, strict=True))
            cosines.append(product / math.hypot(*row) / math.hypot(*other))
        votes = [0.0] * num_classes
        for place in sorted(range(len(cosines)), key=lambda place: (-cosines[place], place))[:count]:
            votes[int(label[place])] += math.exp(cosines[place] / temperature)
        rows.append(votes)
    return rows


@pytest.mark.parametrize("at_once", [(3, 7), (512, 16_384)])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_votes_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, at_once: tuple[int, int], temperature: float
) -> None:
    """Votes do not depend on the block size. One block of the bank is smaller than k."""
    monkeypatch.setattr(neighbours, "_QUERY_BLOCK", at_once[0])
    monkeypatch.setattr(neighbours, "_BANK_BLOCK", at_once[1])
    features, bank = draw_rows(11, 5, seed=0), draw_rows(40, 5, seed=1)
    label = torch.arange(40) % 4
    result = vote(features, bank, label, num_classes=6, neighbours=9, temperature=temperature)
    expected = torch.tensor(
        naive_votes(features, bank, label, num_classes=6, count=9, temperature=temperature), dtype=torch.float64
    )
    # Votes are determined up to a factor for each clip.
    share, expected_share = (votes / votes.sum(dim=1, keepdim=True) for votes in (result, expected))
    assert torch.allclose(share, expected_share, rtol=1e-4, atol=1e-7)
    assert (result[:, 4:] == 0).all()


def test_equal_neighbours_are_taken_in_the_order_of_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_BANK_BLOCK", 4)
    bank = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(5, 1)
    for count, expected in ((3, [1, 3, 5]), (7, [0, 1, 2, 3, 5, 7, 9])):
        _, place = find_nearest(torch.tensor([[2.0, 0.0]]), bank, neighbours=count)
        assert place.tolist() == [expected]


def test_a_bank_that_is_smaller_than_k_votes_as_a_whole() -> None:
    cosine, place = find_nearest(draw_rows(2, 3, seed=0), draw_rows(4, 3, seed=1), neighbours=20)
    assert place.tolist() == [[0, 1, 2, 3]] * 2 and cosine.shape == (2, 4)


def test_cold_votes_do_not_overflow_and_features_of_nothing_have_a_vote() -> None:
    features = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    votes = vote(features, features, torch.tensor([0, 1]), num_classes=2, neighbours=1, temperature=1e-3)
    assert votes.isfinite().all() and votes[0].tolist() == [1.0, 0.0]
