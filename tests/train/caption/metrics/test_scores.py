import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from clipmill.manifests.errors import UserError
from clipmill.train.tasks.caption.metrics import CaptionScores, hash_of_ids, score_captions
from clipmill.train.tasks.caption.ptb_tokenizer import tokenize
from clipmill.train.tasks.caption.spec import METRIC_LABELS

Candidates = Mapping[str, str]
References = Mapping[str, Sequence[str]]

CLOSE = 1e-6
ORDERS = (1, 2, 3, 4)


def score(candidates: Candidates, references: References) -> CaptionScores:
    return score_captions(candidates, references, with_java=False)


def real_scores(candidates: Candidates, references: References) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the scores of pycocoevalcap for the corpus and for each video, under clipmill's names.

    In pycocoevalcap, a caption without words equals a reference without words and has a ROUGE-L of 1. In clipmill,
    the
    ROUGE-L of a caption without words is 0.
    """
    ours = {video_id: [tokenize(caption)] for video_id, caption in candidates.items()}
    theirs = {video_id: [tokenize(caption) for caption in references[video_id]] for video_id in candidates}
    bleus, video_bleus = Bleu(4).compute_score(theirs, ours, verbose=0)
    _, video_rouges = Rouge().compute_score(theirs, ours)
    video_rouges = np.where([bool(caption) for (caption,) in ours.values()], video_rouges, 0.0)
    rouge = float(video_rouges.mean())
    means = {f"bleu{order + 1}": bleu for order, bleu in enumerate(bleus)} | {"rouge_l": rouge}
    columns = {f"bleu{order + 1}": column for order, column in enumerate(video_bleus)} | {"rouge_l": video_rouges}
    means["cider_d"], columns["cider_d"] = Cider().compute_score(theirs, ours)
    return means, columns


def naive_cider(candidates: Candidates, references: References) -> list[float]:
    """Compute CIDEr directly from equations 1 to 3 of the paper."""

    def grams(caption: str, order: int) -> Counter[tuple[str, ...]]:
        words = tokenize(caption).split()
        return Counter(tuple(words[place : place + order]) for place in range(len(words) - order + 1))

    grams_of = {
        (order, other): grams(other, order) for others in references.values() for other in others for order in ORDERS
    }

    def vector(caption: str, order: int) -> dict[tuple[str, ...], float]:
        counts = grams(caption, order)
        total = sum(counts.values())
        result = {}
        for gram, count in counts.items():
            num_with = sum(any(gram in grams_of[order, other] for other in others) for others in references.values())
            result[gram] = count / total * math.log(len(references) / max(1, num_with))
        return result

    def cosine(first: dict[tuple[str, ...], float], other: dict[tuple[str, ...], float]) -> float:
        norms = math.hypot(*first.values()) * math.hypot(*other.values())
        return sum(value * other.get(gram, 0.0) for gram, value in first.items()) / norms if norms else 0.0

    return [
        10
        * float(
            np.mean(
                [
                    np.mean([cosine(vector(caption, order), vector(other, order)) for other in references[video_id]])
                    for order in ORDERS
                ]
            )
        )
        for video_id, caption in candidates.items()
    ]


def assert_as_published(candidates: Candidates, references: References) -> None:
    scores = score(candidates, references)
    means, columns = real_scores(candidates, references)
    for name, value in means.items():
        assert scores.means[name] == pytest.approx(value, abs=CLOSE), name
        ours = [scores.per_video[video_id][name] for video_id in candidates]
        np.testing.assert_allclose(ours, columns[name], atol=CLOSE, rtol=0, err_msg=name)
    plain = [scores.per_video[video_id]["cider"] for video_id in candidates]
    np.testing.assert_allclose(plain, naive_cider(candidates, references), atol=CLOSE, rtol=0)


WORDS = "a the man dog isn't red-hot plays guitar on stage . , 中文 U.S. it's The"
words = st.sampled_from(WORDS.split())
captions = st.lists(words, max_size=8).map(" ".join)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Candidates, References]:
    several = st.lists(captions, min_size=1, max_size=4).filter(lambda its: any(map(tokenize, its)))
    references = {f"v{number}": draw(several) for number in range(draw(sizes))}
    candidates = {
        video_id: draw(st.one_of(captions, st.sampled_from(its_own))) for video_id, its_own in references.items()
    }
    return candidates, references


sizes = st.integers(1, 6)


@given(corpora())
@settings(max_examples=40, deadline=None)
def test_random_captions_score_as_in_pycocoevalcap(corpus: tuple[Candidates, References]) -> None:
    assert_as_published(*corpus)


OTHERS = {"x": ["someone cooks an egg in a pan", "an egg is fried"], "y": ["dogs run on the beach .", "Dogs running"]}
EDGES = {
    "empty candidate": ("", ["a man plays", "a guitar player"]),
    "empty reference": ("a man plays", ["", "a man"]),
    "empty as one reference": ("", ["", "a man"]),
    "only punctuation": ("...", ["!", "a man"]),
    "one word": ("guitar", ["guitar", "a man plays guitar"]),
    "two words": ("plays guitar", ["plays guitar", "guitar"]),
    "equal to a reference": ("A man plays the guitar.", ["a man plays the guitar", "he plays"]),
    "repeated words": ("the the the the the the the", ["the cat is on the mat", "there is a cat on the mat"]),
    "repeated phrases": ("a man a man a man a man", ["a man and a man", "a man"]),
    "much longer than all references": (" ".join(["a man plays"] * 12), ["a man plays"]),
    "between two references": ("a b c", ["a b", "a b c d"]),
    "nothing in common": ("completely different words", ["a man plays", "a woman sings"]),
    "other scripts": ("一个 男人 弹 吉他 。", ["一个 男人 弹 吉他 。", "Мужчина играет на гитаре", "رجل يعزف"]),
    "bars": ("a ||| b", ["a ||| b", "a | b"]),
    "brackets": ("a (red) [b] {c}", ["a red b c", "a (red) b"]),
    "space within a token": ("1 1/2 cups", ["1 1/2 cups of flour", "1/2 cup"]),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_score_as_in_pycocoevalcap(edge: str) -> None:
    candidate, its_references = EDGES[edge]
    candidates = {"x": "an egg in a pan", "edge": candidate, "y": "a dog runs"}
    assert_as_published(candidates, {"edge": its_references, **OTHERS})


@pytest.mark.parametrize("edge", EDGES)
def test_a_single_video_scores_as_in_pycocoevalcap(edge: str) -> None:
    candidate, its_references = EDGES[edge]
    assert_as_published({"edge": candidate}, {"edge": its_references})


def test_a_single_video_has_no_cider() -> None:
    scores = score({"v": "a man plays"}, {"v": ["a man plays"]})
    assert (scores.means["cider_d"], scores.means["cider"], scores.means["exact_match"]) == (0, 0, 1)


@pytest.mark.parametrize("nothing", ["", "...", ". !"])
def test_captions_without_words_are_worth_nothing_and_named(nothing: str) -> None:
    references = {"v": ["", "a man plays"], "w": ["...", "a dog"]}
    scores = score(dict.fromkeys(references, nothing), references)
    assert scores.wordless_videos == ("v", "w")
    for value in (scores.means, *scores.per_video.values()):
        assert value == pytest.approx(dict.fromkeys(value, 0.0), abs=CLOSE)
    assert score({"v": "a man plays", "w": nothing}, references).wordless_videos == ("w",)


def test_repeating_a_word_gains_nothing_in_cider_d_but_much_in_cider() -> None:
    references = {"v": ["guitar"], **OTHERS}
    once, often = (
        score({"v": caption, "x": "", "y": ""}, references).per_video["v"] for caption in ("guitar", "guitar " * 9)
    )
    assert often["cider_d"] < 0.5 * once["cider_d"]
    assert often["cider"] == pytest.approx(once["cider"])


def test_scores_say_what_they_were_computed_from() -> None:
    scores = score({"y": "A dog runs.", "x": "an egg"}, OTHERS)
    assert list(scores.per_video) == ["y", "x"]
    assert (scores.num_videos, scores.num_references) == (2, 4)
    assert scores.idf == "the 4 references of these 2 videos"
    assert scores.ids_hash == hash_of_ids(["x", "y"]) != hash_of_ids(["x", "z"])
    assert (
        list(scores.means)
        == list(scores.per_video["x"])
        == [name for name in METRIC_LABELS if name not in scores.missing_reasons]
    )
    assert scores.missing_reasons == {"meteor": "not requested", "spice": "not requested"}


@pytest.mark.parametrize(
    ("candidates", "references", "told"),
    [
        ({}, {}, "no captions to score"),
        ({"v": "a"}, {}, "1 video has no references: v"),
        ({"v": "a"}, {"v": []}, "1 video has no references: v"),
        ({"v": "a"}, {"v": ["a"], "w": ["b"]}, "1 video has no caption to score: w"),
        ({"v": "", "w": "a"}, {"v": ["", "..."], "w": ["a"]}, "1 video has no reference with words: v"),
    ],
)
def test_videos_without_their_other_half_are_named(candidates: Candidates, references: References, told: str) -> None:
    with pytest.raises(UserError, match=told):
        score(candidates, references)
