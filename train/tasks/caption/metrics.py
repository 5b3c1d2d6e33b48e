"""Caption metrics (BLEU, CIDEr-D, CIDEr and ROUGE-L; METEOR and SPICE in Java), and the best constant caption.

BLEU-1 to BLEU-4 (Papineni et al. 2002) are computed as in pycocoevalcap. Precisions are computed over the complete
corpus, and not averaged over videos. The brevity penalty uses the reference length that is closest to the candidate's
length, or the shorter of two equally close lengths. All orders have equal weights.

CIDEr-D and CIDEr (Vedantam, Zitnick, Parikh: "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015) compare
n-gram vectors. An entry is the count of an n-gram times its idf, log(V) - log(max(1, df)), where df is the number of
videos, out of V, with the n-gram in any reference (equation 1; the length of a caption cancels out). Both metrics are
means over the orders 1 to 4 and over the references, times 10. As in all public code, words are not stemmed.

- CIDEr (equations 2 and 3): the cosine of the vectors of candidate and reference.
- CIDEr-D (equation 4): the candidate's entries are clipped to the reference's entries, and the cosine is multiplied by
  a Gaussian of the difference in length with sigma 6. pycocoevalcap, and therefore most papers, call this metric
  "CIDEr". As in pycocoevalcap, the length is the number of bigrams.

With a single video, every idf is log(1) = 0, so both scores are 0.

ROUGE-L (Lin 2004) is computed as in pycocoevalcap: beta is 1.2, and the best precision and the best recall over all
references are used, even if they are from different references. In pycocoevalcap, a caption without words equals a
reference without words, and scores 1. In clipmill, such a caption scores 0, in accordance with Lin's definition.

Candidates are generated captions.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.tasks.caption.java import Meteor, MetricUnavailable, check_jars, spice
from clipmill.train.tasks.caption.ptb_tokenizer import tokenize
from clipmill.train.tasks.caption.spec import METRIC_LABELS

MAX_ORDER = 4
# Constants of pycocoevalcap's BLEU. They make a precision of 0 / 0 almost zero, and affect published scores.
_TINY = 1e-15
_SMALL = 1e-9
_SIGMA = 6.0
_SCALE = 10.0
_BETA = 1.2

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GramCounts:
    """Counts of the n-grams of one order: E entries, one per distinct n-gram of each caption.

    The entries are sorted by caption, and then by n-gram.

    Attributes:
        caption: Index of the caption, int64 [E].
        gram: Index of the n-gram, int64 [E].
        count: Number of occurrences in the caption, int64 [E].
        num_grams: Number of distinct n-grams in all captions.
    """

    caption: Ints
    gram: Ints
    count: Ints
    num_grams: int

    def select(self, first: int, last: int) -> "GramCounts":
        """Return the counts of the captions `first` to `last` - 1, renumbered from 0."""
        start, end = np.searchsorted(self.caption, (first, last))
        return GramCounts(self.caption[start:end] - first, self.gram[start:end], self.count[start:end], self.num_grams)


@dataclass(frozen=True)
class Corpus:
    """One candidate for each of V videos, and R references, sorted by video.

    Attributes:
        candidates: N-grams of the candidates, for the orders 1 to 4. The index of a candidate is the index of its
            video.
        references: N-grams of the references, for the orders 1 to 4.
        candidate_lengths: Number of words of each candidate, int64 [V].
        reference_lengths: Number of words of each reference, int64 [R].
        video_of_reference: Index of each reference's video, int64 [R], ascending. Every video has a reference.
    """

    candidates: Sequence[GramCounts]
    references: Sequence[GramCounts]
    candidate_lengths: Ints
    reference_lengths: Ints
    video_of_reference: Ints


def count_grams(captions: Sequence[Sequence[str]]) -> list[GramCounts]:
    """Count the n-grams of the orders 1 to 4 in captions (lists of words)."""
    vocabulary: dict[str, int] = {}
    words = np.array(
        [vocabulary.setdefault(word, len(vocabulary)) for caption in captions for word in caption], dtype=np.int64
    )
    lengths = np.array([len(caption) for caption in captions], dtype=np.int64)
    caption = np.repeat(np.arange(len(captions)), lengths)
    # Number of words from each word to the end of its caption.
    num_remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))

    counts = []
    code, num_grams = words, max(len(vocabulary), 1)
    for order in range(1, MAX_ORDER + 1):
        has_order = num_remaining >= order
        if order > 1:
            # An n-gram consists of an (n - 1)-gram and the next word.
            pairs = code[has_order] * max(len(vocabulary), 1) + words[np.flatnonzero(has_order) + order - 1]
            distinct_pairs, inverse = np.unique(pairs, return_inverse=True)
            code = np.zeros_like(code)
            code[has_order] = inverse
            num_grams = max(len(distinct_pairs), 1)
        keys, count = np.unique(caption[has_order] * num_grams + code[has_order], return_counts=True)
        counts.append(GramCounts(keys // num_grams, keys % num_grams, count.astype(np.int64), num_grams))
    return counts


def look_up(queries: Ints, keys: Ints, values: Ints) -> Ints:
    """Return the value of each key in `queries`, or 0 if `keys`, which must be ascending, lacks the key."""
    if not len(keys):
        return np.zeros_like(queries)
    index = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[index] == queries, values[index], 0)


def bleu(corpus: Corpus) -> tuple[Floats, Floats]:
    """Compute BLEU-1 to BLEU-4 for the corpus, [4], and for each of its V videos, [4, V]."""
    lengths, num_videos = corpus.candidate_lengths, len(corpus.candidate_lengths)
    closest_lengths = _closest_lengths(lengths, corpus.reference_lengths, corpus.video_of_reference)
    matches = np.zeros((MAX_ORDER, num_videos))
    num_grams = np.zeros((MAX_ORDER, num_videos))
    for order, (candidates, references) in enumerate(zip(corpus.candidates, corpus.references, strict=True)):
        matches[order] = _clipped_matches(candidates, references, corpus.video_of_reference, num_videos)
        num_grams[order] = np.maximum(lengths - order, 0)
    corpus_scores = _scores(
        matches.sum(1)[:, None], num_grams.sum(1)[:, None], lengths.sum()[None], closest_lengths.sum()[None]
    )
    return corpus_scores[:, 0], _scores(matches, num_grams, lengths, closest_lengths)


def _closest_lengths(candidate_lengths: Ints, reference_lengths: Ints, video_of_reference: Ints) -> Ints:
    """Return the reference length that is closest to the candidate's length, for each video."""
    distance = np.abs(reference_lengths - candidate_lengths[video_of_reference])
    order = np.lexsort((reference_lengths, distance, video_of_reference))
    first = np.searchsorted(video_of_reference, np.arange(len(candidate_lengths)))
    return reference_lengths[order][first]


