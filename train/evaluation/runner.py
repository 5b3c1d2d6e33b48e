"""Run an evaluation of trained weights, and write its result file.

This module has what all evaluations share: opening a run, the common fields of a result, the description of the
clips, and the command line that repeats the evaluation. What is scored, and how, is up to the evaluation
(`clipmill.train.spec.EvaluationSpec.score`).
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_json
from clipmill.train.config.clips import ClipSettings, LatentSettings
from clipmill.train.config.data import AS_TRAINED, Overrides
from clipmill.train.config.files import load_settings
from clipmill.train.config.shards import kind_of
from clipmill.train.config.training import flatten, plain_values
from clipmill.train.data.decoding.clip import Views
from clipmill.train.data.held_out import EvaluatedClips, held_out_facts
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.query import TARS_SPLIT
from clipmill.train.engine.trained_run import TrainedRun, open_trained_run, shape_of_run
from clipmill.train.evaluation.tables import mark_title
from clipmill.train.evaluation.use import AS_IN_TRAINING, Use
from clipmill.train.models.dual_encoder import ModelShape
from clipmill.train.run.folder import RunFolder, read_object
from clipmill.train.run.packages import require_parts
from clipmill.train.run.result_names import data_facts, is_same_evaluation, result_name, suffix_of
from clipmill.train.spec import EvaluationSpec, TaskSpec
from clipmill.train.weights.loading import load_whole
from clipmill.train.weights.logits import Logits, logits_of, read_logits
from clipmill.train.weights.source import Say, Source
from clipmill.train.weights.sources import open_run_weights

_ONE_VIEW = Views()


class EvaluatedSamples(EvaluatedClips, Protocol):
    """A set of samples as a result describes it."""

    @property
    def variant_name(self) -> str:
        """The variants that it is made of."""
        ...

    def describe(self) -> str:
        """How many samples of what."""
        ...


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run, or other weights, ready to be evaluated.

    Attributes:
        title: of the weights, as the user named them.
        run: None for weights that are not a run.
        settings: of the model, with the data to evaluate and the overrides.
        shape: dimensions of the model.
        shards: data that replaces the run's own, or None.
        task: the task of the weights, with the classes or tokens that were kept with them.
        overrides: those that differ from the training.
        lacks: part of the task's model that the weights do not have, such as "a decoder"; '' for none.
        source: the weights, if they are not a run.
        checkpoint: of a run.
    """

    spec: TaskSpec
    title: str
    run: RunFolder | None
    settings: Any
    shape: ModelShape
    shards: str | None
    trained: TrainedRun[Any]
    task: Any
    overrides: Overrides = AS_TRAINED
    lacks: str = ""
    source: Source | None = None
    checkpoint: Path | None = None

    def logits(self) -> Logits:
        """What turns cosines of its embeddings into logits."""
        if self.checkpoint is not None:
            return read_logits(self.checkpoint)
        return Logits() if self.source is None else logits_of(self.source.converted.tensors)

    def require_whole(self) -> None:
        """Raise a UserError if the weights lack a part of the task's model."""
        if self.lacks:
            raise UserError(
                f"{self.title} has no {self.lacks.removeprefix('a ')}, which this evaluation needs",
                hint="use weights that have it; train eval probe needs the video tower alone",
            )

    def facts(self) -> dict[str, Any]:
        """Weights and data of a result: the data of a run's results, or the title and data of other weights."""
        if self.run is not None:
            return self.run.data_facts(self.shards)
        return {"source": self.title, "shards": data_facts("", self.shards)["shards"]}

    @property
    def name(self) -> str:
        """Short name of the weights."""
        return self.title if self.run is None else self.run.path.resolve().name

    def result_name(self, name: str, wanted: Any) -> str:
        """File name of the result `name` of an evaluation; other data and other use than in training have others."""
        return result_name(f"{name}{suffix_of(self.differences(wanted))}", self.facts())

    def differences(self, wanted: Any) -> dict[str, Any]:
        """Settings that differ from the training, by flag: clips, a condition, settings of the same name."""
        differences = self.overrides.given()
        if self.settings.where:
            differences["where"] = self.settings.where
        for name, group in _given_groups(wanted).items():
            trained = self.in_effect(name)
            differences |= {
                flag: value for flag, value in self.in_effect(name, group).items() if value != trained[flag]
            }
        return differences

    def in_effect(self, name: str, group: Any = None) -> dict[str, Any]:
        """The values of a group of settings that take effect, by flag.

        Args:
            name: of the group, and of the task's method that returns what takes effect of it, such as `decoding`.
            group: the group as it was given; None for the weights' own.
        """
        return flatten(plain_values(asdict(getattr(self.task, name)(group))), f"{name}.")


