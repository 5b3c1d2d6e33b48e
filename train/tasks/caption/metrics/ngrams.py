"""BLEU, CIDEr-D, CIDEr and ROUGE-L from n-grams, computed for all captions at once.

BLEU-1 to BLEU-4 (Papineni et al. 2002) as in pycocoevalcap: precisions are those of the whole corpus, not means over
videos. The brevity penalty uses the reference length closest to the candidate's, the shorter one of two. All orders
have equal weights.

CIDEr-D and CIDEr (Vedantam, Zitnick, Parikh: "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015) compare
n-gram vectors whose entries are the count of an n-gram times its idf, log(V) - log(max(1, df)), where df is the number
of the V videos that have the n-gram in any reference (equation 1; a caption's length cancels). Both are means over the
orders 1 to 4 and over references, times 10; words are not stemmed, as in all public code.

- CIDEr (equations 2 and 3): the cosine of the vectors of candidate and reference.
- CIDEr-D (equation 4): entries of the candidate are clipped to those of the reference, and the cosine is multiplied
  by a Gaussian of the difference in length, sigma 6. It is what pycocoevalcap, and with it most papers, call "CIDEr".
  As there, a length is the number of bigrams.

With a single video, every idf is log(1) = 0, and so are both scores.

ROUGE-L (Lin 2004) as in pycocoevalcap: beta 1.2, with the best precision and the best recall of all references, which
may be different ones. In pycocoevalcap, a caption without words equals a reference without words and scores 1; here it
scores 0, by Lin's definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ORDER = 4
# Of pycocoevalcap's BLEU: they keep a precision of 0 / 0 at zero, and are part of published scores.
_TINY = 1e-15
_SMALL = 1e-9
_SIGMA = 6.0
_SCALE = 10.0
_BETA = 1.2

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GramCounts:
    """N-grams of one order: E entries, one per n-gram of each caption, sorted by caption and n-gram.

    Attributes:
        caption: int64 [E], index of the caption.
        gram: int64 [E], index of the n-gram.
        count: int64 [E], number of occurrences.
        num_grams: number of different n-grams.
    """

    caption: Ints
    gram: Ints
    count: Ints
    num_grams: int

    def of(self, first: int, last: int) -> "GramCounts":
        """The counts of captions `first` to `last` - 1, renumbered from 0."""
        begin, end = np.searchsorted(self.caption, (first, last))
        return GramCounts(self.caption[begin:end] - first, self.gram[begin:end], self.count[begin:end], self.num_grams)


@dataclass(frozen=True)
class Corpus:
    """One candidate for each of V videos, and R references, sorted by video.

    Attributes:
        candidates: n-grams of the orders 1 to 4; the index of a candidate is that of its video.
        references: the same for references.
        candidate_lengths: int64 [V], number of words.
        reference_lengths: int64 [R].
        video_of_reference: int64 [R], ascending; every video occurs.
    """

    candidates: Sequence[GramCounts]
    references: Sequence[GramCounts]
    candidate_lengths: Ints
    reference_lengths: Ints
    video_of_reference: Ints


def count_grams(captions: Sequence[Sequence[str]]) -> list[GramCounts]:
    """Count the n-grams of captions, given as lists of words, of the orders 1 to 4."""
    known: dict[str, int] = {}
    words = np.array([known.setdefault(word, len(known)) for caption in captions for word in caption], dtype=np.int64)
    lengths = np.array([len(caption) for caption in captions], dtype=np.int64)
    caption = np.repeat(np.arange(len(captions)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # words to the end of the caption

    counts = []
    code, num_grams = words, max(len(known), 1)
    for order in range(1, MAX_ORDER + 1):
        there = left >= order
        if order > 1:
            # An n-gram is an (n - 1)-gram and the next word.
            pairs = code[there] * max(len(known), 1) + words[np.flatnonzero(there) + order - 1]
            distinct, inverse = np.unique(pairs, return_inverse=True)
            code = np.zeros_like(code)
            code[there] = inverse
            num_grams = max(len(distinct), 1)
        keys, count = np.unique(caption[there] * num_grams + code[there], return_counts=True)
        counts.append(GramCounts(keys // num_grams, keys % num_grams, count.astype(np.int64), num_grams))
    return counts


def look_up(wanted: Ints, keys: Ints, values: Ints) -> Ints:
    """Values of the wanted keys, 0 for missing ones; `keys` are ascending."""
    if not len(keys):
        return np.zeros_like(wanted)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def bleu(corpus: Corpus) -> tuple[Floats, Floats]:
    """BLEU-1 to BLEU-4 of the corpus [4], and of each of its V videos [4, V]."""
    lengths, num_videos = corpus.candidate_lengths, len(corpus.candidate_lengths)
    closest = _closest_lengths(lengths, corpus.reference_lengths, corpus.video_of_reference)
    matches = np.zeros((MAX_ORDER, num_videos))
    possible = np.zeros((MAX_ORDER, num_videos))
    for order, (ours, theirs) in enumerate(zip(corpus.candidates, corpus.references, strict=True)):
        matches[order] = _clipped_matches(ours, theirs, corpus.video_of_reference, num_videos)
        possible[order] = np.maximum(lengths - order, 0)
    whole = _scores(matches.sum(1)[:, None], possible.sum(1)[:, None], lengths.sum()[None], closest.sum()[None])
    return whole[:, 0], _scores(matches, possible, lengths, closest)


def _closest_lengths(candidate_lengths: Ints, reference_lengths: Ints, video_of_reference: Ints) -> Ints:
    """For each video, the reference length closest to the candidate's."""
    distance = np.abs(reference_lengths - candidate_lengths[video_of_reference])
    order = np.lexsort((reference_lengths, distance, video_of_reference))
    first = np.searchsorted(video_of_reference, np.arange(len(candidate_lengths)))
    return reference_lengths[order][first]


