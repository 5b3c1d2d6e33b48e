import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.train.data.relevancy import Actions, NoRelevancy, compress_matrix, relevancy_of_classes

NUM_NOUNS = 9


def actions(rng: np.random.Generator, count: int) -> Actions:
    nouns = np.zeros((count, NUM_NOUNS), bool)
    for row in nouns:
        row[rng.choice(NUM_NOUNS, rng.integers(0, 4), replace=False)] = True
    return Actions(rng.integers(0, 4, count), nouns)


def naive(clips: Actions, sentences: Actions) -> NDArray[np.float64]:
    """Compute the definition pair by pair, with sets."""
    sets = [[set(np.flatnonzero(row)) for row in side.nouns_NK] for side in (clips, sentences)]
    result = np.empty((len(sets[0]), len(sets[1])))
    for n, of_clip in enumerate(sets[0]):
        for m, of_sentence in enumerate(sets[1]):
            union = of_clip | of_sentence
            iou = len(of_clip & of_sentence) / len(union) if union else 0.0
            result[n, m] = 0.5 * ((1.0 if clips.verb_N[n] == sentences.verb_N[m] else 0.0) + iou)
    return result


def test_relevancy_of_classes_is_the_definition_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    clips, sentences = actions(rng, 700), actions(rng, 60)
    small = relevancy_of_classes(clips, sentences)
    assert np.array_equal(small.rows(slice(None)), naive(clips, sentences))
    assert small.codes_RC.dtype == np.uint8 and len(small.codes_RC) < 700


def test_a_matrix_is_kept_to_the_bit_and_small() -> None:
    rng = np.random.default_rng(1)
    matrix = naive(actions(rng, 600), actions(rng, 50))
    small = compress_matrix(matrix)
    assert np.array_equal(small.rows(slice(None)), matrix)
    assert np.array_equal(small.transpose().rows(slice(None)), matrix.T)
    some, others = np.array([5, 3, 3]), np.array([7, 0, 2])
    assert np.array_equal(small.take(some, others).rows(slice(None)), matrix[np.ix_(some, others)])
    assert np.array_equal(small.at(some, others), matrix[some, others])
    assert small.shape == matrix.shape and small.size_bytes * 8 < matrix.nbytes
    assert np.array_equal(compress_matrix(matrix.astype(np.float32)).rows(slice(None)), matrix.astype(np.float32))


def test_a_matrix_of_the_size_of_the_training_split_takes_little_memory() -> None:
    """67,217 clips and 15,989 sentences, whose matrix would take 8.6 GB, are computed by class."""
    rng = np.random.default_rng(2)
    kinds = Actions(rng.integers(0, 97, 4000), rng.random((4000, 300)) < 0.005)
    of_clip, of_sentence = rng.integers(0, 4000, 67_217), rng.integers(0, 4000, 15_989)
    clips = Actions(kinds.verb_N[of_clip], kinds.nouns_NK[of_clip])
    sentences = Actions(kinds.verb_N[of_sentence], kinds.nouns_NK[of_sentence])
    tracemalloc.start()
    small = relevancy_of_classes(clips, sentences)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert small.shape == (67_217, 15_989)
    assert small.size_bytes < 50e6 and peak < 400e6


@pytest.mark.parametrize(
    ("matrix", "what"),
    [
        (np.array([[0.5, -0.25]]), "-0.25"),
        (np.array([[0.5, 1.5]]), "1.5"),
        (np.array([[np.nan, 0.5]]), "nan"),
        (np.linspace(0, 1, 257)[None], "more than 256"),
    ],
)
def test_what_is_no_relevancy_is_refused(matrix: NDArray[np.float64], what: str) -> None:
    with pytest.raises(NoRelevancy, match=what):
        compress_matrix(matrix)


def test_values_that_come_late_do_not_move_those_before() -> None:
    matrix = np.zeros((600, 3))
    matrix[300, 1], matrix[599, 2] = 1.0, 0.5
    assert np.array_equal(compress_matrix(matrix).rows(slice(None)), matrix)
