"""Text-video retrieval: R@1, R@5, R@10 and median rank, in both directions.

If several clips have the same caption ("a red circle moves to the left"), any of them is correct. Captions with equal
tokens, or equal stored embeddings, are one text (train.tasks.dual_encoder.embeddings). The protocol:

    text to video   query: each distinct text; gallery: all clips; correct: every clip that has this text
    video to text   query: each clip; gallery: the distinct texts; correct: the clip's own text

The rank of a query is 1 + the number of incorrect items that score at least as high as its best correct item: ties
count against the model, so that constant scores get the worst ranks.
"""

from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECALL_AT = (1, 5, 10)

PROTOCOL = (
    "text to video: each distinct text among all clips, any clip with that text is right; "
    "video to text: each clip among the distinct texts; ties count against the model"
)


@dataclass(frozen=True)
class Direction:
    """Result of one direction; recall and chance are fractions in [0, 1], by k."""

    num_queries: int
    gallery_size: int
    recall: dict[int, float]
    chance: dict[int, float]
    median_rank: float
    chance_median_rank: float


@dataclass(frozen=True)
class Retrieval:
    """Result of both directions."""

    text_to_video: Direction
    video_to_text: Direction

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {"protocol": PROTOCOL, **asdict(self)}


def score_retrieval(similarity_NM: NDArray[np.float32], text_of_clip_N: NDArray[np.int64]) -> Retrieval:
    """Score similarities of N clips and M distinct texts.

    Args:
        text_of_clip_N: the text of each clip, a column of the similarities.
    """
    is_right_NM = text_of_clip_N[:, None] == np.arange(similarity_NM.shape[1])
    return Retrieval(
        text_to_video=_direction(similarity_NM.T, is_right_NM.T),
        video_to_text=_direction(similarity_NM, is_right_NM),
    )


def ranks(similarity_QG: NDArray[np.float32], is_right_QG: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rank (1 is best) of the best correct item of each query among that item and all incorrect ones; int64 [Q]."""
    best_right_Q = np.where(is_right_QG, similarity_QG, -np.inf).max(axis=1)
    # Negated, so that NaN counts against the model.
    ahead_QG = ~is_right_QG & ~(similarity_QG < best_right_Q[:, None])
    return 1 + ahead_QG.sum(axis=1)


def _direction(similarity_QG: NDArray[np.float32], is_right_QG: NDArray[np.bool_]) -> Direction:
    rank_Q = ranks(similarity_QG, is_right_QG)
    num_queries, gallery_size = similarity_QG.shape
    num_right = is_right_QG.sum(axis=1)
    return Direction(
        num_queries=num_queries,
        gallery_size=gallery_size,
        recall={k: float((rank_Q <= k).mean()) for k in RECALL_AT},
        chance={k: _mean_chance(gallery_size, num_right, k) for k in RECALL_AT},
        median_rank=float(np.median(rank_Q)),
        chance_median_rank=_chance_median_rank(gallery_size, num_right),
    )


def chance(gallery_size: int, num_right: int, k: int) -> float:
    """Probability that a random ranking has a correct item among its first k: 1 - C(G - R, k) / C(G, k)."""
    if k + num_right > gallery_size:
        return 1.0
    missed = np.arange(gallery_size - k - num_right + 1, gallery_size - k + 1)
    return 1.0 - float(np.prod(missed / (missed + k)))


def _mean_chance(gallery_size: int, num_right_Q: NDArray[np.int64], k: int) -> float:
    """Mean over queries, computed once per number of correct items."""
    counts, num_queries = np.unique(num_right_Q, return_counts=True)
    chances = [chance(gallery_size, int(count), k) for count in counts]
    return float(np.average(chances, weights=num_queries))


def _chance_median_rank(gallery_size: int, num_right_Q: NDArray[np.int64]) -> float:
    """The smallest k at which a random ranking succeeds for half of the queries."""
    ranks = range(1, gallery_size + 1)
    # The chance increases with k.
    return float(ranks[bisect_left(ranks, 0.5, key=lambda k: _mean_chance(gallery_size, num_right_Q, k))])
