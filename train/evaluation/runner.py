"""Run an evaluation of trained weights, and write the result file.

All evaluations share this code. It opens the run, and fills the common fields of a result, such as the description of
the clips and the command line that repeats the evaluation. The scores are computed by the function in the evaluation's
spec (`clipmill.train.spec.EvaluationSpec.score`).
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
from clipmill.manifests.storage.mirrors import show_urls
from clipmill.train.config.clips import AS_IN_TRAINING, AS_TRAINED, ClipSettings, LatentSettings, OpenOptions, Overrides
from clipmill.train.config.files import load_settings
from clipmill.train.config.shards import kind_of
from clipmill.train.config.training import flatten, plain_values
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.held_out import EvaluatedClips, held_out_facts
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.query import TARS_SPLIT
from clipmill.train.engine.trained_run import TrainedRun, open_trained_run, shape_of_run
from clipmill.train.evaluation.tables import mark_title
from clipmill.train.models.dual_encoder import ModelShape
from clipmill.train.run.environment import require_parts
from clipmill.train.run.folder import RunFolder, data_facts, is_same_evaluation, read_object, result_name, suffix_of
from clipmill.train.spec import EvaluationSpec, TaskSpec
from clipmill.train.weights.architecture import Logits, logits_of, read_logits
from clipmill.train.weights.loading import load_all_parameters
from clipmill.train.weights.source import Say, Source
from clipmill.train.weights.sources import open_run_weights

_ONE_VIEW = Views()


class EvaluatedSamples(EvaluatedClips, Protocol):
    """Samples that an evaluation scores."""

    @property
    def variant_name(self) -> str:
        """Names of the column variants."""
        ...

    def describe(self) -> str:
        """Return the number and kind of the samples, as text."""
        ...


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """Weights that are ready to be evaluated, from a run or from another source.

    Attributes:
        spec: Spec of the task.
        title: Name of the weights, as given by the user.
        run: Folder of the run; None if the weights are not a run.
        settings: Settings of the model, with the data to evaluate and the overrides.
        shape: Dimensions of the model.
        shards: Data to use instead of the run's data; None for the run's data.
        variant: Names of the requested variants.
        trained: Weights, with their device, precision and attention.
        task: Task of the weights, with the classes or the tokenizer saved with the weights.
        overrides: Overrides whose values differ from the values used in training.
        missing_part: Part of the task's model that the weights lack, such as "a decoder"; '' if the model is complete.
        source: Source of the weights; None for a run.
        checkpoint: Checkpoint of the run; None if the weights are not a run.
    """

    spec: TaskSpec
    title: str
    run: RunFolder | None
    settings: Any
    shape: ModelShape
    shards: str | None
    variant: tuple[str, ...]
    trained: TrainedRun[Any]
    task: Any
    overrides: Overrides = AS_TRAINED
    missing_part: str = ""
    source: Source | None = None
    checkpoint: Path | None = None

    def logits(self) -> Logits:
        """Return the scale and bias that convert cosine similarities of embeddings to logits."""
        if self.checkpoint is not None:
            return read_logits(self.checkpoint)
        return Logits() if self.source is None else logits_of(self.source.converted.tensors)

    def require_complete(self) -> None:
        """Raise a UserError if the weights lack a part of the task's model."""
        if self.missing_part:
            raise UserError(
                f"{self.title} has no {self.missing_part.removeprefix('a ')}, which this evaluation needs",
                hint="use weights of a complete model, or run `train eval probe`, which needs only the video tower",
            )

    def facts(self) -> dict[str, Any]:
        """Return the entries of a result that describe the data and, if the weights are not a run, the weights."""
        if self.run is not None:
            return self.run.data_facts(self.shards)
        return {"source": self.title, "shards": data_facts("", self.shards)["shards"]}

    @property
    def name(self) -> str:
        """Short name of the weights."""
        return self.title if self.run is None else self.run.name

    def result_name(self, name: str, flags: Any) -> str:
        """Return the file name of the result `name`. The file name depends on the data and the overrides."""
        return result_name(f"{name}{suffix_of(self.differences(flags))}", self.facts())

    def differences(self, flags: Any) -> dict[str, Any]:
        """Return the settings that differ from the run's settings, by flag: clips, `--where`, variants and groups."""
        differences = self.overrides.given_values()
        if self.settings.where:
            differences["where"] = self.settings.where
        if self.variant:
            differences["variant"] = " ".join(self.variant)
        for name, group in _replaced_groups(flags).items():
            training_values = self.effective_values(name)
            differences |= {
                flag: value
                for flag, value in self.effective_values(name, group).items()
                if value != training_values[flag]
            }
        return differences

    def effective_values(self, name: str, group: Any = None) -> dict[str, Any]:
        """Return the effective values of a settings group, by flag.

        Args:
            name: Name of the group, and of the task's method that completes it, such as `decoding`.
            group: Settings of the group; None for the training settings.
        """
        return flatten(plain_values(asdict(getattr(self.task, name)(group))), f"{name}.")


