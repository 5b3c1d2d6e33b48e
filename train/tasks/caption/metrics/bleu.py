"""BLEU-1 to BLEU-4 (Papineni et al. 2002) as pycocoevalcap computes them.

Precisions are those of the whole corpus, not means over videos. The brevity penalty takes the reference whose length
is closest to the candidate's, the shorter of two. Orders have equal weights.
"""

import numpy as np

from train.tasks.caption.metrics.ngrams import MAX_ORDER, Corpus, Floats, GramCounts, Ints, looked_up

# They keep a precision of 0 / 0 at zero, and are part of the published numbers.
_TINY = 1e-15
_SMALL = 1e-9


def bleu(corpus: Corpus) -> tuple[Floats, Floats]:
    """BLEU of the orders 1 to 4 for the corpus [4] and for each of its V videos [4, V]."""
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
    """Of each video the reference length that is closest to the candidate's."""
    distance = np.abs(reference_lengths - candidate_lengths[video_of_reference])
    order = np.lexsort((reference_lengths, distance, video_of_reference))
    first = np.searchsorted(video_of_reference, np.arange(len(candidate_lengths)))
    return reference_lengths[order][first]


def _clipped_matches(ours: GramCounts, theirs: GramCounts, video_of_reference: Ints, num_videos: int) -> Floats:
    """How many n-grams of each candidate are in its references, each at most as often as in one of them."""
    keys = video_of_reference[theirs.caption] * theirs.num_grams + theirs.gram
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    most = np.maximum.reduceat(theirs.count[order], first) if len(first) else first
    found = np.minimum(ours.count, looked_up(ours.caption * ours.num_grams + ours.gram, distinct, most))
    return np.asarray(np.bincount(ours.caption, weights=found, minlength=num_videos), dtype=np.float64)


def _scores(matches: Floats, possible: Floats, length: Ints, reference_length: Ints) -> Floats:
    """BLEU [4, V] of counts [4, V] and lengths [V]."""
    precisions = np.cumprod((matches + _TINY) / (possible + _SMALL), axis=0)
    scores = precisions ** (1 / np.arange(1, MAX_ORDER + 1))[:, None]
    ratio = (length + _TINY) / (reference_length + _SMALL)
    return scores * np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1)), 1.0)
