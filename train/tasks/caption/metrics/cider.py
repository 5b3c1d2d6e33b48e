"""CIDEr-D and CIDEr (Vedantam, Zitnick, Parikh: "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015).

Both compare n-gram vectors whose entries are the count of an n-gram times its idf, log(V) - log(max(1, df)), where df
is the number of the V videos that have the n-gram in any reference (equation 1; a caption's length cancels). Both are
means over the orders 1 to 4 and over references, times 10; words are not stemmed, as in all public code.

- CIDEr (equations 2 and 3): the cosine of the candidate's and the reference's vectors.
- CIDEr-D (equation 4): a candidate's entries count at most as much as the reference's, and a Gaussian of the
  difference in length, sigma 6, multiplies the cosine. It is what pycocoevalcap and with it most papers call "CIDEr".
  As there, a length is the number of bigrams.

With a single video every idf is log(1) = 0, and so is either score.
"""

import numpy as np

from train.tasks.caption.metrics.ngrams import Corpus, Floats, GramCounts, Ints, looked_up

_SIGMA = 6.0
_SCALE = 10.0


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
    """Of each reference and its candidate, for one order: the cosine with clipped entries, and as it is; [R] each."""
    num_references = len(video_of_reference)
    wanted = video_of_reference[theirs.caption] * theirs.num_grams + theirs.gram
    ascending = np.sort(wanted)  # np.unique hashes, which takes ten times as long for such keys
    first_of_video = ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]
    num_with = np.bincount(first_of_video % theirs.num_grams, minlength=theirs.num_grams)
    idf = np.log(num_videos) - np.log(np.maximum(num_with, 1))

    our_norm = np.sqrt(np.bincount(ours.caption, weights=(ours.count * idf[ours.gram]) ** 2, minlength=num_videos))
    their_entry = theirs.count * idf[theirs.gram]
    their_norm = np.sqrt(np.bincount(theirs.caption, weights=their_entry**2, minlength=num_references))

    # Each n-gram of a reference beside the same one of its candidate.
    our_entry = looked_up(wanted, ours.caption * ours.num_grams + ours.gram, ours.count) * idf[theirs.gram]
    clipped = np.bincount(
        theirs.caption, weights=np.minimum(our_entry, their_entry) * their_entry, minlength=num_references
    )
    plain = np.bincount(theirs.caption, weights=our_entry * their_entry, minlength=num_references)
    norms = our_norm[video_of_reference] * their_norm
    norms = np.where(norms == 0, 1.0, norms)
    return clipped / norms, plain / norms
