"""ROUGE-L (Lin 2004) as pycocoevalcap computes it: beta 1.2, the best precision and the best recall of all references.

The two need not come from the same reference. There a caption without words is one word that is empty, and equals a
reference without words: 1. Here it has nothing in common with any: 0, as by Lin's definition.
"""

from collections.abc import Sequence

_BETA = 1.2


def rouge_l(candidate: str, references: Sequence[str]) -> float:
    """ROUGE-L of a tokenized caption beside its tokenized references; at least one."""
    if not candidate:
        return 0.0
    words = candidate.split(" ")
    places = _places(words)
    precision = recall = 0.0
    for reference in references:
        others = reference.split(" ")
        common = _common_length(places, len(words), others)
        precision = max(precision, common / len(words))
        recall = max(recall, common / len(others))
    if precision == 0 or recall == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def _places(words: Sequence[str]) -> dict[str, int]:
    """Of each word the set of its places, as bits."""
    places: dict[str, int] = {}
    for place, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << place
    return places


def _common_length(places: dict[str, int], num_words: int, others: Sequence[str]) -> int:
    """The length of the longest common subsequence, a row of the usual table at a time (Hyyrö 2004)."""
    all_places = (1 << num_words) - 1
    row = all_places
    for word in others:
        there = row & places.get(word, 0)
        row = (row + there | row - there) & all_places
    return num_words - row.bit_count()
