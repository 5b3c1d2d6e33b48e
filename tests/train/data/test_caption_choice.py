"""Choice of the caption that a visit shows: a pure function of seed and position, weighted by source."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.manifests.caption_spans import SpanBlock
from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import CaptionSettings, parse_weights
from clipmill.train.data.caption_rows import UsableCaptions, clips_of
from clipmill.train.data.captions import CaptionChoice, choice_from_entries, choose_sources, describe_truncation
from clipmill.train.models.text import load_tokenizer

NUM_DRAWS = 60_000
ROWS = ((0, 2), (0, 3), (1, 3), (-1, 2))  # first chunk, start, length, rank


def choice_of(ranks: list[list[int]], weights: list[float]) -> CaptionChoice:
    """Make a caption choice from the ranks of each clip's captions."""
    clip = np.repeat(np.arange(len(ranks)), [len(clip_ranks) for clip_ranks in ranks])
    rank = np.array([rank_of_caption for clip_ranks in ranks for rank_of_caption in sorted(clip_ranks)], np.int16)
    return choice_from_entries(clip, rank, num_clips=len(ranks), weights=np.array(weights))


def shares(choice: CaptionChoice, clip: int, *, num_places: int) -> np.ndarray:
    drawn = choice.draw(np.full(NUM_DRAWS, clip), position=np.arange(NUM_DRAWS), seed=3)
    return np.bincount(drawn, minlength=num_places) / NUM_DRAWS


def test_captions_are_drawn_by_the_weight_of_their_source_and_then_all_alike() -> None:
    # Clip 0 has one caption from each of the first two sources. Clip 1 has three captions from the last source. Clip 2
    # has one, three and two captions from the three sources.
    choice = choice_of([[0, 1], [2, 2, 2], [0, 1, 1, 1, 2, 2]], [1.0, 2.0, 0.5])
    expected = {
        0: [1 / 3, 2 / 3, *[0] * 9],
        1: [0, 0, 1 / 3, 1 / 3, 1 / 3, *[0] * 6],
        2: [*[0] * 5, 1 / 3.5, *[2 / 3.5 / 3] * 3, *[0.5 / 3.5 / 2] * 2],
    }
    for clip, expected_share in expected.items():
        all_shares = shares(choice, clip, num_places=11)
        # The tolerance is four standard deviations of a fraction over this many draws.
        assert np.abs(all_shares - expected_share).max() < 4 * np.sqrt(0.25 / NUM_DRAWS)
        assert (all_shares[np.array(expected_share) == 0] == 0).all()


def test_what_is_drawn_depends_on_seed_and_position_alone() -> None:
    choice = choice_of([[0, 0, 1], [0, 1], [1]] * 40, [1.0, 3.0])
    clips, position = np.arange(120), np.arange(120) * 7
    whole = choice.draw(clips, position=position, seed=5)
    alone = [int(choice.draw(clips[at : at + 1], position=position[at : at + 1], seed=5)[0]) for at in range(120)]
    assert whole.tolist() == alone
    assert (choice.draw(clips, position=position, seed=6) != whole).any()
    assert (choice.draw(clips, position=position + 120, seed=5) != whole).any()


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=20),
    weights=st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_clip_is_always_shown_with_one_of_its_own(ranks: list[list[int]], weights: list[float], seed: int) -> None:
    choice = choice_of(ranks, weights)
    clips = np.tile(np.arange(len(ranks)), 30)
    drawn = choice.draw(clips, position=np.arange(len(clips)), seed=seed)
    ends = np.cumsum([len(clip_ranks) for clip_ranks in ranks])
    begins = ends - [len(clip_ranks) for clip_ranks in ranks]
    assert ((drawn >= begins[clips]) & (drawn < ends[clips])).all()
    assert (choice.first_entries(np.arange(len(ranks))) == begins).all()


def test_sources_are_named_in_full_or_by_pattern() -> None:
    names = ["ego4d_train.rephraser.top3", "ego4d_train", "ego4d_train.narrator_63"]
    by_default = choose_sources(names, weights=None)
    assert by_default.names == ("ego4d_train", "ego4d_train.narrator_63", "ego4d_train.rephraser.top3")
    assert by_default.weights.tolist() == [1, 1, 1] and by_default.rank.tolist() == [2, 0, 1]
    chosen = choose_sources(names, weights="*rephraser*=2,ego4d_train=1,*narrator*=0")
    assert chosen.names == ("ego4d_train.rephraser.top3", "ego4d_train")
    assert chosen.weights.tolist() == [2, 1] and chosen.rank.tolist() == [0, 1, -1]
    with pytest.raises(UserError, match="no caption of this manifest has the source 'human'") as caught:
        choose_sources(names, weights="human=1")
    assert "ego4d_train.narrator_63" in (caught.value.hint or "")


