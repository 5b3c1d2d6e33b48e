import numpy as np
import pytest

from clipmill.train.tasks.caption.metrics import best_constant, mean_cider, score_captions

REFERENCES = {
    "a": ["a red ball rolls", "the red ball moves to the left", "a ball"],
    "b": ["a red box falls", "a box falls down"],
    "c": ["a blue ball rolls to the left"],
    "d": ["two birds sing in a tree", "a red ball rolls"],
}


def test_the_mean_is_cider_of_the_same_caption_for_every_clip() -> None:
    captions = [caption for its in REFERENCES.values() for caption in its]
    clip_of = np.repeat(np.arange(4), [len(its) for its in REFERENCES.values()])
    ciders = mean_cider([caption.split() for caption in captions], clip_of)
    for caption, value in zip(captions, ciders, strict=True):
        scores = score_captions(dict.fromkeys(REFERENCES, caption), REFERENCES, with_java=False)
        assert 10 * value == pytest.approx(scores.means["cider"], rel=1e-12)


def test_the_best_of_few_captions_is_that_of_all() -> None:
    def cider_d(caption: str) -> float:
        return score_captions(dict.fromkeys(REFERENCES, caption), REFERENCES, with_java=False).means["cider_d"]

    captions = {caption for its in REFERENCES.values() for caption in its}
    assert cider_d(best_constant(REFERENCES)) == max(map(cider_d, captions))


def test_captions_of_nothing_are_no_obstacle() -> None:
    assert best_constant({"a": ["", "..."], "b": ["a cat", ""]}) in ("a cat", "", "...")
    assert best_constant({"a": ["only one"]}) == "only one"