def _clipped_matches(
    candidates: GramCounts, references: GramCounts, video_of_reference: Ints, num_videos: int
) -> Floats:
    """Count the matching n-grams of each candidate. An n-gram counts at most as often as in any single reference."""
    keys = video_of_reference[references.caption] * references.num_grams + references.gram
    order = np.argsort(keys, kind="stable")
    distinct_keys, starts = np.unique(keys[order], return_index=True)
    max_counts = np.maximum.reduceat(references.count[order], starts) if len(starts) else starts
    matches = np.minimum(
        candidates.count,
        look_up(candidates.caption * candidates.num_grams + candidates.gram, distinct_keys, max_counts),
    )
    return np.asarray(np.bincount(candidates.caption, weights=matches, minlength=num_videos), dtype=np.float64)


def _scores(matches: Floats, num_grams: Floats, length: Ints, reference_length: Ints) -> Floats:
    """Return BLEU [4, V] from the counts [4, V] of matching and of all n-grams, and from lengths [V]."""
    precisions = np.cumprod((matches + _TINY) / (num_grams + _SMALL), axis=0)
    scores = precisions ** (1 / np.arange(1, MAX_ORDER + 1))[:, None]
    ratio = (length + _TINY) / (reference_length + _SMALL)
    return scores * np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1)), 1.0)


