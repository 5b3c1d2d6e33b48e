"""Multi-instance retrieval compared with a naive implementation of the definition, query by query."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.train.data.relevancy import Relevancy, compress_matrix
from clipmill.train.tasks.dual_encoder.metrics import average_precision, chance_ap, chance_ndcg, ndcg, score_mir

FEW = np.array([0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0])


def naive_ap(ranked: list[float]) -> float:
    precisions = [sum(ranked[:k]) / k for k in range(1, len(ranked) + 1) if ranked[k - 1] == 1]
    return sum(precisions) / len(precisions) if precisions else math.nan


def naive_ndcg(ranked: list[float]) -> float:
    cut = sum(value > 0 for value in ranked)
    if not cut:
        return math.nan

    def dcg(values: list[float]) -> float:
        return sum(value / math.log2(rank + 1) for rank, value in enumerate(values[:cut], start=1))

    return dcg(ranked) / dcg(sorted(ranked, reverse=True))


def naive(similarity: NDArray[np.float64], relevancy: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean AP and mean nDCG over the rows that have a value."""
    aps, gains = [], []
    for scores, degrees in zip(similarity.tolist(), relevancy.tolist(), strict=True):
        ranked = [degree for _, degree in sorted(zip(scores, degrees, strict=True), key=lambda pair: -pair[0])]
        aps.append(naive_ap(ranked))
        gains.append(naive_ndcg(ranked))
    return float(np.nanmean(aps)), float(np.nanmean(gains))


def table(rng: np.random.Generator, *shape: int) -> tuple[NDArray[np.float64], Relevancy]:
    relevancy = rng.choice(FEW, shape)
    relevancy[0], relevancy[:, 1] = 0, 0  # queries without a relevant item
    relevancy[2] = np.minimum(relevancy[2], 0.75)  # and a query without a fully relevant item
    return relevancy, compress_matrix(relevancy)


def test_the_ranking_of_the_definition() -> None:
    assert average_precision(np.array([[0.5, 1.0, 0.0, 1.0]])).tolist() == [0.6875]
    assert average_precision(np.array([[1.0, 0.0, 1.0, 0.0]])).tolist() == [(1 + 2 / 3) / 2]
    # With two relevant items, the gain counts up to rank 2, so the relevancy at rank 3 is lost.
    expected = 0.5 / (1 + 0.5 / math.log2(3))
    assert ndcg(np.array([[0.5, 0.0, 1.0]]))[0] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("shape", [(9, 7), (40, 70), (70, 40)])
def test_scores_are_those_of_the_naive_implementation(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    relevancy, small = table(rng, *shape)
    similarity = rng.permutation(math.prod(shape)).reshape(shape).astype(np.float64)  # without ties
    scores = score_mir(similarity, small)
    for direction, expected in (
        (scores.video_to_text, naive(similarity, relevancy)),
        (scores.text_to_video, naive(similarity.T, relevancy.T)),
    ):
        assert (direction.mean_ap, direction.ndcg) == pytest.approx(expected, abs=1e-12)
    assert scores.mean_ap is not None and scores.video_to_text.mean_ap is not None
    assert scores.text_to_video.mean_ap is not None
    assert scores.mean_ap == (scores.video_to_text.mean_ap + scores.text_to_video.mean_ap) / 2


def test_queries_without_relevancy_are_left_out_and_counted() -> None:
    rng = np.random.default_rng(1)
    relevancy, small = table(rng, 12, 10)
    scores = score_mir(rng.normal(size=(12, 10)), small)
    assert scores.video_to_text.num_without_ap == int((~(relevancy == 1).any(axis=1)).sum()) >= 2
    assert scores.video_to_text.num_without_ndcg == 1 and scores.text_to_video.num_without_ndcg == 1
    nothing = score_mir(rng.normal(size=(2, 3)), compress_matrix(np.full((2, 3), 0.5)))
    assert nothing.mean_ap is None and nothing.ndcg is not None
    assert nothing.video_to_text.num_without_ap == 2 and nothing.as_json()["average"]["mean_ap"] is None


def test_ties_count_against_the_model_whatever_the_order_of_the_items() -> None:
    relevancy = np.array([[1.0, 0.0, 0.5]])
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        scores = score_mir(np.zeros((1, 3)), compress_matrix(relevancy[:, order]))
        assert scores.video_to_text.mean_ap == 1.5 / 3


def test_chance_is_what_random_rankings_reach() -> None:
    rng = np.random.default_rng(2)
    relevancy = rng.choice(FEW, (3, 12))
    relevancy[:, 0] = 1
    ranked = rng.permuted(np.tile(relevancy, (20_000, 1, 1)), axis=2)
    for query in range(3):
        assert average_precision(ranked[:, query]).mean() == pytest.approx(chance_ap(relevancy)[query], abs=0.005)
        assert ndcg(ranked[:, query]).mean() == pytest.approx(chance_ndcg(relevancy)[query], abs=0.005)


def test_large_tables_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    _, small = table(rng, 30, 20)
    similarity = rng.normal(size=(30, 20))
    whole = score_mir(similarity, small)
    monkeypatch.setattr("clipmill.train.tasks.dual_encoder.metrics._BLOCK_VALUES", 64)
    assert score_mir(similarity, small) == whole


def test_a_relevancy_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        score_mir(np.zeros((2, 3)), compress_matrix(np.ones((3, 2))))
