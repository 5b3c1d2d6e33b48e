"""Retrieval metrics: R@k and median rank; mAP and nDCG for multi-instance retrieval (MIR) in EPIC-KITCHENS-100.

Text-video retrieval is scored in both directions. If several clips have the same caption ("a red circle moves to the
left"), all these clips are correct. Captions with equal tokens, or equal stored embeddings, count as one text. The
plain protocol:

    text to video   query: each distinct text; gallery: all clips; correct: every clip that has this text
    video to text   query: each clip; gallery: the distinct texts; correct: the text of the clip

Named protocols define other texts and correct pairs (clipmill.train.tasks.dual_encoder.protocols).

The rank of a query is 1 + the number of incorrect items that score at least as high as its best correct item. Ties
count against the model, so constant scores get the worst ranks.

Shape suffixes: N clips, M texts, Q queries, G items in the gallery.
"""

from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.relevancy import Relevancy

RECALL_AT = (1, 5, 10)


@dataclass(frozen=True)
class RetrievalScores:
    """Scores of retrieval in one direction.

    Attributes:
        recall: Fraction of queries with a rank of at most k, for each k.
        chance: Expected recall of random rankings, for each k.
        median_rank: Median of the ranks of all queries.
        chance_median_rank: Median rank of random rankings: the smallest k whose chance recall is at least 1/2.
    """

    num_queries: int
    gallery_size: int
    recall: dict[int, float]
    chance: dict[int, float]
    median_rank: float
    chance_median_rank: float


@dataclass(frozen=True)
class Retrieval:
    """Scores of retrieval in both directions."""

    text_to_video: RetrievalScores
    video_to_text: RetrievalScores


def score_retrieval(
    similarity_NM: NDArray[np.float32], is_right_NM: NDArray[np.bool_], *, temperature: float | None = None
) -> Retrieval:
    """Score the similarities of N clips and M texts.

    Args:
        is_right_NM: True if the clip and the text are a correct pair.
        temperature: Temperature of dual softmax; None for plain similarities.
    """
    directions = ((similarity_NM.T, is_right_NM.T), (similarity_NM, is_right_NM))
    text_to_video, video_to_text = (
        _score_ranks(scores if temperature is None else dual_softmax(scores, temperature=temperature), is_right)
        for scores, is_right in directions
    )
    return Retrieval(text_to_video=text_to_video, video_to_text=video_to_text)


def dual_softmax(similarity_QG: NDArray[np.float32], *, temperature: float) -> NDArray[np.float64]:
    """Multiply each similarity by its softmax over all queries (Cheng et al. 2021); return float64 [Q, G].

    The computation takes up to 24 bytes per query-item pair. In float32, most weights would underflow to 0, and many
    scores would be equal.
    """
    scores_QG = similarity_QG.astype(np.float64)
    weight_QG = np.exp((scores_QG - scores_QG.max(axis=0)) / temperature)
    scores_QG *= weight_QG
    scores_QG /= weight_QG.sum(axis=0)
    return scores_QG


