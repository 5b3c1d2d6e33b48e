import numpy as np
import pytest

from clipmill.train.tasks.dual_encoder.zero_shot import class_embeddings, score_classes


def test_a_class_is_the_mean_of_its_prompts_by_hand() -> None:
    prompts = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], np.float32)
    embedded = class_embeddings(prompts, np.array([0, 0, 1]))
    assert embedded == pytest.approx(np.array([[0.5**0.5, 0.5**0.5], [0.6, 0.8]]))
    assert embedded.dtype == np.float32


def test_scores_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    similarity, classes = rng.normal(size=(200, 12)), rng.integers(0, 9, 200)
    scores = score_classes(similarity, classes)
    right_at = [sorted(row, reverse=True).index(row[right]) for row, right in zip(similarity, classes, strict=True)]
    for k in (1, 5):
        assert scores.top[k] == np.mean([place < k for place in right_at])
    by_class = [
        np.mean([p == 0 for p, c in zip(right_at, classes, strict=True) if c == class_index])
        for class_index in range(9)
    ]
    assert scores.mean_class_accuracy == pytest.approx(np.mean(by_class), abs=1e-12)
    assert (scores.num_clips, scores.num_classes, scores.num_classes_seen) == (200, 12, 9)
    assert scores.chance == {1: 1 / 12, 5: 5 / 12}


def test_classes_count_alike_however_many_clips_they_have() -> None:
    similarity = np.array([[1.0, 0.0]] * 9 + [[1.0, 0.0]])
    scores = score_classes(similarity, np.array([0] * 9 + [1]))
    assert scores.top == {1: 0.9, 5: 1.0} and scores.mean_class_accuracy == 0.5


def test_a_model_that_sees_no_difference_is_never_right() -> None:
    assert score_classes(np.zeros((6, 8)), np.arange(6)).top == {1: 0.0, 5: 0.0}
