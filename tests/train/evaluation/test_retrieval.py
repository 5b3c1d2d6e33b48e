import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.train.tasks.dual_encoder.evaluation import Ranking, choose_texts, retrieval_examples
from clipmill.train.tasks.dual_encoder.metrics import chance, ranks, score_retrieval
from clipmill.train.tasks.dual_encoder.protocols import distinct_texts, text_keys


def right(text_of_clip: list[int]) -> NDArray[np.bool_]:
    """Return a table of clips by texts that marks the text of each clip."""
    return np.array(text_of_clip)[:, None] == np.arange(max(text_of_clip) + 1)


def test_ranks_and_recalls_of_a_small_table() -> None:
    similarity = np.array([[0.9, 0.1, 0.2], [0.8, 0.3, 0.1], [0.1, 0.2, 0.7]], np.float32)  # clips by texts
    scores = score_retrieval(similarity, right([0, 1, 2]))
    assert scores.video_to_text.recall == pytest.approx({1: 2 / 3, 5: 1.0, 10: 1.0})
    assert scores.video_to_text.median_rank == 1
    assert scores.text_to_video.recall[1] == 1.0


def test_any_clip_with_the_text_is_right() -> None:
    """Clips 0 and 1 share text 0: one of them suffices as a result, and neither lowers the rank of the other."""
    similarity = np.array([[0.5, 0.9], [0.8, 0.1], [0.7, 0.6]], np.float32)
    scores = score_retrieval(similarity, right([0, 0, 1]))
    assert (scores.text_to_video.num_queries, scores.text_to_video.gallery_size) == (2, 3)
    assert (scores.video_to_text.num_queries, scores.video_to_text.gallery_size) == (3, 2)
    assert scores.text_to_video.recall[1] == 0.5  # text 0 finds clip 1; text 1 finds clip 0 before clip 2
    assert scores.video_to_text.recall[1] == pytest.approx(1 / 3)
    assert scores.text_to_video.chance[1] == pytest.approx((2 / 3 + 1 / 3) / 2)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_model_that_sees_no_difference_gets_the_worst_ranks(value: float) -> None:
    similarity = np.full((1, 8), value, np.float32)
    assert ranks(similarity, np.arange(8)[None] == 0).tolist() == [8]


def test_chance_is_what_random_rankings_reach() -> None:
    rng = np.random.default_rng(0)
    for gallery_size, num_right, k in ((20, 1, 5), (20, 4, 5), (50, 3, 10)):
        hits = [rng.permutation(gallery_size)[:num_right].min() < k for _ in range(20_000)]
        assert chance(gallery_size, num_right, k) == pytest.approx(np.mean(hits), abs=0.02)
    assert chance(4, 1, 10) == 1.0 and chance(4, 4, 1) == 1.0
    for gallery_size, num_right, k in ((300, 7, 40), (9668, 400, 10), (3842, 1, 1)):
        missed = Fraction(math.comb(gallery_size - num_right, k), math.comb(gallery_size, k))
        assert chance(gallery_size, num_right, k) == pytest.approx(float(1 - missed), rel=1e-12)


def test_chance_stands_beside_the_recalls() -> None:
    scores = score_retrieval(np.eye(100, dtype=np.float32), np.eye(100, dtype=bool))
    assert scores.video_to_text.chance == pytest.approx({1: 0.01, 5: 0.05, 10: 0.1})
    assert scores.video_to_text.chance_median_rank == 50
    assert scores.video_to_text.median_rank == 1


def test_equal_tokens_are_one_text() -> None:
    tokens = np.array([[5, 6, 0], [1, 2, 0], [5, 6, 0], [1, 2, 3]])
    first, text_of = distinct_texts(text_keys(tokens))
    assert first.tolist() == [0, 1, 3]
    assert text_of.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("rank", "chosen"),
    [
        ([1, 1, 2, 1, 9, 1, 3, 1, 1, 5], [0, 2, 3, 6, 8, 9]),  # alternately three successes and three failures
        ([1] * 4, [0, 1, 2, 3]),
        ([2, 1, 7], [1, 0, 2]),
        ([3] * 11, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_examples_are_successes_and_failures_by_turns(rank: list[int], chosen: list[int]) -> None:
    assert choose_texts(np.array(rank)) == chosen


class Pictured:
    """Samples without images."""

    def text(self, sample: int) -> str:
        return f"text {sample}"

    def key(self, sample: int) -> str:
        return f"v_{sample}"

    def span_s(self, sample: int) -> tuple[float, float]:
        return 0.0, 1.0

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        return []


def test_an_example_that_fails_shows_where_the_correct_clip_is() -> None:
    similarity = np.array([[0.9, 0.8, 0.7, 0.6, 0.5, 0.1]], np.float32).T
    ranking = Ranking(similarity, np.array([[0.5, 0, 0, 0, 0, 1.0]]).T, np.arange(6), lambda text: "q")
    [example] = retrieval_examples(ranking, Pictured(), num_frames=1, player=None)
    assert example["rank"] == 6 and [clip["place"] for clip in example["found"]] == [1, 2, 3, 6]
    assert [clip["is_right"] for clip in example["found"]] == [False, False, False, True]
    assert example["found"][0]["relevancy"] == 0.5 and example["found"][3]["key"] == "v_5"