def _replaced_groups(flags: Any) -> dict[str, Any]:
    """Return the groups of an evaluation's settings that replace groups of the training settings."""
    groups = {group.name: getattr(flags, group.name) for group in fields(flags) if group.default is None}
    return {name: group for name, group in groups.items() if is_dataclass(group)}


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of an evaluation.

    Attributes:
        name: Name of the result file. Repeating the same evaluation replaces the file.
        samples: Samples that were scored.
        clip: Description of the clips (`describe_clip`).
        values: JSON-serialisable metrics and other values of the result.
        failed: Samples that could not be decoded.
        write_more: Function that takes the path of the result file and the result, and writes additional files next to
            it.
    """

    name: str
    samples: EvaluatedSamples
    clip: str
    values: dict[str, Any]
    failed: Sequence[FailedSample]
    write_more: Callable[[Path, dict[str, Any]], None] | None = field(default=None)


def open_for(spec: TaskSpec, run: RunFolder, options: OpenOptions = AS_IN_TRAINING, *, say: Say = print) -> OpenedRun:
    """Open a run's checkpoint and the run's task.

    Args:
        spec: Spec of the task.
        run: Folder of the run.
        options: Checkpoint, data and overrides.
        say: Function that prints which tensors were interpolated.

    Raises:
        UserError: The run has no checkpoint, or its checkpoint does not fit this machine, the settings or the
            overrides.
    """
    saved_settings: ClipSettings = load_settings(run.settings, spec.settings)
    require_parts(saved_settings.towers, run)
    checkpoint = options.checkpoint or run.require_checkpoint()
    trained = open_trained_run(
        run, replace(saved_settings, device=options.device or saved_settings.device), checkpoint=checkpoint
    )
    settings, overrides = options.apply_to(trained.settings)
    shape = shape_of_run(run, settings)
    arguments = {"shape": shape} if options.is_without_data else {}
    task: Any = spec.open(settings, attention=trained.attention, device=trained.device, run=run, **arguments)
    if overrides.given_values():
        source = open_run_weights(run, checkpoint=checkpoint)
        load = partial(load_all_parameters, source=source, fit=task.fit_all_parameters, say=say)
        trained = replace(trained, settings=settings, load=load)
    return OpenedRun(
        spec=spec,
        title=show_urls(str(run.path)),
        run=run,
        settings=settings,
        shards=options.shards,
        variant=options.variant,
        trained=trained,
        task=task,
        overrides=overrides,
        shape=shape,
        checkpoint=checkpoint,
    )


def evaluate(
    spec: TaskSpec, evaluation: EvaluationSpec, run: RunFolder, flags: Any, *, shards: str | None = None
) -> dict[str, Any]:
    """Evaluate the latest checkpoint of a run, and write the result file; see `open_for` and `score_opened`."""
    return score_opened(open_for(spec, run, OpenOptions(shards=shards)), evaluation, flags)


def score_opened(
    opened: OpenedRun,
    evaluation: EvaluationSpec,
    flags: Any,
    *,
    out: Path | None = None,
    on_write: Callable[[Path], object] = lambda path: None,
) -> dict[str, Any]:
    """Evaluate opened weights. Write the result file to the run or, for other weights, to `out`.

    Args:
        opened: Weights to evaluate.
        evaluation: Spec of the evaluation.
        flags: Settings of the evaluation.
        out: Folder for the result file if the weights are not a run; by default no file is written.
        on_write: Function that is called with the path of the result file.

    Raises:
        UserError: The data do not fit the evaluation, or `out` contains a result for other weights, data or flags.
        FailedWork: No sample could be decoded.
    """
    if not kind_of(opened.settings.folder).has_manifest:
        flags = replace(flags, split=TARS_SPLIT)  # tars have no splits; the result is named after the data
    score: Score = evaluation.score(opened, flags)
    facts = opened.facts()
    overlap = held_out_facts(score.samples, opened.settings, split=flags.split, data=facts)
    differences = opened.differences(flags)
    result = {
        "evaluation": evaluation.result_name,
        "split": flags.split,
        **facts,
        "step": opened.trained.step,
        "weights": opened.trained.weights,
        "overrides": differences,
        "data": score.samples.describe(),
        "variant": score.samples.variant_name,
        "clip": score.clip,
        **({} if overlap is None else {"held_out": asdict(overlap)}),
        **score.values,
        **_incomplete_note(score),
        "failed": [asdict(failure) for failure in score.failed],
        "command": command_line(evaluation.name, opened, flags),
    }
    path = None
    if opened.run is not None:
        path = opened.run.write_evaluation(f"{score.name}{suffix_of(differences)}", result)
    elif out is not None:
        path = out / f"{opened.result_name(score.name, flags)}.json"
        if path.exists() and not is_same_evaluation(read_object(path), result):
            raise UserError(f"{path} contains a result for other weights, data or flags", hint="use a different --out")
        out.mkdir(parents=True, exist_ok=True)
        publish_json(path, result)
    if path is not None:
        if score.write_more is not None:
            score.write_more(path, result)
        on_write(path)
    return result


def _incomplete_note(score: Score) -> dict[str, str]:
    """Return entries that mark a result as incomplete; {} if all samples of the protocol were scored."""
    note = score.values.get("incomplete", "")
    if not score.failed:
        return {"incomplete": note} if note else {}
    num_failed = len(score.failed)
    reason = f"{count_noun(num_failed, 'sample')} could not be decoded and {'is' if num_failed == 1 else 'are'}"
    title = score.values.get("title", "")
    return {
        "incomplete": f"{note}; {reason} not scored" if note else f"{reason} not scored",
        **({"title": mark_title(title)} if title else {}),
    }


def split_metrics(split: str, metrics: Mapping[str, float], *, num_failed: int = 0) -> dict[str, float]:
    """Return the metrics as `<split>/<name>`, for the training log, with the number of failures unless it is 0."""
    named_metrics = {**metrics, "num_failed": float(num_failed)} if num_failed else metrics
    return {f"{split}/{name}": value for name, value in named_metrics.items()}


def sample_stride(num_samples: int, *, at_most: int) -> int:
    """Return the smallest k such that taking every k-th sample yields at most `at_most` samples."""
    return -(-num_samples // at_most)


def describe_clip(
    settings: ClipSettings,
    samples: Any = None,
    *,
    views: Views = _ONE_VIEW,
    mean_of: str = "",
    is_consecutive: bool = False,
) -> str:
    """Describe the clips of an evaluation: number and sampling of frames, views, crops and resolution.

    Args:
        settings: Settings of the clips.
        samples: Samples that read the clips. They are required for latents, to look up the segment length.
        views: Temporal and spatial views of a pixel clip.
        mean_of: Noun for the values that are averaged over views.
        is_consecutive: True if the frames of latents are consecutive.
    """
    frames = f"T = {count_noun(settings.num_frames, 'frame')}"
    if isinstance(settings, LatentSettings) and settings.reads_latents:
        position = "consecutive, in the middle" if is_consecutive else "one in the middle of each equal part"
        return f"{frames} of latents from a {samples.reader.segment_s:g}s segment, {position}"
    crops = "1 crop (centre square)" if views.num_crops == 1 else f"{views.num_crops} crops along the longer side"
    # A single temporal view is in the middle of the span. Several views are spread over the span.
    is_centred = views.num_clips == 1
    middle = "the middle of " if is_centred else ""
    sampling = {
        "uniform": f"one in {middle}each equal part",
        "stride": f"every {count_noun(settings.stride, 'frame')}{', in the middle' if is_centred else ''}",
        "lavila": f"one in {middle}each of LaViLa's parts",
    }[settings.sampling]
    if len(views) == 1:
        return f"{frames}, {sampling}, {crops}, {settings.size_px} px"
    clips = count_noun(views.num_clips, "clip")
    return f"{frames}, {sampling}, {clips} x {crops}, {settings.size_px} px, mean of their {mean_of}"


def command_line(name: str, opened: OpenedRun, flags: Any) -> str:
    """Return the command line that repeats an evaluation, with the split and the settings that are not defaults."""
    arguments = ["train", "eval", name, opened.title, "--split", flags.split]
    arguments += [] if opened.shards is None else ["--shards", opened.shards]
    for name in opened.variant:
        arguments += ["--variant", name]
    arguments += [] if opened.settings.where is None else ["--where", opened.settings.where]
    for flag, value in opened.overrides.given_values().items():
        arguments += [f"--{flag.replace('_', '-')}", str(value)]
    values, defaults = asdict(flags), flatten(asdict(type(flags)()))
    for name, group in _replaced_groups(flags).items():
        # A group replaces the run's complete group. Omit a flag only if its chosen, trained and default values agree.
        chosen_values, trained_values, default_values = (
            opened.effective_values(name, item) for item in (group, None, type(group)())
        )
        del values[name]
        if chosen_values != trained_values:
            values |= {
                flag: chosen_values[flag]
                for flag in chosen_values
                if not chosen_values[flag] == trained_values[flag] == default_values[flag]
            }
    for flag, value in flatten(values).items():
        if flag == "split" or value is None or value == defaults.get(flag):
            continue
        flag = f"--{flag.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            arguments += [flag] if item is True else [flag, str(item)]
    return shlex.join(arguments)
