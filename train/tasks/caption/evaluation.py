"""Captions of clips by a run's latest checkpoint, and their metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manifests.errors import UserError
from manifests.publish import publish_json
from train.distributed.world import World
from train.evaluation.runner import OpenedRun, Score, describe_clip, every_for
from train.run.folder import COCO_SUFFIX
from train.tasks.caption.constant import RULE, best_constant
from train.tasks.caption.generation import captions_of, comparable, loss_of
from train.tasks.caption.metrics.java import Meteor, check_jars
from train.tasks.caption.metrics.scores import CaptionScores, named, score_captions
from train.tasks.caption.page import write_captions_page
from train.tasks.caption.samples import CaptionedClips
from train.tasks.caption.settings import (
    CaptionerSettings,
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)
from train.tasks.caption.shown import all_shown, shown_json
from train.tasks.caption.spec import CaptionFlags
from train.tasks.caption.task import CaptionTask

_MAX_CLIPS_OF_CONSTANT = 500
_PROTOCOL = (
    "one caption of each clip, compared with all its references; tokens as Stanford's PTBTokenizer makes them, without "
    "punctuation; idf from"
)

# What the page of all captions says of them, of the result.
_ON_PAGE = {
    **{name: name for name in ("split", "step", "weights", "data", "clip", "decoding", "protocol", "command")},
    "data folder": "shards",
    "clips": "num_samples",
    "hash of their names": "ids_hash",
}


def score_run(opened: OpenedRun, wanted: CaptionFlags, *, with_java: bool = True) -> Score:
    """Has a run's latest checkpoint caption each clip of a split, and scores the captions.

    The best caption that ignores the clip is scored beside them.

    Args:
        with_java: see `score_captions`.

    Raises:
        UserError: there are no such captions.
        FailedWork: nothing could be decoded.
    """
    if wanted.spice_jars is not None:
        check_jars(wanted.spice_jars)
    settings, trained, task, split = opened.settings, opened.trained, opened.task, wanted.split
    how = task.decoding(wanted.decoding)
    samples = task.samples(split, World())
    every = every_for(len(samples), at_most=wanted.max_samples)
    with trained.precision.autocast():
        said = captions_of(
            trained.fill(task.build_model()),
            samples.evaluation_batches(every=every),
            inputs=task.inputs,
            tokenizer=task.decoder.tokenizer,
            decoding=how,
            device=trained.device,
        )
    loss = loss_of([said])
    names = clip_names(samples, sorted(said.captions))
    captions, references, left_out = comparable(
        {name: said.captions[number] for number, name in names.items()},
        {name: samples.references(number) for number, name in names.items()},
    )
    names = {number: name for number, name in names.items() if name in captions}
    constant, chosen = _constant(task, settings, references)
    with Meteor() as meteor:
        scores, of_constant = (
            score_captions(said_of, references, with_java=with_java, spice_jars=wanted.spice_jars, meteor=meteor)
            for said_of in (captions, dict.fromkeys(references, constant))
        )
    name = f"captions-{split}"
    values = {
        "data": "; ".join([samples.describe(), *_left_out(samples, every=every), *_without_words(scores, left_out)]),
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
        "said": shown_json(samples, names, captions, references, scores, num_frames=settings.num_frames),
        "all_said": f"evaluations/{opened.result_name(name)}.html",
    }

    def beside(path: Path, result: dict[str, Any]) -> None:
        write_coco_results(path.with_name(f"{path.stem}{COCO_SUFFIX}"), captions)
        write_captions_page(
            path.with_suffix(".html"),
            all_shown(samples, names, captions, references, scores, num_frames=settings.num_frames),
            title=f"What “{opened.run.path.resolve().name}” says of split “{split}”",
            means=scores.means,
            absent=scores.absent,
            protocol={words: str(result[key]) for words, key in _ON_PAGE.items()},
        )

    return Score(
        name=name, samples=samples, clip=describe_clip(settings), values=values, failed=said.failed, beside=beside
    )


def clip_names(samples: CaptionedClips, numbers: Sequence[int]) -> dict[int, str]:
    """A name of each clip: its video, and where a video has several of the split their times as well."""
    videos = {number: samples.key(number).rpartition("_")[0] for number in range(len(samples))}
    is_alone = len(set(videos.values())) == len(videos)
    names = {}
    for number in numbers:
        begin_s, end_s = samples.span_s(number)
        names[number] = videos[number] if is_alone else f"{videos[number]} {begin_s:.2f}-{end_s:.2f} s"
    return names


def describe_decoding(settings: DecodingSettings) -> str:
    """How captions are written, in words."""
    match settings.method:
        case "greedy":
            how = "greedy"
        case "sample":
            how = f"drawn at temperature {temperature_of(settings):g}, seed {settings.seed}"
            how += "" if settings.top_k is None else f", of the likeliest {settings.top_k}"
            how += "" if settings.top_p is None else f", of the nucleus of {settings.top_p:g}"
        case "beam":
            how = f"{num_beams_of(settings)} beams, length penalty {length_penalty_of(settings):g}"
            how += ", early stopping" if settings.early_stopping else ""
    least = f"{settings.min_tokens} to " if settings.min_tokens else "at most "
    return f"{how}, {least}{max_tokens_of(settings)} tokens"


def _constant(
    task: CaptionTask, settings: CaptionerSettings, references: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """The best caption that ignores the clip, and how it was chosen."""
    split = settings.split
    try:
        trained_on = task.samples(split, World())
    except UserError as error:
        reason = f"{RULE}: of the references themselves, as there is nothing of split {split!r}: {error}"
        return best_constant(references), reason
    every = every_for(len(trained_on), at_most=_MAX_CLIPS_OF_CONSTANT)
    numbers = range(0, len(trained_on), every)
    known = {str(number): trained_on.references(number) for number in numbers}
    return best_constant(known), f"{RULE}: of split {split!r}, {len(known):,} clips spread evenly over it"


def _left_out(samples: CaptionedClips, *, every: int) -> list[str]:
    """What of a split is not captioned: videos without captions, and clips that --max-samples passes over."""
    chunks = samples.clips.chunks
    captioned = np.unique(chunks.table.video_row[samples.clips.spans.first_chunk])
    num_without = len(chunks.video_ids) - len(captioned)
    said = []
    if num_without:
        have = "video of it has" if num_without == 1 else "videos of it have"
        said.append(f"{num_without:,} {have} no captions")
    if every > 1:
        said.append(f"one clip in {every:,} is captioned: {len(range(0, len(samples), every)):,}")
    return said


def _without_words(scores: CaptionScores, left_out: Sequence[str]) -> list[str]:
    """What has no words: captions that were found, which are worth 0, and references, whose clips are left out."""
    said = []
    if scores.empty:
        said.append(f"{len(scores.empty):,} of {scores.num_videos:,} captions found are empty ({named(scores.empty)})")
    if left_out:
        said.append(f"left out for references without words: {len(left_out):,} ({named(left_out)})")
    return said


def _loss_rule(settings: CaptionerSettings) -> str:
    count = settings.captions_per_visit
    which = "the first caption" if count == 1 else f"the first {count} captions"
    return f"cross-entropy of a token of {which} of each clip, given those before it"


def write_coco_results(path: Path, candidates: Mapping[str, str]) -> None:
    """Publishes captions by video id, in their order."""
    publish_json(path, [{"image_id": video_id, "caption": caption} for video_id, caption in candidates.items()])
