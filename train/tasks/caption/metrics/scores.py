"""All caption metrics of a set of videos, with what they were computed from."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manifests.errors import UserError
from train.tasks.caption.metrics.java import Absent, Meteor, check_jars, spice
from train.tasks.caption.metrics.ngrams import MAX_ORDER, Corpus, Floats, bleu, cider, count_grams, rouge_l
from train.tasks.caption.metrics.ptb_tokenizer import tokenize
from train.tasks.caption.settings import METRIC_LABELS

_NAMED = 3


@dataclass(frozen=True)
class CaptionScores:
    """What captions are worth beside their references.

    Attributes:
        means: metric to its value; keys as in METRIC_LABELS. BLEU and METEOR are of the corpus, no means over videos.
        per_video: video to metric to value, in the order of the candidates.
        absent: metric to the reason why it is not among them.
        empty: videos whose captions have no words; they are worth 0 in every metric.
        num_references: references of all videos together.
        idf: where the document frequencies of CIDEr come from.
        ids_hash: of the ids of the videos, so that numbers of two sets are not compared by mistake.
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
        """How many videos were scored."""
        return len(self.per_video)


def score_captions(
    candidates: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    *,
    with_java: bool = True,
    spice_jars: Path | None = None,
    meteor: Meteor | None = None,
) -> CaptionScores:
    """Scores one caption for each video against all its references.

    Args:
        candidates: video id to caption, as it was found; it may be empty.
        references: video id to captions, as people wrote them; for the same videos, for each one at least that has
            words (`without_words` names the others).
        with_java: whether METEOR and SPICE are tried, which take seconds to start and longer for each video.
        spice_jars: the folder of the two jars that SPICE needs.
        meteor: is entered already, where several sets of captions are scored; one of its own when left out.

    Raises:
        UserError: no videos, not the same videos, a video without references that have words, no jars in `spice_jars`.
    """
    _check(candidates, references)
    if spice_jars is not None:
        check_jars(spice_jars)
    known: dict[str, str] = {}

    def tokens(caption: str) -> str:
        if caption not in known:
            known[caption] = tokenize(caption)
        return known[caption]

    ours = {video_id: tokens(caption) for video_id, caption in candidates.items()}
    theirs = {video_id: [tokens(caption) for caption in references[video_id]] for video_id in candidates}
    _require_videos(
        [video_id for video_id, captions in theirs.items() if not any(captions)], "without words to compare with"
    )

    columns, means = _plain_scores(ours, theirs)
    absent: dict[str, str] = {}
    with nullcontext(meteor) if meteor is not None else Meteor() as own:
        for name, metric in _java_metrics(ours, theirs, spice_jars, own).items():
            try:
                if not with_java:
                    raise Absent("not asked for")
                means[name], columns[name] = metric()
            except Absent as reason:
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
    """The videos whose references have no words, if they have any: nothing can be compared with them."""
    return [video_id for video_id, captions in references.items() if not any(map(tokenize, captions))]


def named(video_ids: Sequence[str]) -> str:
    """The first few of some videos."""
    return ", ".join(video_ids[:_NAMED]) + (", ..." if len(video_ids) > _NAMED else "")


def hash_of_ids(ids: Iterable[str]) -> str:
    """16 hexadecimal digits that say which videos, in whatever order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain_scores(
    ours: Mapping[str, str], theirs: Mapping[str, Sequence[str]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The metrics that need no Java: of each video, and of all."""
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
    rows |= {
        "rouge_l": np.array([rouge_l(ours[video_id], theirs[video_id]) for video_id in ours]),
        "cider_d": cider_d,
        "cider": plain_cider,
        "exact_match": np.array(
            [float(bool(ours[video_id]) and ours[video_id] in theirs[video_id]) for video_id in ours]
        ),
    }
    means = {name: float(row.mean()) for name, row in rows.items()}
    means |= {f"bleu{order + 1}": float(corpus_bleu[order]) for order in range(MAX_ORDER)}
    return {name: dict(zip(ours, row.tolist(), strict=True)) for name, row in rows.items()}, means


def _java_metrics(
    ours: Mapping[str, str], theirs: Mapping[str, Sequence[str]], spice_jars: Path | None, meteor: Meteor
) -> dict[str, Callable[[], tuple[float, dict[str, float]]]]:
    def spiced() -> tuple[float, dict[str, float]]:
        if spice_jars is None:
            raise Absent("its jars were not given (--spice-jars)")
        return spice(ours, theirs, jars=spice_jars)

    return {"meteor": lambda: meteor(ours, theirs), "spice": spiced}


def _check(candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> None:
    if not candidates:
        raise UserError("there are no captions to score", hint="a split without captioned videos has no scores")
    _require_videos([video_id for video_id in candidates if not references.get(video_id)], "without references")
    _require_videos([video_id for video_id in references if video_id not in candidates], "without a caption to score")


def _require_videos(lacking: Sequence[str], what: str) -> None:
    if lacking:
        raise UserError(
            f"{len(lacking)} videos are {what}: {named(lacking)}", hint="score the videos that have both, and no others"
        )
