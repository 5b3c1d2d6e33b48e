"""Score generated captions against references with all metrics; the best constant caption as a baseline."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.tasks.caption.metrics.java import Meteor, MetricUnavailable, check_jars, spice
from clipmill.train.tasks.caption.metrics.ngrams import MAX_ORDER, Corpus, Floats, bleu, cider, count_grams, rouge_l
from clipmill.train.tasks.caption.metrics.ptb_tokenizer import tokenize
from clipmill.train.tasks.caption.settings import METRIC_LABELS

_MAX_NAMED = 3
# How the constant caption is chosen, for result files.
CONSTANT_RULE = "of all its captions the one with the highest mean CIDEr-D as a caption of every clip"
_SHORTLIST = 8


@dataclass(frozen=True)
class CaptionScores:
    """Metrics of captions.

    Attributes:
        means: metric to value, keys as in METRIC_LABELS; means over videos, but BLEU and METEOR of the corpus.
        per_video: video to metric to value, in the order of the candidates.
        absent: metric to the reason why it is missing.
        empty: videos whose captions have no words; they score 0 in every metric.
        num_references: number of references of all videos.
        idf: source of CIDEr's document frequencies.
        ids_hash: hash of the video ids, so that scores of different sets are not compared by mistake.
    """

    means: dict[str, float]
    per_video: dict[str, dict[str, float]]
    absent: dict[str, str]
    empty: tuple[str, ...]
    num_references: int
    idf: str
    ids_hash: str

    @property
    def num_videos(self) -> int:
        """Number of scored videos."""
        return len(self.per_video)


def score_captions(
    candidates: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    *,
    with_java: bool = True,
    spice_jars: Path | None = None,
    meteor: Meteor | None = None,
) -> CaptionScores:
    """Score one caption per video against all its references.

    Args:
        candidates: video id to generated caption, which may be empty.
        references: video id to captions, for the same videos; at least one of each has words (`without_words` lists the
            others).
        with_java: compute METEOR and SPICE, which take seconds to start, and time for each video.
        spice_jars: folder of the two jars that SPICE needs.
        meteor: an entered instance, to score several sets of captions with one program; a new one by default.

    Raises:
        UserError: no videos, not the same videos, a video without references that have words, no jars in `spice_jars`.
    """
    if not candidates:
        raise UserError("there are no captions to score", hint="a split without captioned videos has no scores")
    _require_videos([video_id for video_id in candidates if not references.get(video_id)], "without references")
    _require_videos([video_id for video_id in references if video_id not in candidates], "without a caption to score")
    if spice_jars is not None:
        check_jars(spice_jars)
    tokens = cache(tokenize)
    ours = {video_id: tokens(caption) for video_id, caption in candidates.items()}
    theirs = {video_id: [tokens(caption) for caption in references[video_id]] for video_id in candidates}
    _require_videos(
        [video_id for video_id, captions in theirs.items() if not any(captions)], "without words to compare with"
    )

    def score_spice() -> tuple[float, dict[str, float]]:
        if spice_jars is None:
            raise MetricUnavailable("its jars were not given (--spice-jars)")
        return spice(ours, theirs, jars=spice_jars)

    columns, means = _plain_scores(ours, theirs)
    absent: dict[str, str] = {}
    with nullcontext(meteor) if meteor is not None else Meteor() as own:
        for name, metric in (("meteor", lambda: own(ours, theirs)), ("spice", score_spice)):
            try:
                if not with_java:
                    raise MetricUnavailable("not requested")
                means[name], columns[name] = metric()
            except MetricUnavailable as reason:
                absent[name] = str(reason)
    num_references = sum(map(len, theirs.values()))
    return CaptionScores(
        means={name: means[name] for name in METRIC_LABELS if name in means},
        per_video={
            video_id: {name: columns[name][video_id] for name in METRIC_LABELS if name in columns}
            for video_id in candidates
        },
        absent=absent,
        empty=tuple(video_id for video_id, caption in ours.items() if not caption),
        num_references=num_references,
        idf=f"the {num_references:,} references of these {len(ours):,} videos",
        ids_hash=hash_of_ids(candidates),
    )


def without_words(references: Mapping[str, Sequence[str]]) -> list[str]:
    """Videos whose references all lack words, so that no caption can be compared with them."""
    return [video_id for video_id, captions in references.items() if not any(map(tokenize, captions))]


def name_videos(video_ids: Sequence[str]) -> str:
    """The first few videos, as text."""
    return ", ".join(video_ids[:_MAX_NAMED]) + (", ..." if len(video_ids) > _MAX_NAMED else "")


def hash_of_ids(ids: Iterable[str]) -> str:
    """16 hexadecimal digits that identify a set of videos, in any order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain_scores(
    ours: Mapping[str, str], theirs: Mapping[str, Sequence[str]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Metrics that need no Java: per video, and overall."""
    captions = [caption.split() for caption in ours.values()]
    captions += [caption.split() for references in theirs.values() for caption in references]
    lengths = np.array([len(words) for words in captions], dtype=np.int64)
    counts = count_grams(captions)
    num_videos = len(ours)
    corpus = Corpus(
        candidates=[of_order.of(0, num_videos) for of_order in counts],
        references=[of_order.of(num_videos, len(captions)) for of_order in counts],
        candidate_lengths=lengths[:num_videos],
        reference_lengths=lengths[num_videos:],
        video_of_reference=np.repeat(np.arange(num_videos), [len(references) for references in theirs.values()]),
    )
    corpus_bleu, video_bleu = bleu(corpus)
    cider_d, plain_cider = cider(corpus)
    rows: dict[str, Floats] = {f"bleu{order + 1}": video_bleu[order] for order in range(MAX_ORDER)}
    rows |= {"cider_d": cider_d, "cider": plain_cider}
    rows["rouge_l"] = np.array([rouge_l(caption, theirs[video_id]) for video_id, caption in ours.items()])
    rows["exact_match"] = np.array([float(caption != "" and caption in theirs[v]) for v, caption in ours.items()])
    means = {name: float(row.mean()) for name, row in rows.items()}
    means |= {f"bleu{order + 1}": float(corpus_bleu[order]) for order in range(MAX_ORDER)}
    return {name: dict(zip(ours, row.tolist(), strict=True)) for name, row in rows.items()}, means


def _require_videos(lacking: Sequence[str], what: str) -> None:
    if lacking:
        raise UserError(
            f"{count_noun(len(lacking), 'video')} {'is' if len(lacking) == 1 else 'are'} {what}: "
            f"{name_videos(lacking)}",
            hint="score the videos that have both, and no others",
        )


def best_constant(references: Mapping[str, Sequence[str]]) -> str:
    """The best caption that ignores the clip: the one with the highest mean CIDEr-D as a caption of every clip.

    CIDEr of one caption with every clip is a single product with their mean; CIDEr-D is not, and is computed for a
    shortlist by CIDEr.

    Args:
        references: captions of each clip, at least one; clips whose captions have no words are ignored.
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
    """Mean over clips of the CIDEr of each caption as the caption of every clip, [R], without the factor 10.

    Args:
        captions: as lists of words.
        clip_of: int64 [R], the clip of each caption, from 0, ascending; every clip has some.
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
