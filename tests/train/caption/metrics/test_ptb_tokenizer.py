import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.train.tasks.caption.ptb_tokenizer import tokenize, tokens_of

# Captions and the output of pycocoevalcap's PTBTokenizer (run with Java) for each caption on its own.
GOLDEN: list[tuple[str, str]] = [
    (caption, tokens) for caption, tokens in json.loads((Path(__file__).parent / "ptb_golden.json").read_bytes())
]
WITH_JAVA = pytest.mark.skipif(shutil.which("java") is None, reason="the original tokenizer needs Java")


def real_tokens(captions: list[str]) -> list[str]:
    """Return the tokens of the original tokenizer.

    A word between two captions keeps the tokenizer from looking beyond the end of a caption.
    """
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    numbered = {2 * number: [{"caption": caption}] for number, caption in enumerate(captions)}
    between = {number + 1: [{"caption": "q"}] for number in numbered}
    tokens = PTBTokenizer().tokenize(dict(sorted({**numbered, **between}.items())))
    assert all(tokens[number] == ["q"] for number in between), "the original tokenizer returned misaligned lines"
    return [tokens[number][0] for number in numbered]


def test_captions_become_the_tokens_of_the_original() -> None:
    assert [(caption, tokenize(caption)) for caption, _ in GOLDEN] == GOLDEN


@WITH_JAVA
def test_the_stored_tokens_are_those_of_the_original() -> None:
    assert real_tokens([caption for caption, _ in GOLDEN]) == [tokens for _, tokens in GOLDEN]


WORDS = """
    a the man's woman isn't they'll Dogs cannot gonna rock 'n' roll o'clock well-known 10-foot 5'10" 1/2 3.5 10:30 a.m.
    U.S. Mr. Jr. etc. No. no. 5 '90s $5 50% #tag @user AT&T and/or w/ (red) [off] <b> ... -- - ! ?! , ; : " “no”
    don\u2019t café 中文 ♥ 😀
    & &amp; www.example.com x@y.org The He it's C++
"""


@WITH_JAVA
def test_random_captions_become_the_tokens_of_the_original() -> None:
    drawn: list[str] = []

    @settings(max_examples=300, database=None, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(WORDS.split()), max_size=9), st.sampled_from(["", ".", "!", " .", "..."]))
    def draw(words: list[str], end: str) -> None:
        drawn.append(" ".join(words) + end)

    draw()
    captions = list(dict.fromkeys(drawn))
    assert [(caption, tokenize(caption)) for caption in captions] == list(
        zip(captions, real_tokens(captions), strict=True)
    )


def test_a_line_end_is_a_space_and_takes_nothing_from_the_next_caption() -> None:
    assert tokenize("a man\r\nplays\u2028guitar\x0bhere\n") == "a man plays guitar here"


def test_soft_hyphens_leave_no_trace() -> None:
    assert tokenize("gui\u00adtar \u00ad solo") == "guitar solo"


def test_half_a_character_is_dropped() -> None:
    assert tokenize("a \ud83d man") == "a man"


def test_nothing_but_punctuation_is_nothing() -> None:
    assert [tokenize(caption) for caption in ("", " ", ".", '"..."', "😀")] == ["", "", "", "", ""]
    assert tokens_of('"..."') == ["''", "...", "''"]


@given(st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_text_has_tokens(text: str) -> None:
    tokens = tokenize(text)
    assert tokens == tokens.strip(" ") and "  " not in tokens
    # The fast path for plain captions gives the same result as the rules.
    assert tokenize(text + " ") == tokenize(text) or text.rstrip() != text
