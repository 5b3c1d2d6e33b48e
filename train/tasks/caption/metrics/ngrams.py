"""How often each n-gram occurs in each caption, for all captions at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ORDER = 4

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GramCounts:
    """The n-grams of one order: E entries, one for each n-gram of each caption, by caption and then by n-gram.

    Attributes:
        caption: int64 [E], which caption, from 0.
        gram: int64 [E], which n-gram, from 0.
        count: int64 [E], how often.
        num_grams: the highest gram + 1.
    """

    caption: Ints
    gram: Ints
    count: Ints
    num_grams: int

    def of(self, first: int, last: int) -> "GramCounts":
        """Those of the captions `first`, ..., `last` - 1, which are counted from 0 again."""
        begin, end = np.searchsorted(self.caption, (first, last))
        return GramCounts(self.caption[begin:end] - first, self.gram[begin:end], self.count[begin:end], self.num_grams)


@dataclass(frozen=True)
class Corpus:
    """One candidate for each of V videos, and R references, those of a video side by side, in the order of videos.

    Attributes:
        candidates: n-grams by order, of 1 to 4 words; a candidate's number is its video's.
        references: the same of references.
        candidate_lengths: int64 [V], in words.
        reference_lengths: int64 [R].
        video_of_reference: int64 [R], ascending; every video is there.
    """

    candidates: Sequence[GramCounts]
    references: Sequence[GramCounts]
    candidate_lengths: Ints
    reference_lengths: Ints
    video_of_reference: Ints


def count_grams(captions: Sequence[Sequence[str]]) -> list[GramCounts]:
    """The n-grams of captions given as words, of the orders 1 to 4."""
    known: dict[str, int] = {}
    words = np.array([known.setdefault(word, len(known)) for caption in captions for word in caption], dtype=np.int64)
    lengths = np.array([len(caption) for caption in captions], dtype=np.int64)
    caption = np.repeat(np.arange(len(captions)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # words of the caption from here on

    counts = []
    code, num_grams = words, max(len(known), 1)
    for order in range(1, MAX_ORDER + 1):
        if order > 1:
            # An n-gram is the one that is shorter by a word, and the next word.
            there = left >= order
            pairs = np.zeros_like(code)
            last = np.flatnonzero(there) + order - 1
            pairs[there] = code[there] * max(len(known), 1) + words[last]
            distinct, inverse = np.unique(pairs[there], return_inverse=True)
            code = np.zeros_like(code)
            code[there] = inverse
            num_grams = max(len(distinct), 1)
        there = left >= order
        keys, count = np.unique(caption[there] * num_grams + code[there], return_counts=True)
        counts.append(GramCounts(keys // num_grams, keys % num_grams, count.astype(np.int64), num_grams))
    return counts


def looked_up(wanted: Ints, keys: Ints, values: Ints) -> Ints:
    """The values of the wanted keys, 0 for those that are not there; `keys` ascend."""
    if not len(keys):
        return np.zeros_like(wanted)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
