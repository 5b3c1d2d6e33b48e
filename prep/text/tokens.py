"""Tokens of CLIP's own byte-pair encoding in bounded time, for captions of any length.

open_clip's `SimpleTokenizer` encodes a text to its end although a tower reads 77 tokens of it, and takes time that
grows with the square of a word's length: a word of 100,000 letters is minutes. Here encoding stops at the first
token that no tower reads, and long words are merged with a heap. The tokens are the same.
"""

import heapq
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

_LONG_WORD_CHARS = 64  # below, the tokenizer's own merge is as fast, and remembers the words it has seen


class Tokens(NamedTuple):
    """Tokens of one text, between the marks of its begin and end."""

    ids: list[int]
    is_cut: bool


def tokens_of(tokenizer: Any, text: str, *, context_length: int) -> Tokens:
    """Tokens of `text` as open_clip's `SimpleTokenizer` gives them, at most `context_length` of them."""
    begin, end = tokenizer.sot_token_id, tokenizer.eot_token_id
    ids = [begin]
    for word in tokenizer.pat.finditer(tokenizer.clean_fn(text)):
        letters = "".join(tokenizer.byte_encoder[byte] for byte in word.group().encode("utf-8"))
        if len(letters) > _LONG_WORD_CHARS:
            pieces = merged([*letters[:-1], f"{letters[-1]}</w>"], ranks=tokenizer.bpe_ranks)
        else:
            pieces = tokenizer.bpe(letters).split(" ")
        ids.extend(tokenizer.encoder[piece] for piece in pieces)
        if len(ids) >= context_length:
            return Tokens([*ids[: context_length - 1], end], is_cut=True)
    return Tokens([*ids, end], is_cut=False)


def merged(symbols: list[str], *, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding (Sennrich et al. 2016): merges the pair of the lowest rank, everywhere from left to right,
    until no pair has a rank; n symbols take O(n log n)."""
    after = [*range(1, len(symbols)), -1]
    before = list(range(-1, len(symbols) - 1))
    symbols = list(symbols)
    heap = [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]
    heapq.heapify(heap)
    pair_of_rank: dict[int, tuple[str, str]] = {ranks[pair]: pair for pair in set(pairwise(symbols)) if pair in ranks}
    while heap:
        # A pass takes every place of one pair before it looks at pairs that arise meanwhile, as the original does.
        rank, places = heap[0][0], []
        while heap and heap[0][0] == rank:
            places.append(heapq.heappop(heap)[1])
        first, second = pair_of_rank[rank]
        touched = []
        for place in places:
            follower = after[place]
            if symbols[place] != first or follower < 0 or symbols[follower] != second:
                continue
            symbols[place], symbols[follower] = first + second, ""
            after[place] = after[follower]
            if after[place] >= 0:
                before[after[place]] = place
            touched.append(place)
        for place in touched:
            for left in (before[place], place):
                if left >= 0 and after[left] >= 0:
                    pair = symbols[left], symbols[after[left]]
                    if pair in ranks:
                        pair_of_rank[ranks[pair]] = pair
                        heapq.heappush(heap, (ranks[pair], left))
    return [symbol for symbol in symbols if symbol]