def cider(corpus: Corpus) -> tuple[Floats, Floats]:
    """Compute CIDEr-D and CIDEr for each video, [V] each."""
    num_videos, num_references = len(corpus.candidate_lengths), len(corpus.reference_lengths)
    video_of_reference = corpus.video_of_reference
    difference = np.maximum(corpus.candidate_lengths - 1, 0)[video_of_reference]
    difference -= np.maximum(corpus.reference_lengths - 1, 0)
    penalty = np.exp(-(difference.astype(np.float64) ** 2) / (2 * _SIGMA**2))
    clipped, plain = np.zeros(num_references), np.zeros(num_references)
    for candidates, references in zip(corpus.candidates, corpus.references, strict=True):
        clipped_cosine, plain_cosine = _cosines(candidates, references, video_of_reference, num_videos)
        clipped += penalty * clipped_cosine
        plain += plain_cosine
    scale = _SCALE / (len(corpus.candidates) * np.bincount(video_of_reference, minlength=num_videos))
    clipped_sum = np.bincount(video_of_reference, weights=clipped, minlength=num_videos)
    plain_sum = np.bincount(video_of_reference, weights=plain, minlength=num_videos)
    return scale * clipped_sum, scale * plain_sum


def _cosines(
    candidates: GramCounts, references: GramCounts, video_of_reference: Ints, num_videos: int
) -> tuple[Floats, Floats]:
    """Return the cosine of each reference and its candidate for one order, [R], with clipped and with plain entries."""
    num_references = len(video_of_reference)
    keys = video_of_reference[references.caption] * references.num_grams + references.gram
    sorted_keys = np.sort(keys)  # np.unique uses hashing, which takes much longer
    distinct_keys = sorted_keys[np.flatnonzero(np.diff(sorted_keys, prepend=-1))]
    document_frequency = np.bincount(distinct_keys % references.num_grams, minlength=references.num_grams)
    idf = np.log(num_videos) - np.log(np.maximum(document_frequency, 1))

    candidate_norm = np.sqrt(
        np.bincount(candidates.caption, weights=(candidates.count * idf[candidates.gram]) ** 2, minlength=num_videos)
    )
    reference_entry = references.count * idf[references.gram]
    reference_norm = np.sqrt(np.bincount(references.caption, weights=reference_entry**2, minlength=num_references))

    # Entry of the candidate for each n-gram of a reference.
    candidate_entry = (
        look_up(keys, candidates.caption * candidates.num_grams + candidates.gram, candidates.count)
        * idf[references.gram]
    )
    clipped = np.bincount(
        references.caption,
        weights=np.minimum(candidate_entry, reference_entry) * reference_entry,
        minlength=num_references,
    )
    plain = np.bincount(references.caption, weights=candidate_entry * reference_entry, minlength=num_references)
    norms = candidate_norm[video_of_reference] * reference_norm
    norms = np.where(norms == 0, 1.0, norms)
    return clipped / norms, plain / norms