def test_captions_of_models_are_used_only_if_they_are_named() -> None:
    names = ["a@1f2e3d4c", "human", "asr"]
    by_default = choose_sources(names, weights=None)
    assert by_default.names == ("asr", "human") and by_default.rank.tolist() == [-1, 1, 0]
    assert by_default.describe_omitted(5) == (
        '5 captions from models left out (a@1f2e3d4c); the sources "asr=1,human=1,a@*=1" include them'
    )
    asked = choose_sources(names, weights="asr=1,human=1,a@*=1")
    assert asked.names == ("asr", "human", "a@1f2e3d4c") and not asked.not_asked_for
    with pytest.raises(UserError, match=r"all captions of this split are from models \(a@1f2e3d4c\)") as caught:
        choose_sources(["a@1f2e3d4c"], weights=None)
    assert caught.value.hint == 'select them: --captions.sources "a@*=1"'


def test_sources_of_other_splits_may_be_wanted_beside_those_of_the_split() -> None:
    chosen = choose_sources(["human"], weights="run@*=2,human=1", all_sources=["human", "run@1f2e3d4c"])
    assert chosen.names == ("human",) and chosen.rank.tolist() == [0]
    with pytest.raises(UserError, match="this split has no captions from these sources") as caught:
        choose_sources(["human"], weights="run@*=2", all_sources=["human", "run@1f2e3d4c"])
    assert caught.value.hint == "use sources of this split: human"
    with pytest.raises(UserError, match=r"has the source 'other@\*'"):
        choose_sources(["human"], weights="other@*=2,human=1", all_sources=["human", "run@1f2e3d4c"])


@pytest.mark.parametrize(
    "text", ["human", "human=", "=1", "human=-1", "human=nan", "human=x", "a=1,a=2", "", "a=0,b=0"]
)
def test_weights_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--captions\.sources"):
        CaptionSettings(sources=text)


def test_weights_keep_their_order() -> None:
    assert list(parse_weights(" b = 2, a=1e-3 ").items()) == [("b", 2.0), ("a", 0.001)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(-1, 2)), max_size=40)
)
def test_captions_of_one_span_are_one_clip(rows: list[tuple[int, int, int, int]]) -> None:
    """Rows of (first chunk, start, length, rank) are grouped as a plain loop groups them."""
    chunk, begin, length, rank = (np.array([row[at] for row in rows], np.int64) for at in range(4))
    usable = UsableCaptions(np.arange(len(rows)), begin, begin + length, chunk, chunk, {}, 0)
    places = np.arange(len(rows), dtype=np.int32)
    each = np.ones(len(rows), np.int32)
    times_s = begin.astype(float), (begin + length).astype(float)
    ids = places.astype(np.int64) + 100
    block = SpanBlock(chunk.astype(np.int32), *times_s, each, rank.astype(np.int16), places, ids)
    clips = clips_of(usable, block, rank.astype(np.int16))
    expected: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for place, (first, start, duration, its_rank) in enumerate(rows):
        if its_rank >= 0:
            expected.setdefault((first, start, start + duration), []).append((its_rank, place))
    spans = clips.spans
    keys = list(zip(spans.first_part.tolist(), spans.begin_us.tolist(), spans.end_us.tolist(), strict=True))
    assert keys == sorted(expected)
    assert clips.row.tolist() == [place for key in keys for _, place in sorted(expected[key])]
    assert clips.caption_id.tolist() == [place + 100 for place in clips.row.tolist()]
    assert clips.clip.tolist() == [clip for clip, key in enumerate(keys) for _ in expected[key]]


def test_one_clip_alone_is_drawn_as_among_many() -> None:
    clip, rank = np.array([0, 1, 1, 2, 2, 2]), np.array([0, 0, 1, 1, 1, 1], np.int16)
    for ranks in (rank, np.zeros(6, np.int16)):
        choice = choice_from_entries(clip, ranks, num_clips=3, weights=np.array([1.0, 2.0]))
        clips, positions = np.arange(60) % 3, np.arange(60)
        together = choice.draw(clips, position=positions, seed=4).tolist()
        alone = [
            choice.draw_one(clip_number, position=at, seed=4)
            for clip_number, at in zip(clips.tolist(), range(60), strict=True)
        ]
        assert alone == together


def test_captions_that_fill_the_context_are_counted() -> None:
    tokenize = load_tokenizer()
    words = ["a", "person", "cuts", "peppers", "unquestionably", "antidisestablishmentarianism"]
    texts = [" ".join(words[number % 6] for number in range(length)) for length in range(1, 120, 3)] + ["naïve " * 60]
    rows = np.arange(1, len(texts))
    full = sum(bool(tokenize(texts[row])[-1]) for row in rows)
    chunks = pa.chunked_array([texts[:7], texts[7:]])
    assert 0 < full < len(rows)
    assert describe_truncation(chunks, rows, tokenize) == f"{full} with 77 tokens or more, truncated to 77"
    assert describe_truncation(chunks, rows[:5], tokenize) == ""


def test_of_very_many_long_captions_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipmill.train.data.captions._MAX_TOKENIZED", 10)
    texts = ["word " * 80, "a rather long caption of few words " * 2 + "and some more of them to be looked at"] * 50
    description = describe_truncation(pa.chunked_array([texts]), np.arange(100), load_tokenizer())
    assert description.startswith("about ") and description.endswith(" with 77 tokens or more, truncated to 77")