def _given_groups(wanted: Any) -> dict[str, Any]:
    """The groups of an evaluation's settings that replace the weights' own, which are their default."""
    groups = {group.name: getattr(wanted, group.name) for group in fields(wanted) if group.default is None}
    return {name: group for name, group in groups.items() if is_dataclass(group)}


@dataclass(frozen=True, kw_only=True)
class Score:
    """What an evaluation found.

    Attributes:
        name: of the result file; the same evaluation again replaces it.
        samples: those that were scored.
        clip: description of the clips, see `describe_clip`.
        values: metrics and everything else that the result holds, as plain values.
        failed: samples that could not be decoded.
        beside: called with the path of the result file and the result, to write further files next to it.
    """

    name: str
    samples: EvaluatedSamples
    clip: str
    values: dict[str, Any]
    failed: Sequence[FailedSample]
    beside: Callable[[Path, dict[str, Any]], None] | None = field(default=None)


def open_for(spec: TaskSpec, run: RunFolder, use: Use = AS_IN_TRAINING, *, say: Say = print) -> OpenedRun:
    """Open a checkpoint of a run and its task.

    Args:
        say: prints which tensors were interpolated.

    Raises:
        UserError: there is no checkpoint, or it does not fit this machine, the run's settings or the overrides.
    """
    trained_with: ClipSettings = load_settings(run.settings, spec.settings)
    require_parts(trained_with.towers, run)
    checkpoint = use.checkpoint or run.require_checkpoint()
    trained = open_trained_run(
        run, replace(trained_with, device=use.device or trained_with.device), checkpoint=checkpoint
    )
    settings, overrides = use.applied(trained.settings)
    shape = shape_of_run(run, settings)
    given = {"shape": shape} if use.is_without_data else {}
    task: Any = spec.open(settings, attention=trained.attention, device=trained.device, run=run, **given)
    if overrides.given():
        source = open_run_weights(run, checkpoint=checkpoint)
        load = partial(load_whole, source=source, fit=task.fit_whole, say=say)
        trained = replace(trained, settings=settings, load=load)
    return OpenedRun(
        spec=spec,
        title=str(run.path),
        run=run,
        settings=settings,
        shards=use.shards,
        trained=trained,
        task=task,
        overrides=overrides,
        shape=shape,
        checkpoint=checkpoint,
    )


def evaluate(
    spec: TaskSpec, evaluation: EvaluationSpec, run: RunFolder, wanted: Any, *, shards: str | None = None
) -> dict[str, Any]:
    """Evaluate the latest checkpoint of a run, and write the result file; see `open_for` and `score_opened`."""
    return score_opened(open_for(spec, run, Use(shards=shards)), evaluation, wanted)


def score_opened(
    opened: OpenedRun,
    evaluation: EvaluationSpec,
    wanted: Any,
    *,
    out: Path | None = None,
    written: Callable[[Path], object] = lambda path: None,
) -> dict[str, Any]:
    """Evaluate opened weights, and write the result file of a run.

    Args:
        wanted: settings of the evaluation.
        out: folder for the result file of weights that are not a run; by default it is not written.
        written: called with the path of the result file.

    Raises:
        UserError: the data lack what the evaluation needs, or `out` has the result of other weights or data.
        FailedWork: nothing could be decoded.
    """
    if not kind_of(opened.settings.folder).has_manifest:
        wanted = replace(wanted, split=TARS_SPLIT)  # a result is named after the data that it is of
    score: Score = evaluation.score(opened, wanted)
    facts = opened.facts()
    held = held_out_facts(score.samples, opened.settings, split=wanted.split, data=facts)
    differences = opened.differences(wanted)
    result = {
        "evaluation": evaluation.result_name,
        "split": wanted.split,
        **facts,
        "step": opened.trained.step,
        "weights": opened.trained.weights,
        "overrides": differences,
        "data": score.samples.describe(),
        "variant": score.samples.variant_name,
        "clip": score.clip,
        **({} if held is None else {"held_out": held.as_json()}),
        **score.values,
        **_incomplete_note(score),
        "failed": [failure.as_json() for failure in score.failed],
        "command": command_line(evaluation.name, opened, wanted),
    }
    path = None
    if opened.run is not None:
        path = opened.run.write_evaluation(f"{score.name}{suffix_of(differences)}", result)
    elif out is not None:
        path = out / f"{opened.result_name(score.name, wanted)}.json"
        if path.exists() and not is_same_evaluation(read_object(path), result):
            raise UserError(f"{path} is the result of other weights, data or flags", hint="use another --out")
        out.mkdir(parents=True, exist_ok=True)
        publish_json(path, result)
    if path is not None:
        if score.beside is not None:
            score.beside(path, result)
        written(path)
    return result