def _clipped_matches(ours: GramCounts, theirs: GramCounts, video_of_reference: Ints, num_videos: int) -> Floats:
    """Clipped matches: n-grams of each candidate, each counted at most as often as in one of its references."""
    keys = video_of_reference[theirs.caption] * theirs.num_grams + theirs.gram
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    most = np.maximum.reduceat(theirs.count[order], first) if len(first) else first
    found = np.minimum(ours.count, look_up(ours.caption * ours.num_grams + ours.gram, distinct, most))
    return np.asarray(np.bincount(ours.caption, weights=found, minlength=num_videos), dtype=np.float64)


def _scores(matches: Floats, possible: Floats, length: Ints, reference_length: Ints) -> Floats:
    """BLEU [4, V] from counts [4, V] and lengths [V]."""
    precisions = np.cumprod((matches + _TINY) / (possible + _SMALL), axis=0)
    scores = precisions ** (1 / np.arange(1, MAX_ORDER + 1))[:, None]
    ratio = (length + _TINY) / (reference_length + _SMALL)
    return scores * np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1)), 1.0)


def cider(corpus: Corpus) -> tuple[Floats, Floats]:
    """CIDEr-D and CIDEr of each video, [V] each."""
    num_videos, num_references = len(corpus.candidate_lengths), len(corpus.reference_lengths)
    video_of_reference = corpus.video_of_reference
    bigrams = np.maximum(corpus.candidate_lengths - 1, 0)[video_of_reference]
    bigrams -= np.maximum(corpus.reference_lengths - 1, 0)
    penalty = np.exp(-(bigrams.astype(np.float64) ** 2) / (2 * _SIGMA**2))
    clipped, plain = np.zeros(num_references), np.zeros(num_references)
    for ours, theirs in zip(corpus.candidates, corpus.references, strict=True):
        for_clipped, for_plain = _cosines(ours, theirs, video_of_reference, num_videos)
        clipped += penalty * for_clipped
        plain += for_plain
    scale = _SCALE / (len(corpus.candidates) * np.bincount(video_of_reference, minlength=num_videos))
    clipped_sum = np.bincount(video_of_reference, weights=clipped, minlength=num_videos)
    plain_sum = np.bincount(video_of_reference, weights=plain, minlength=num_videos)
    return scale * clipped_sum, scale * plain_sum


def _cosines(ours: GramCounts, theirs: GramCounts, video_of_reference: Ints, num_videos: int) -> tuple[Floats, Floats]:
    """Cosines of each reference and its candidate for one order, with clipped entries and plain; [R] each."""
    num_references = len(video_of_reference)
    wanted = video_of_reference[theirs.caption] * theirs.num_grams + theirs.gram
    ascending = np.sort(wanted)  # np.unique hashes, which takes ten times as long
    first_of_video = ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]
    num_with = np.bincount(first_of_video % theirs.num_grams, minlength=theirs.num_grams)
    idf = np.log(num_videos) - np.log(np.maximum(num_with, 1))

    our_norm = np.sqrt(np.bincount(ours.caption, weights=(ours.count * idf[ours.gram]) ** 2, minlength=num_videos))
    their_entry = theirs.count * idf[theirs.gram]
    their_norm = np.sqrt(np.bincount(theirs.caption, weights=their_entry**2, minlength=num_references))

    # For each n-gram of a reference, the entry of its candidate.
    our_entry = look_up(wanted, ours.caption * ours.num_grams + ours.gram, ours.count) * idf[theirs.gram]
    clipped = np.bincount(
        theirs.caption, weights=np.minimum(our_entry, their_entry) * their_entry, minlength=num_references
    )
    plain = np.bincount(theirs.caption, weights=our_entry * their_entry, minlength=num_references)
    norms = our_norm[video_of_reference] * their_norm
    norms = np.where(norms == 0, 1.0, norms)
    return clipped / norms, plain / norms


def rouge_l(candidate: str, references: Sequence[str]) -> float:
    """ROUGE-L of a tokenized caption against at least one tokenized reference."""
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
    """Positions of each word, as a bit set."""
    places: dict[str, int] = {}
    for place, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << place
    return places


def _common_length(places: dict[str, int], num_words: int, others: Sequence[str]) -> int:
    """Length of the longest common subsequence, computed bit-parallel row by row (Hyyrö 2004)."""
    all_places = (1 << num_words) - 1
    row = all_places
    for word in others:
        there = row & places.get(word, 0)
        row = (row + there | row - there) & all_places
    return num_words - row.bit_count()
