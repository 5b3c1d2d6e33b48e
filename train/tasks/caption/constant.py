"""What a captioner that ignores the video would best say: the same of every clip."""

from collections.abc import Mapping, Sequence

import numpy as np

from train.tasks.caption.metrics.ngrams import Floats, count_grams
from train.tasks.caption.metrics.ptb_tokenizer import tokenize
from train.tasks.caption.metrics.scores import score_captions, without_words

RULE = "of all its captions the one with the highest mean CIDEr-D as a caption of every clip"
_SHORTLIST = 8


def best_constant(references: Mapping[str, Sequence[str]]) -> str:
    """The one of these captions that fits best to all clips: by mean CIDEr-D, among those with the highest mean CIDEr.

    CIDEr of one caption with every clip costs one product with their mean; CIDEr-D has no such way.

    Args:
        references: captions of each clip, one at least; clips whose captions have no words count for nothing.
    """
    wordless = set(without_words(references))
    if len(wordless) == len(references):
        return ""
    references = {clip: its for clip, its in references.items() if clip not in wordless}
    captions = [caption for its in references.values() for caption in its]
    clip_of = np.repeat(np.arange(len(references)), [len(its) for its in references.values()])
    order = np.argsort(-mean_cider([tokenize(caption).split() for caption in captions], clip_of), kind="stable")
    shortlist = list(dict.fromkeys(captions[place] for place in order))[:_SHORTLIST]
    scores = [
        score_captions(dict.fromkeys(references, caption), references, with_java=False).means["cider_d"]
        for caption in shortlist
    ]
    return shortlist[int(np.argmax(scores))]


def mean_cider(captions: Sequence[Sequence[str]], clip_of: np.ndarray) -> Floats:
    """CIDEr of each caption as the caption of every clip, mean over clips, [R], but for the factor 10.

    Args:
        captions: in words.
        clip_of: int64 [R], the clip of each, from 0; every clip has some.
    """
    num_clips = int(clip_of[-1]) + 1
    share = 1 / (num_clips * np.bincount(clip_of)[clip_of])
    total: Floats = np.zeros(len(captions))
    counts = count_grams(captions)
    for grams in counts:
        clip_and_gram = np.unique(clip_of[grams.caption] * grams.num_grams + grams.gram)
        num_with = np.bincount(clip_and_gram % grams.num_grams, minlength=grams.num_grams)
        entry = grams.count * (np.log(num_clips) - np.log(np.maximum(num_with, 1)))[grams.gram]
        norm = np.sqrt(np.bincount(grams.caption, weights=entry**2, minlength=len(captions)))
        unit = entry / np.where(norm == 0, 1.0, norm)[grams.caption]
        mean = np.bincount(grams.gram, weights=unit * share[grams.caption], minlength=grams.num_grams)
        total += np.bincount(grams.caption, weights=unit * mean[grams.gram], minlength=len(captions))
    return total / len(counts)