def _incomplete_note(score: Score) -> dict[str, str]:
    """The note on a result about missing samples; empty if all samples of its protocol were scored."""
    said = score.values.get("incomplete", "")
    if not score.failed:
        return {"incomplete": said} if said else {}
    num = len(score.failed)
    failed = f"{count_noun(num, 'sample')} could not be decoded and {'is' if num == 1 else 'are'}"
    title = score.values.get("title", "")
    return {
        "incomplete": f"{said}; {failed} not scored" if said else f"{failed} not scored",
        **({"title": mark_title(title)} if title else {}),
    }


def split_metrics(split: str, metrics: Mapping[str, float], *, num_failed: int = 0) -> dict[str, float]:
    """Metrics of an evaluation in the training loop, named `<split>/<name>`; failures are counted if there are any."""
    counted = {**metrics, "num_failed": float(num_failed)} if num_failed else metrics
    return {f"{split}/{name}": value for name, value in counted.items()}


def every_for(num_samples: int, *, at_most: int) -> int:
    """The smallest k for which every k-th sample makes at most `at_most` samples."""
    return -(-num_samples // at_most)


def describe_clip(
    settings: ClipSettings,
    samples: Any = None,
    *,
    views: Views = _ONE_VIEW,
    mean_of: str = "",
    is_consecutive: bool = False,
) -> str:
    """Describe what an evaluation sees of a clip: number and sampling of frames, views, crop and size.

    Args:
        samples: Loader of the clips; of latents, it knows the length of their segments.
        views: of clips of pixels.
        mean_of: what is averaged over several views.
        is_consecutive: the frames of latents are consecutive.
    """
    frames = f"T = {count_noun(settings.num_frames, 'frame')}"
    if isinstance(settings, LatentSettings) and settings.reads_latents:
        which = "in a row, in the middle" if is_consecutive else "one in the middle of each of equal parts"
        return f"{frames} of latents of a segment of {samples.reader.segment_s:g}s, {which}"
    crops = "1 crop (centre square)" if views.num_crops == 1 else f"{views.num_crops} crops along the longer side"
    moments = _describe_sampling(settings, is_centred=views.num_clips == 1)
    if len(views) == 1:
        return f"{frames}, {moments}, {crops}, {settings.size_px} px"
    clips = count_noun(views.num_clips, "clip")
    return f"{frames}, {moments}, {clips} x {crops}, {settings.size_px} px, mean of their {mean_of}"


def _describe_sampling(settings: ClipSettings, *, is_centred: bool) -> str:
    """A single temporal view is in the middle of the span; several are spread over it."""
    middle = "the middle of " if is_centred else ""
    return {
        "uniform": f"one in {middle}each of equal parts",
        "stride": f"every {count_noun(settings.stride, 'frame')}{', in the middle' if is_centred else ''}",
        "lavila": f"one in {middle}each of LaViLa's parts",
    }[settings.sampling]


def command_line(name: str, opened: OpenedRun, wanted: Any) -> str:
    """The command line that repeats an evaluation: the split, and every setting that differs from its default."""
    words = ["train", "eval", name, opened.title, "--split", wanted.split]
    words += [] if opened.shards is None else ["--shards", opened.shards]
    words += [] if opened.settings.where is None else ["--where", opened.settings.where]
    for flag, value in opened.overrides.given().items():
        words += [f"--{flag.replace('_', '-')}", str(value)]
    values, defaults = asdict(wanted), flatten(asdict(type(wanted)()))
    for group, given in _given_groups(wanted).items():
        # A group replaces the weights' own as a whole, so that what differs from its defaults is named as well.
        used, trained, usual = (opened.in_effect(group, one) for one in (given, None, type(given)()))
        del values[group]
        if used != trained:
            values |= {flag: used[flag] for flag in used if not used[flag] == trained[flag] == usual[flag]}
    for flag, value in flatten(values).items():
        if flag == "split" or value is None or value == defaults.get(flag):
            continue
        flag = f"--{flag.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, str(one)]
    return shlex.join(words)