def ranks(similarity_QG: NDArray[np.floating], is_right_QG: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the rank of each query's best correct item among this item and all incorrect items, int64 [Q]."""
    best_right_Q = np.where(is_right_QG, similarity_QG, -np.inf).max(axis=1)
    # The comparison is negated, so that NaN counts against the model.
    is_ahead_QG = ~is_right_QG & ~(similarity_QG < best_right_Q[:, None])
    return 1 + is_ahead_QG.sum(axis=1)


def _score_ranks(similarity_QG: NDArray[np.floating], is_right_QG: NDArray[np.bool_]) -> RetrievalScores:
    rank_Q = ranks(similarity_QG, is_right_QG)
    num_queries, gallery_size = similarity_QG.shape
    num_right = is_right_QG.sum(axis=1)
    # Chance increases with k. The chance level of the median rank is the smallest k at which the expected recall
    # reaches 1/2.
    depths = range(1, gallery_size + 1)
    median_index = bisect_left(depths, 0.5, key=lambda k: _mean_chance(gallery_size, num_right, k))
    return RetrievalScores(
        num_queries=num_queries,
        gallery_size=gallery_size,
        recall={k: float((rank_Q <= k).mean()) for k in RECALL_AT},
        chance={k: _mean_chance(gallery_size, num_right, k) for k in RECALL_AT},
        median_rank=float(np.median(rank_Q)),
        chance_median_rank=float(depths[median_index]),
    )


def chance(gallery_size: int, num_right: int, k: int) -> float:
    """Return the probability that a random ranking has a correct item among the first k: 1 - C(G - R, k) / C(G, k).

    G is the gallery size, and R is the number of correct items.
    """
    if k + num_right > gallery_size:
        return 1.0
    numerators = np.arange(gallery_size - k - num_right + 1, gallery_size - k + 1)
    return 1.0 - float(np.prod(numerators / (numerators + k)))


def _mean_chance(gallery_size: int, num_right_Q: NDArray[np.int64], k: int) -> float:
    """Return the mean of `chance` over the queries."""
    # Compute `chance` once for each distinct number of correct items.
    counts, num_queries = np.unique(num_right_Q, return_counts=True)
    chances = [chance(gallery_size, int(count), k) for count in counts]
    return float(np.average(chances, weights=num_queries))


# Multi-instance retrieval (MIR) in EPIC-KITCHENS-100: graded mAP and nDCG, in both directions.
#
# A clip may have many relevant sentences, each with a relevancy in [0, 1] (clipmill.train.data.relevancy). Let rel_k be
# the relevancy of the item at rank k in a query's ranking:
#
#     AP    mean of (rel_1 + ... + rel_k) / k over the ranks k at which rel_k = 1
#     nDCG  (sum over k <= K of rel_k / log2(k + 1)) / the same sum for the best ranking;
#           K is the number of items with a relevancy above 0
#
# As in the challenge's code, partial relevancy counts in the precision, but the mean is taken only over ranks with full
# relevancy: the AP of the ranking [.5, 1, 0, 1] is (1.5 / 2 + 2.5 / 4) / 2 = .6875, while its binary AP is .5. A query
# without an item of relevancy 1 has no AP, and a query without any relevant item has no nDCG. Such queries are excluded
# from the mean, and their number is reported.
#
# Items with equal scores are ranked by ascending relevancy, so ties count against the model. In the public code, the
# order of such items depends on the sorting algorithm.


_BLOCK_VALUES = 1 << 22  # number of pairs per block; a block takes at most a few hundred megabytes

MIR_PROTOCOL = (
    "mAP: precision with graded relevancy, averaged over the ranks of items with relevancy 1; "
    "nDCG: linear gain, log2(rank + 1) discount, cut off at the number of items with relevancy above 0; "
    "ties count against the model"
)


@dataclass(frozen=True)
class MirScores:
    """Scores of multi-instance retrieval in one direction. A mean is None if no query has a value.

    Attributes:
        mean_ap, ndcg: Means of AP and nDCG over the queries, in [0, 1].
        chance_mean_ap, chance_ndcg: Expected means for random rankings.
        num_without_ap: Number of queries without an item of relevancy 1.
        num_without_ndcg: Number of queries without an item of relevancy above 0.
    """

    num_queries: int
    gallery_size: int
    mean_ap: float | None
    ndcg: float | None
    chance_mean_ap: float | None
    chance_ndcg: float | None
    num_without_ap: int
    num_without_ndcg: int


@dataclass(frozen=True)
class MirResult:
    """Scores in both directions. The challenge ranks models by the means over the two directions."""

    video_to_text: MirScores
    text_to_video: MirScores

    @property
    def mean_ap(self) -> float | None:
        return _mean_of_two(self.video_to_text.mean_ap, self.text_to_video.mean_ap)

    @property
    def ndcg(self) -> float | None:
        return _mean_of_two(self.video_to_text.ndcg, self.text_to_video.ndcg)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {"protocol": MIR_PROTOCOL, **asdict(self), "average": {"mean_ap": self.mean_ap, "ndcg": self.ndcg}}


def score_mir(similarity_NM: NDArray[np.floating], relevancy: Relevancy) -> MirResult:
    """Score the similarities of N clips and M sentences.

    Raises:
        ValueError: The shapes differ.
    """
    if similarity_NM.shape != relevancy.shape:
        raise ValueError(f"similarities {similarity_NM.shape} and relevancy {relevancy.shape} differ in shape")
    return MirResult(
        video_to_text=_score_relevancies(similarity_NM, relevancy),
        text_to_video=_score_relevancies(similarity_NM.T, relevancy.transpose()),
    )


def average_precision(ranked_QG: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the AP of each query, [Q]; NaN if no relevancy is 1.

    Args:
        ranked_QG: Relevancies of the items, in the order of each query's ranking.
    """
    rank = np.arange(1, ranked_QG.shape[1] + 1)
    precision_QG = np.where(ranked_QG == 1, np.cumsum(ranked_QG, axis=1) / rank, 0)
    num_full_Q = (ranked_QG == 1).sum(axis=1)
    return _divide(precision_QG.sum(axis=1), num_full_Q)


def ndcg(ranked_QG: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nDCG of each query, [Q]; NaN if all relevancies are 0.

    Args:
        ranked_QG: Relevancies of the items, in the order of each query's ranking.
    """
    best_QG = -np.sort(-ranked_QG, axis=1)
    return _divide(_dcg(ranked_QG), _dcg(best_QG))


def _dcg(ranked_QG: NDArray[np.float64]) -> NDArray[np.float64]:
    rank = np.arange(1, ranked_QG.shape[1] + 1)
    is_counted_QG = rank <= (ranked_QG > 0).sum(axis=1, keepdims=True)
    gain: NDArray[np.float64] = (ranked_QG / np.log2(rank + 1) * is_counted_QG).sum(axis=1)
    return gain


def _score_relevancies(similarity_QG: NDArray[np.floating], relevancy: Relevancy) -> MirScores:
    num_queries, gallery_size = similarity_QG.shape
    columns: list[list[NDArray[np.float64]]] = [[], [], [], []]
    step = max(1, _BLOCK_VALUES // max(gallery_size, 1))
    for start in range(0, num_queries, step):
        queries = slice(start, min(start + step, num_queries))
        relevancy_QG = relevancy.rows(queries)
        # Sort by descending similarity, and equal similarities by ascending relevancy.
        order_QG = np.lexsort((relevancy_QG, -similarity_QG[queries]), axis=1)
        ranked_QG = np.take_along_axis(relevancy_QG, order_QG, axis=1)
        for column, value in zip(
            columns,
            (average_precision(ranked_QG), ndcg(ranked_QG), chance_ap(relevancy_QG), chance_ndcg(relevancy_QG)),
            strict=True,
        ):
            column.append(value)
    ap_Q, ndcg_Q, chance_ap_Q, chance_ndcg_Q = (np.concatenate([*column, np.empty(0)]) for column in columns)
    return MirScores(
        num_queries=num_queries,
        gallery_size=gallery_size,
        mean_ap=_mean(ap_Q),
        ndcg=_mean(ndcg_Q),
        chance_mean_ap=_mean(chance_ap_Q),
        chance_ndcg=_mean(chance_ndcg_Q),
        num_without_ap=int(np.isnan(ap_Q).sum()),
        num_without_ndcg=int(np.isnan(ndcg_Q).sum()),
    )


def chance_ap(relevancy_QG: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expected AP of each query for a random ranking, [Q]; NaN if no relevancy is 1.

    An item of relevancy 1 is equally likely at each rank k. The expected relevancy of each item ranked before this item
    is the mean relevancy of all other items.
    """
    size = relevancy_QG.shape[1]
    mean_inverse_rank = (1 / np.arange(1, size + 1)).sum() / size
    other_relevancy_Q = relevancy_QG.sum(axis=1) - 1
    expected_Q = mean_inverse_rank + other_relevancy_Q / max(size - 1, 1) * (1 - mean_inverse_rank)
    return np.where((relevancy_QG == 1).any(axis=1), expected_Q, np.nan)


def chance_ndcg(relevancy_QG: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the expected nDCG of each query for a random ranking, [Q]; NaN if all relevancies are 0.

    The expected relevancy at each rank is the mean relevancy.
    """
    discount = 1 / np.log2(np.arange(2, relevancy_QG.shape[1] + 2))
    total_discount_Q = np.concatenate([[0.0], np.cumsum(discount)])[(relevancy_QG > 0).sum(axis=1)]
    return _divide(relevancy_QG.mean(axis=1) * total_discount_Q, _dcg(-np.sort(-relevancy_QG, axis=1)))


def _divide(numerator: NDArray[np.float64], denominator: NDArray[Any]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0)


def _mean(values: NDArray[np.float64]) -> float | None:
    finite_values = values[~np.isnan(values)]
    return float(finite_values.mean()) if len(finite_values) else None


def _mean_of_two(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else (first + second) / 2
