"""Tokens are open_clip's own, however long a text is."""

import random
from copy import copy

import pytest
from open_clip import SimpleTokenizer

from clipmill.prep.text.tower import merge_pairs, tokens_of

CONTEXT = 77


@pytest.fixture(scope="module")
def tokenizer() -> SimpleTokenizer:
    return SimpleTokenizer()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t ",
        "Hello, world! It's 3 o'clock.",
        "<end_of_text> in the middle <start_of_text>",
        "naïve &amp;amp; 漢字 \U0001f600 ünïcödé",
        "the" * 40 + " after a long word",
        "!" * 500,
        "a\u0000b",
    ],
)
def test_tokens_are_those_of_the_library(tokenizer: SimpleTokenizer, text: str) -> None:
    tokens = tokens_of(tokenizer, text, context_length=CONTEXT)
    assert [*tokens.ids, *[0] * CONTEXT][:CONTEXT] == tokenizer([text])[0].tolist()


@pytest.mark.parametrize(("num_words", "is_cut"), [(74, False), (75, False), (76, True), (2000, True)])
def test_a_text_is_cut_where_the_context_ends_and_it_is_told(
    tokenizer: SimpleTokenizer, num_words: int, is_cut: bool
) -> None:
    text = "dog " * num_words
    tokens = tokens_of(tokenizer, text, context_length=CONTEXT)
    assert tokens.is_cut is is_cut
    assert [*tokens.ids, *[0] * CONTEXT][:CONTEXT] == tokenizer([text])[0].tolist()


def test_long_words_are_merged_as_the_library_does_it(tokenizer: SimpleTokenizer) -> None:
    numbers = random.Random(0)
    for _ in range(300):
        letters = numbers.choice(["ab", "the", "aeioulnrst", "abcdefghijklmnopqrstuvwxyz", "!?.-", "a"])
        word = "".join(numbers.choices(letters, k=numbers.choice([2, 3, 10, 65, 200])))
        assert merge_pairs([*word[:-1], f"{word[-1]}</w>"], ranks=tokenizer.bpe_ranks) == tokenizer.bpe(word).split(" ")


def test_merges_are_the_librarys_for_any_table_of_ranks(tokenizer: SimpleTokenizer) -> None:
    numbers = random.Random(0)
    other = copy(tokenizer)
    for _ in range(200):
        symbols = ["a", "b", "ab", "ba", "aa", "aab", "aba", "bab", "b</w>", "ab</w>", "a</w>"]
        pairs = numbers.sample([(x, y) for x in symbols[:8] for y in symbols], 30)
        other.bpe_ranks, other.cache = {pair: rank for rank, pair in enumerate(pairs)}, {}
        word = "".join(numbers.choices("ab", k=40))
        assert merge_pairs([*word[:-1], f"{word[-1]}</w>"], ranks=other.bpe_ranks) == other.bpe(word).split(" ")


def test_a_word_of_a_hundred_thousand_letters_is_not_merged_in_its_square(tokenizer: SimpleTokenizer) -> None:
    word = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=100_000))
    lookups = 0

    class Counted(dict[tuple[str, str], int]):
        def __getitem__(self, pair: tuple[str, str]) -> int:
            nonlocal lookups
            lookups += 1
            return super().__getitem__(pair)

    pieces = merge_pairs([*word[:-1], f"{word[-1]}</w>"], ranks=Counted(tokenizer.bpe_ranks))
    assert "".join(pieces) == f"{word}</w>"
    assert lookups < 10 * len(word)
