"""Evaluate a trained captioner: captions of the clips of a split, their metrics, and pages of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_json
from clipmill.train.data.clip_reader import ClipReader
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.player import open_player
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, every_for
from clipmill.train.run.counted_batches import counted_batches
from clipmill.train.run.folder import COCO_SUFFIX
from clipmill.train.tasks.caption.generation import captions_of, comparable_captions, loss_of
from clipmill.train.tasks.caption.metrics.java import Meteor, check_jars
from clipmill.train.tasks.caption.metrics.scores import (
    CONSTANT_RULE,
    CaptionScores,
    best_constant,
    name_videos,
    score_captions,
)
from clipmill.train.tasks.caption.page import PLAYED, ScoredCaptions, write_captions_page
from clipmill.train.tasks.caption.settings import (
    CaptionerSettings,
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)
from clipmill.train.tasks.caption.spec import CaptionFlags
from clipmill.train.tasks.caption.task import CaptionTask

_MAX_CLIPS_OF_CONSTANT = 500
_PROTOCOL = (
    "one caption of each clip, compared with all its references; tokens as Stanford's PTBTokenizer makes them, without "
    "punctuation; idf from"
)
# The protocol on the page of all captions: label -> key of the result.
_ON_PAGE = {
    **{name: name for name in ("split", "step", "weights", "data", "clip", "decoding", "protocol", "command")},
    "data folder": "shards",
    "clips": "num_samples",
    "hash of their names": "ids_hash",
}


def score_run(opened: OpenedRun, wanted: CaptionFlags, *, with_java: bool = True) -> Score:
    """Caption the clips of a split with a run's latest checkpoint, and score the captions.

    The best constant caption is scored for comparison.

    Args:
        with_java: see `score_captions`.

    Raises:
        UserError: there are no such captions.
        FailedWork: nothing could be decoded, or all captions are empty.
    """
    if wanted.spice_jars is not None:
        check_jars(wanted.spice_jars)
    settings, trained, task, split = opened.settings, opened.trained, opened.task, wanted.split
    how = task.decoding(wanted.decoding)
    samples = task.samples(split, World())
    every = every_for(len(samples), at_most=wanted.max_samples)
    with trained.precision.autocast():
        found = captions_of(
            trained.fill(task.build_model(samples)),
            counted_batches(samples.evaluation_batches(every=every), "captioning", total=-(-len(samples) // every)),
            inputs=task.inputs,
            tokenizer=task.decoder.tokenizer,
            decoding=how,
            device=trained.device,
        )
    loss = loss_of([found])
    names = clip_names(samples, sorted(found.captions))
    captions, references, left_out = comparable_captions(
        {name: found.captions[index] for index, name in names.items()},
        {name: samples.captions.texts_of(index) for index, name in names.items()},
    )
    constant, chosen = _constant_baseline(task, settings, references)
    with Meteor() as meteor:
        scores, of_constant = (
            score_captions(candidates, references, with_java=with_java, spice_jars=wanted.spice_jars, meteor=meteor)
            for candidates in (captions, dict.fromkeys(references, constant))
        )
    if len(scores.empty) == scores.num_videos:
        raise FailedWork(
            f"all captions found are empty ({scores.num_videos:,}), so there is nothing to score: the model ends each "
            "one at once. It was trained for too few steps, or on captions without words"
        )
    scored = ScoredCaptions(
        samples=samples,
        names={index: name for index, name in names.items() if name in captions},
        captions=captions,
        references=references,
        scores=scores,
        num_frames=settings.num_frames,
    )
    name = f"captions-{split}"
    player = open_player(settings, split=split)
    values = {
        "data": "; ".join(
            [samples.describe(), *_omitted_notes(samples, every=every), *_without_words(scores, left_out)]
        ),
        "decoding": describe_decoding(how),
        "protocol": f"{_PROTOCOL} {scores.idf}",
        "num_samples": scores.num_videos,
        "num_references": scores.num_references,
        "ids_hash": scores.ids_hash,
        "loss": loss,
        "loss_rule": _loss_rule(settings),
        "means": scores.means,
        "absent": scores.absent,
        "empty": list(scores.empty),
        "without_words": left_out,
        "constant": {"caption": constant, "chosen": chosen, "means": of_constant.means},
        "said": scored.examples(player),
        "all_said": f"evaluations/{opened.result_name(name, wanted)}.html",
    }

    def write_beside(path: Path, result: dict[str, Any]) -> None:
        write_coco_results(path.with_name(f"{path.stem}{COCO_SUFFIX}"), captions)
        write_captions_page(
            path.with_suffix(".html"),
            scored.videos(player),
            title=f"Captions of split “{split}” by “{opened.name}”",
            means=scores.means,
            baseline=of_constant.means,
            absent=scores.absent,
            protocol={
                **{label: str(result[key]) for label, key in _ON_PAGE.items()},
                **({} if player is None else {"videos": PLAYED}),
            },
        )

    return Score(
        name=name,
        samples=samples,
        clip=describe_clip(settings),
        values=values,
        failed=found.failed,
        beside=write_beside,
    )


def write_coco_results(path: Path, captions: Mapping[str, str]) -> None:
    """Publish captions by video id in COCO's results format, in their order."""
    publish_json(path, [{"image_id": video_id, "caption": caption} for video_id, caption in captions.items()])


