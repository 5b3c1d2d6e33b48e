"""CLIP's byte-pair encoding in bounded time, for captions of any length.

open_clip's `SimpleTokenizer` encodes the complete text, although a tower reads only 77 tokens of it. Its time is
quadratic in the length of a word: a word of 100,000 letters takes minutes. Here, encoding stops at the first token that
no tower reads, and long words are merged with a heap. The resulting tokens are identical.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

_LONG_WORD_CHARS = 64  # for shorter words, the tokenizer itself is as fast, and it caches words


@dataclass(frozen=True)
class Encoded:
    """Embeddings or sequences for some texts.

    Attributes:
        rows: Vectors of one text after another, float16 [sum of lengths, width]. Rows may be non-finite. Embeddings are
            normalised to unit length.
        lengths: Number of rows of each text, int64 [texts]: 1 for an embedding, the number of tokens for a sequence.
        num_cut: Number of texts truncated to the encoder's context length.
    """

    rows: np.ndarray
    lengths: np.ndarray
    num_cut: int

    @property
    def is_finite(self) -> np.ndarray:
        """Texts whose rows are all finite, bool [texts]."""
        return texts_with_all(np.isfinite(self.rows).all(axis=1), self.lengths)


def texts_with_all(is_good: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the texts whose rows are all good, bool [texts], given `is_good` [sum of lengths] and the lengths."""
    num_bad = np.concatenate([[0], np.cumsum(~is_good)])
    ends = np.cumsum(lengths)
    return num_bad[ends] == num_bad[ends - lengths]


class Tokens(NamedTuple):
    """Tokens of one text, including the start and end tokens."""

    ids: list[int]
    is_cut: bool


def tokens_of(tokenizer: Any, text: str, *, context_length: int) -> Tokens:
    """Return the tokens of `text` as open_clip's `SimpleTokenizer` gives them, at most `context_length`."""
    begin, end = tokenizer.sot_token_id, tokenizer.eot_token_id
    ids = [begin]
    for word in tokenizer.pat.finditer(tokenizer.clean_fn(text)):
        letters = "".join(tokenizer.byte_encoder[byte] for byte in word.group().encode("utf-8"))
        if len(letters) > _LONG_WORD_CHARS:
            pieces = merge_pairs([*letters[:-1], f"{letters[-1]}</w>"], ranks=tokenizer.bpe_ranks)
        else:
            pieces = tokenizer.bpe(letters).split(" ")
        ids.extend(tokenizer.encoder[piece] for piece in pieces)
        if len(ids) >= context_length:
            return Tokens([*ids[: context_length - 1], end], is_cut=True)
    return Tokens([*ids, end], is_cut=False)


def merge_pairs(symbols: list[str], *, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Apply byte-pair encoding (Sennrich et al. 2016) to the symbols of a word, in O(n log n) for n symbols.

    The pair of lowest rank is merged everywhere, from left to right, until no remaining pair has a rank.
    """
    after = [*range(1, len(symbols)), -1]
    before = list(range(-1, len(symbols) - 1))
    symbols = list(symbols)
    heap = [(ranks[pair], position) for position, pair in enumerate(pairwise(symbols)) if pair in ranks]
    heapq.heapify(heap)
    pair_of_rank: dict[int, tuple[str, str]] = {ranks[pair]: pair for pair in set(pairwise(symbols)) if pair in ranks}
    while heap:
        # As in the original algorithm, all occurrences of a pair are merged before pairs that these merges create.
        rank, positions = heap[0][0], []
        while heap and heap[0][0] == rank:
            positions.append(heapq.heappop(heap)[1])
        first, second = pair_of_rank[rank]
        changed = []
        for position in positions:
            follower = after[position]
            if symbols[position] != first or follower < 0 or symbols[follower] != second:
                continue
            symbols[position], symbols[follower] = first + second, ""
            after[position] = after[follower]
            if after[position] >= 0:
                before[after[position]] = position
            changed.append(position)
        for position in changed:
            for left in (before[position], position):
                if left >= 0 and after[left] >= 0:
                    pair = symbols[left], symbols[after[left]]
                    if pair in ranks:
                        pair_of_rank[ranks[pair]] = pair
                        heapq.heappush(heap, (ranks[pair], left))
    return [symbol for symbol in symbols if symbol]
