"""What `train eval caption` does, once its flags are read."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import publish_json
from train.distributed.world import World
from train.evaluation.examples import clip_in_words
from train.report.results import write_page
from train.run.folder import COCO_SUFFIX, RunFolder, result_name
from train.tasks.caption.constant import RULE, best_constant
from train.tasks.caption.evaluating import captions_of, comparable, loss_of
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
from train.tasks.caption.trained import TrainedCaptioner, open_captioner
from train.tasks.dual_encoder.evaluation import every_for

MAX_SAMPLES = 100_000
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


def evaluate_captions(
    run_path: Path,
    *,
    split: str,
    max_samples: int = MAX_SAMPLES,
    shards: str | None = None,
    decoding: DecodingSettings | None = None,
    with_java: bool = True,
    spice_jars: Path | None = None,
) -> dict[str, Any]:
    """Has a run's latest checkpoint say a caption of each clip of a split, and adds what they are worth to its page.

    Beside them stands the best caption that ignores the clip.

    Args:
        max_samples: clips at most, spread evenly over the split.
        decoding: how captions are written; as the run says when left out.
        with_java, spice_jars: see `score_captions`.

    Raises:
        UserError: there is no such run, it is of another task, or there are no such captions.
        FailedWork: nothing could be decoded.
    """
    if max_samples < 1:
        raise UserError(f"--max-samples is {max_samples}", hint="it must be 1 or more")
    if spice_jars is not None:
        check_jars(spice_jars)
    captioner = open_captioner(run_path, shards=shards)
    trained = captioner.trained
    how = captioner.decoding(decoding)
    samples = captioner.task.samples(split, World())
    every = every_for(len(samples), at_most=max_samples)
    with trained.precision.autocast():
        said = captions_of(
            captioner.model,
            samples.evaluation_batches(every=every),
            inputs=captioner.task.inputs,
            tokenizer=captioner.task.decoder.tokenizer,
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
    constant, chosen = _constant(captioner, references)
    with Meteor() as meteor:
        scores, of_constant = (
            score_captions(said_of, references, with_java=with_java, spice_jars=spice_jars, meteor=meteor)
            for said_of in (captions, dict.fromkeys(references, constant))
        )
    facts = trained.run.data_facts(shards)
    name = result_name(f"captions-{split}", facts)
    result = {
        "evaluation": "captions",
        "split": split,
        **facts,
        "step": trained.step,
        "weights": trained.weights,
        "data": "; ".join([samples.describe(), *_left_out(samples, every=every), *_without_words(scores, left_out)]),
        "variant": samples.variant_name,
        "clip": clip_in_words(trained.settings),
        "decoding": describe_decoding(how),
        "protocol": f"{_PROTOCOL} {scores.idf}",
        "num_samples": scores.num_videos,
        "num_references": scores.num_references,
        "ids_hash": scores.ids_hash,
        "loss": loss,
        "loss_rule": _loss_rule(trained.settings),
        "means": scores.means,
        "absent": scores.absent,
        "empty": list(scores.empty),
        "without_words": left_out,
        "constant": {"caption": constant, "chosen": chosen, "means": of_constant.means},
        "said": shown_json(samples, names, captions, references, scores, num_frames=trained.settings.num_frames),
        "all_said": f"evaluations/{name}.html",
        "failed": [failure.as_json() for failure in said.failed],
        "command": _command(
            trained.run, split, max_samples=max_samples, shards=shards, decoding=decoding, spice_jars=spice_jars
        ),
    }
    path = _publish(trained.run, split, result, captions=captions)
    write_captions_page(
        path.with_suffix(".html"),
        all_shown(samples, names, captions, references, scores, num_frames=trained.settings.num_frames),
        title=f"What “{trained.run.path.resolve().name}” says of split “{split}”",
        means=scores.means,
        absent=scores.absent,
        protocol={words: str(result[key]) for words, key in _ON_PAGE.items()},
    )
    return result


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


def _constant(captioner: TrainedCaptioner, references: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The best caption that ignores the clip, and how it was chosen."""
    split = captioner.trained.settings.split
    try:
        trained_on = captioner.task.samples(split, World())
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


def _publish(run: RunFolder, split: str, result: dict[str, Any], *, captions: Mapping[str, str]) -> Path:
    path = run.write_evaluation(f"captions-{split}", result)
    write_coco_results(path.with_name(f"{path.stem}{COCO_SUFFIX}"), captions)
    write_page(run)
    return path


def _command(
    run: RunFolder,
    split: str,
    *,
    max_samples: int,
    shards: str | None,
    decoding: DecodingSettings | None,
    spice_jars: Path | None,
) -> str:
    words = ["train", "eval", "caption", str(run.path), "--split", split]
    words += [] if shards is None else ["--shards", shards]
    words += [] if max_samples == MAX_SAMPLES else ["--max-samples", str(max_samples)]
    words += [] if spice_jars is None else ["--spice-jars", str(spice_jars)]
    if decoding is not None:
        for name, value in asdict(decoding).items():
            if value is not None and value != getattr(DecodingSettings(), name):
                flag = f"--decoding.{name.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


# Captions in COCO's results format: a JSON list of {"image_id": ..., "caption": ...}.


_HINT = 'COCO\'s results format is a JSON list of {"image_id": id, "caption": text}'


def write_coco_results(path: Path, candidates: Mapping[str, str]) -> None:
    """Publishes captions by video id, in their order."""
    publish_json(path, [{"image_id": video_id, "caption": caption} for video_id, caption in candidates.items()])


def read_coco_results(path: Path) -> dict[str, str]:
    """Captions by video id; ids that are numbers become text.

    Raises:
        UserError: no such file, not that format, a video twice.
    """
    try:
        rows = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint="give a file of captions") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(rows, list):
        raise UserError(f"{path} is not a list", hint=_HINT)
    captions: dict[str, str] = {}
    for number, row in enumerate(rows):
        match row:
            case {"image_id": bool()}:
                pass
            case {"image_id": str() | int() as video_id, "caption": str() as caption}:
                if str(video_id) in captions:
                    raise UserError(f"{path} has {video_id} twice", hint="one caption for each video")
                captions[str(video_id)] = caption
                continue
        raise UserError(f"{path}, row {number}: {json.dumps(row)[:80]}", hint=_HINT)
    return captions