def rouge_l(candidate: str, references: Sequence[str]) -> float:
    """Compute ROUGE-L of a tokenized caption against one or more tokenized references."""
    if not candidate:
        return 0.0
    words = candidate.split(" ")
    positions: dict[str, int] = {}  # bit mask of the positions of each word
    for position, word in enumerate(words):
        positions[word] = positions.get(word, 0) | 1 << position
    precision = recall = 0.0
    for reference in references:
        reference_words = reference.split(" ")
        common_length = _common_length(positions, len(words), reference_words)
        precision = max(precision, common_length / len(words))
        recall = max(recall, common_length / len(reference_words))
    if precision == 0 or recall == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def _common_length(positions: dict[str, int], num_words: int, reference_words: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, with the bit-parallel algorithm of Hyyrö (2004)."""
    all_positions = (1 << num_words) - 1
    row = all_positions
    for word in reference_words:
        matching = row & positions.get(word, 0)
        row = (row + matching | row - matching) & all_positions
    return num_words - row.bit_count()


_MAX_LISTED = 3
# Rule for choosing the constant caption, as stored in result files.
CONSTANT_RULE = "the caption with the highest mean CIDEr-D if it is used for every clip"
_SHORTLIST = 8


@dataclass(frozen=True)
class CaptionScores:
    """Metrics of captions.

    Attributes:
        means: Values by metric, with the keys of METRIC_LABELS. BLEU and METEOR are computed over the corpus; other
            values are means over videos.
        per_video: Values by video and metric, in the order of the candidates.
        missing_reasons: Reason for each missing metric.
        wordless_videos: Videos whose captions have no words. Such captions score 0 in every metric.
        num_references: Total number of references.
        idf: Description of the source of CIDEr's document frequencies.
        ids_hash: Hash of the video IDs. Results for the same videos have the same hash.
    """

    means: dict[str, float]
    per_video: dict[str, dict[str, float]]
    missing_reasons: dict[str, str]
    wordless_videos: tuple[str, ...]
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
    """Score one caption per video against all references of the video.

    Args:
        candidates: Generated caption for each video ID. A caption may be empty.
        references: Captions for each video ID. Each video needs a caption with words (see `find_wordless`).
        with_java: True to compute METEOR and SPICE, whose programs take seconds to start.
        spice_jars: Folder with the two jars that SPICE needs; None to omit SPICE.
        meteor: METEOR inside its `with` block, to score several sets of captions with one program. Default: a new
            program.

    Raises:
        UserError: There are no videos; the IDs differ; a video has no reference with words; or a jar is missing.
    """
    if not candidates:
        raise UserError("there are no captions to score", hint="use a split with captioned videos")
    _require_videos([video_id for video_id in candidates if not references.get(video_id)], "no references")
    _require_videos([video_id for video_id in references if video_id not in candidates], "no caption to score")
    if spice_jars is not None:
        check_jars(spice_jars)
    tokens = cache(tokenize)
    candidate_tokens = {video_id: tokens(caption) for video_id, caption in candidates.items()}
    reference_tokens = {video_id: [tokens(caption) for caption in references[video_id]] for video_id in candidates}
    _require_videos(
        [video_id for video_id, captions in reference_tokens.items() if not any(captions)], "no reference with words"
    )

    def score_spice() -> tuple[float, dict[str, float]]:
        if spice_jars is None:
            raise MetricUnavailable("--spice-jars is not set")
        return spice(candidate_tokens, reference_tokens, jars=spice_jars)

    columns, means = _plain_scores(candidate_tokens, reference_tokens)
    missing_reasons: dict[str, str] = {}
    with nullcontext(meteor) if meteor is not None else Meteor() as program:
        for name, metric in (("meteor", lambda: program(candidate_tokens, reference_tokens)), ("spice", score_spice)):
            try:
                if not with_java:
                    raise MetricUnavailable("not requested")
                means[name], columns[name] = metric()
            except MetricUnavailable as reason:
                missing_reasons[name] = str(reason)
    num_references = sum(map(len, reference_tokens.values()))
    return CaptionScores(
        means={name: means[name] for name in METRIC_LABELS if name in means},
        per_video={
            video_id: {name: columns[name][video_id] for name in METRIC_LABELS if name in columns}
            for video_id in candidates
        },
        missing_reasons=missing_reasons,
        wordless_videos=tuple(video_id for video_id, caption in candidate_tokens.items() if not caption),
        num_references=num_references,
        idf=f"the {num_references:,} references of these {len(candidate_tokens):,} videos",
        ids_hash=hash_of_ids(candidates),
    )


def find_wordless(references: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the videos whose references contain no words, so that captions cannot be compared with them."""
    return [video_id for video_id, captions in references.items() if not any(map(tokenize, captions))]


def name_videos(video_ids: Sequence[str]) -> str:
    """Return the names of the first few videos as a comma-separated list."""
    return ", ".join(video_ids[:_MAX_LISTED]) + (", ..." if len(video_ids) > _MAX_LISTED else "")


def hash_of_ids(ids: Iterable[str]) -> str:
    """Return 16 hexadecimal digits that identify a set of videos, regardless of their order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain_scores(
    candidate_tokens: Mapping[str, str], reference_tokens: Mapping[str, Sequence[str]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Compute the metrics that do not need Java: their values by metric and video, and their overall values."""
    captions = [caption.split() for caption in candidate_tokens.values()]
    captions += [caption.split() for references in reference_tokens.values() for caption in references]
    lengths = np.array([len(words) for words in captions], dtype=np.int64)
    counts = count_grams(captions)
    num_videos = len(candidate_tokens)
    corpus = Corpus(
        candidates=[grams.select(0, num_videos) for grams in counts],
        references=[grams.select(num_videos, len(captions)) for grams in counts],
        candidate_lengths=lengths[:num_videos],
        reference_lengths=lengths[num_videos:],
        video_of_reference=np.repeat(
            np.arange(num_videos), [len(references) for references in reference_tokens.values()]
        ),
    )
    corpus_bleu, video_bleu = bleu(corpus)
    cider_d, plain_cider = cider(corpus)
    rows: dict[str, Floats] = {f"bleu{order + 1}": video_bleu[order] for order in range(MAX_ORDER)}
    rows |= {"cider_d": cider_d, "cider": plain_cider}
    rows["rouge_l"] = np.array(
        [rouge_l(caption, reference_tokens[video_id]) for video_id, caption in candidate_tokens.items()]
    )
    rows["exact_match"] = np.array(
        [float(caption != "" and caption in reference_tokens[v]) for v, caption in candidate_tokens.items()]
    )
    means = {name: float(row.mean()) for name, row in rows.items()}
    means |= {f"bleu{order + 1}": float(corpus_bleu[order]) for order in range(MAX_ORDER)}
    return {name: dict(zip(candidate_tokens, row.tolist(), strict=True)) for name, row in rows.items()}, means


def _require_videos(misfits: Sequence[str], what: str) -> None:
    if misfits:
        raise UserError(
            f"{count_noun(len(misfits), 'video')} {'has' if len(misfits) == 1 else 'have'} {what}: "
            f"{name_videos(misfits)}",
            hint="score only videos that have a caption and references with words",
        )


def best_constant(references: Mapping[str, Sequence[str]]) -> str:
    """Return the best constant caption: the caption with the highest mean CIDEr-D if it is used for every clip.

    The mean CIDEr of a caption over all clips is a single dot product with the mean of the clips' n-gram vectors.
    CIDEr-D has no such shortcut, so it is computed only for the captions with the highest CIDEr.

    Args:
        references: Captions of each clip, at least one per clip. Clips whose captions have no words are ignored.
    """
    wordless = set(find_wordless(references))
    if len(wordless) == len(references):
        return ""
    references = {clip: texts for clip, texts in references.items() if clip not in wordless}
    captions = [caption for texts in references.values() for caption in texts]
    clip_of_caption = np.repeat(np.arange(len(references)), [len(texts) for texts in references.values()])
    order = np.argsort(-mean_cider([tokenize(caption).split() for caption in captions], clip_of_caption), kind="stable")
    shortlist = list(dict.fromkeys(captions[index] for index in order))[:_SHORTLIST]
    scores = [
        score_captions(dict.fromkeys(references, caption), references, with_java=False).means["cider_d"]
        for caption in shortlist
    ]
    return shortlist[int(np.argmax(scores))]


def mean_cider(captions: Sequence[Sequence[str]], clip_of_caption: np.ndarray) -> Floats:
    """Return the mean CIDEr of each caption if it is used for every clip, [R], without the factor 10.

    Args:
        captions: Captions as lists of words.
        clip_of_caption: Index of each caption's clip, int64 [R], ascending from 0. Every clip has captions.
    """
    num_clips = int(clip_of_caption[-1]) + 1
    weight = 1 / (num_clips * np.bincount(clip_of_caption)[clip_of_caption])
    total: Floats = np.zeros(len(captions))
    counts = count_grams(captions)
    for grams in counts:
        clip_and_gram = np.unique(clip_of_caption[grams.caption] * grams.num_grams + grams.gram)
        document_frequency = np.bincount(clip_and_gram % grams.num_grams, minlength=grams.num_grams)
        entry = grams.count * (np.log(num_clips) - np.log(np.maximum(document_frequency, 1)))[grams.gram]
        norm = np.sqrt(np.bincount(grams.caption, weights=entry**2, minlength=len(captions)))
        unit = entry / np.where(norm == 0, 1.0, norm)[grams.caption]
        mean = np.bincount(grams.gram, weights=unit * weight[grams.caption], minlength=grams.num_grams)
        total += np.bincount(grams.caption, weights=unit * mean[grams.gram], minlength=len(captions))
    return total / len(counts)