def clip_names(samples: Samples[ClipReader], indices: Sequence[int]) -> dict[int, str]:
    """Names of clips: the video, and the times as well if a video has several clips of the split."""
    videos = {index: samples.key(index).rpartition("_")[0] for index in range(len(samples))}
    is_alone = len(set(videos.values())) == len(videos)
    names = {}
    for index in indices:
        begin_s, end_s = samples.span_s(index)
        names[index] = videos[index] if is_alone else f"{videos[index]} {begin_s:.2f}-{end_s:.2f} s"
    return names


def describe_decoding(settings: DecodingSettings) -> str:
    """Describe how captions are generated."""
    match settings.method:
        case "greedy":
            how = "greedy"
        case "sample":
            how = f"sampling at temperature {temperature_of(settings):g}, seed {settings.seed}"
            how += "" if settings.top_k is None else f", top-k {settings.top_k}"
            how += "" if settings.top_p is None else f", top-p {settings.top_p:g}"
        case "beam":
            how = f"{num_beams_of(settings)} beams, length penalty {length_penalty_of(settings):g}"
            how += ", early stopping" if settings.early_stopping else ""
    least = f"{settings.min_tokens} to " if settings.min_tokens else "at most "
    return f"{how}, {least}{max_tokens_of(settings)} tokens"


def _constant_baseline(
    task: CaptionTask, settings: CaptionerSettings, references: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """The best constant caption, and how it was chosen."""
    split = settings.split
    try:
        training_set = task.samples(split, World())
    except UserError as error:
        reason = f"{CONSTANT_RULE}: of the references themselves, as there is nothing of split {split!r}: {error}"
        return best_constant(references), reason
    every = every_for(len(training_set), at_most=_MAX_CLIPS_OF_CONSTANT)
    known = {str(index): training_set.captions.texts_of(index) for index in range(0, len(training_set), every)}
    rule = f"{CONSTANT_RULE}: of split {split!r}, {count_noun(len(known), 'clip')} spread evenly over it"
    return best_constant(known), rule


def _omitted_notes(samples: Samples[ClipReader], *, every: int) -> list[str]:
    """Which videos of a split have no captions, and how many clips --max-samples leaves out."""
    chunks = samples.reader.chunks
    captioned = np.unique(samples.video)
    remarks = []
    if num_without := len(chunks.video_ids) - len(captioned):
        have = "video of it has" if num_without == 1 else "videos of it have"
        remarks.append(f"{num_without:,} {have} no captions")
    if every > 1:
        remarks.append(f"one clip in {every:,} is captioned: {len(range(0, len(samples), every)):,}")
    return remarks


def _without_words(scores: CaptionScores, left_out: Sequence[str]) -> list[str]:
    """Generated captions without words, which score 0, and clips that are left out for references without words."""
    remarks = []
    if scores.empty:
        remarks.append(
            f"{len(scores.empty):,} of {scores.num_videos:,} captions found are empty ({name_videos(scores.empty)})"
        )
    if left_out:
        remarks.append(f"left out for references without words: {len(left_out):,} ({name_videos(left_out)})")
    return remarks


def _loss_rule(settings: CaptionerSettings) -> str:
    count = settings.captions_per_visit
    which = "the first reference" if count == 1 else f"the first {count} references"
    return f"mean cross-entropy per token of {which} of each clip"
