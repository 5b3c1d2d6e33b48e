"""Run an evaluation of trained weights, and write its result file.

This module has what all evaluations share: opening a run, the common fields of a result, the description of the
clips, and the command line that repeats the evaluation. What is scored, and how, is up to the evaluation
(`train.spec.EvaluationSpec.score`).
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from train.config.model import Init
from train.config.training import ClipSettings, flat
from train.data.decoding.clip import Views
from train.data.outcomes import FailedSample
from train.engine.trained_run import Overrides, TrainedRun, open_trained_run, read_settings, shape_of_run
from train.run.folder import RunFolder, result_name
from train.spec import EvaluationSpec, TaskSpec
from train.weights.loading import load_whole
from train.weights.sources import Say, open_weights

_ONE_VIEW = Views()
_AS_TRAINED = Overrides()


class EvaluatedSamples(Protocol):
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
        shards: data that replaces the run's own, or None.
        task: the task of the weights, with the classes or tokens that were kept with them.
        overrides: those that differ from the training.
        lacks: part of the task's model that the weights do not have, such as "a decoder"; '' for none.
    """

    spec: TaskSpec
    title: str
    run: RunFolder | None
    settings: Any
    shards: str | None
    trained: TrainedRun[Any]
    task: Any
    overrides: Overrides = _AS_TRAINED
    lacks: str = ""

    @property
    def name(self) -> str:
        """Short name of the weights."""
        return self.title if self.run is None else self.run.path.resolve().name

    def result_name(self, name: str) -> str:
        """File name of the result `name`; other data than the run's own and overrides have others."""
        facts = {} if self.run is None else self.run.data_facts(self.shards)
        return result_name(f"{name}{self.overrides.suffix()}", facts)


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


def open_for(
    spec: TaskSpec,
    run: RunFolder,
    *,
    shards: str | None = None,
    device: str | None = None,
    overrides: Overrides = _AS_TRAINED,
    is_without_data: bool = False,
    say: Say = print,
) -> OpenedRun:
    """Open the latest checkpoint of a run and its task.

    Args:
        shards: data that replaces the run's own.
        device: replaces the run's own.
        overrides: of how clips are shown; embeddings of time and place are interpolated.
        is_without_data: let the task build models without samples, by the shapes in the checkpoint.
        say: prints which tensors were interpolated.

    Raises:
        UserError: there is no checkpoint, or it does not fit this machine, the run's settings or the overrides.
    """
    settings: ClipSettings = read_settings(run, spec.settings, shards=shards)
    settings = settings if device is None else replace(settings, device=device)  # type: ignore[arg-type]
    trained = open_trained_run(run, settings)
    overrides = overrides.beside(settings)
    settings = replace(settings, **overrides.given())
    shape = {"shape": shape_of_run(run, settings)} if is_without_data else {}
    task: Any = spec.open(settings, attention=trained.attention, device=trained.device, run=run, **shape)
    if overrides.given():
        source = open_weights(Init(weights=str(run.path)))
        assert source is not None
        load = partial(load_whole, source=source, fit=task.fit_whole, say=say)
        trained = replace(trained, settings=settings, load=load)
    return OpenedRun(
        spec=spec,
        title=str(run.path),
        run=run,
        settings=settings,
        shards=shards,
        trained=trained,
        task=task,
        overrides=overrides,
    )


def evaluate(
    spec: TaskSpec, evaluation: EvaluationSpec, run: RunFolder, wanted: Any, *, shards: str | None = None
) -> dict[str, Any]:
    """Evaluate the latest checkpoint of a run, and write the result file.

    Args:
        wanted: settings of the evaluation.
        shards: data that replaces the run's own.

    Raises:
        UserError: the run cannot be opened, or its data lack what the evaluation needs.
        FailedWork: nothing could be decoded.
    """
    opened = open_for(spec, run, shards=shards)
    found = evaluation.score(opened, wanted)
    result = {
        "evaluation": evaluation.result_name,
        "split": wanted.split,
        **run.data_facts(shards),
        "step": opened.trained.step,
        "weights": opened.trained.weights,
        "data": found.samples.describe(),
        "variant": found.samples.variant_name,
        "clip": found.clip,
        **found.values,
        "failed": [failure.as_json() for failure in found.failed],
        "command": command_line(evaluation.name, run, wanted, shards=shards),
    }
    path = run.write_evaluation(found.name, result)
    if found.beside is not None:
        found.beside(path, result)
    return result


def split_metrics(split: str, metrics: Mapping[str, float], *, num_failed: int = 0) -> dict[str, float]:
    """Metrics of an evaluation in the training loop, named `<split>/<name>`; failures are counted if there are any."""
    counted = {**metrics, "num_failed": float(num_failed)} if num_failed else metrics
    return {f"{split}/{name}": value for name, value in counted.items()}


def every_for(num_samples: int, *, at_most: int) -> int:
    """The smallest k for which every k-th sample makes at most `at_most` samples."""
    return -(-num_samples // at_most)


def describe_clip(
    settings: ClipSettings, *, views: Views = _ONE_VIEW, mean_of: str = "", is_consecutive: bool = False
) -> str:
    """Describe what an evaluation sees of a clip: number and sampling of frames, views, crop and size.

    Args:
        views: of clips of pixels.
        mean_of: what is averaged over several views.
        is_consecutive: the frames of latents are consecutive.
    """
    frames = f"T = {settings.num_frames} frames"
    if getattr(settings, "input", "pixels") == "latents":
        which = "in a row, in the middle" if is_consecutive else "one in the middle of each of equal parts"
        segment: str = settings.segment  # type: ignore[attr-defined]
        return f"{frames} of latents of a segment of {segment}, {which}"
    crops = "1 crop (centre square)" if views.num_crops == 1 else f"{views.num_crops} crops along the longer side"
    moments = _describe_sampling(settings, is_centred=views.num_clips == 1)
    if len(views) == 1:
        return f"{frames}, {moments}, {crops}, {settings.size_px} px"
    clips = "1 clip" if views.num_clips == 1 else f"{views.num_clips} clips"
    return f"{frames}, {moments}, {clips} x {crops}, {settings.size_px} px, mean of their {mean_of}"


def _describe_sampling(settings: ClipSettings, *, is_centred: bool) -> str:
    """A single temporal view is in the middle of the span; several are spread over it."""
    middle = "the middle of " if is_centred else ""
    return {
        "uniform": f"one in {middle}each of equal parts",
        "stride": f"every {settings.stride} frames{', in the middle' if is_centred else ''}",
        "lavila": f"one in {middle}each of LaViLa's parts",
    }[settings.sampling]


def command_line(name: str, run: RunFolder, wanted: Any, *, shards: str | None) -> str:
    """The command line that repeats an evaluation: the split, and every setting that differs from its default."""
    words = ["train", "eval", name, str(run.path), "--split", wanted.split]
    words += [] if shards is None else ["--shards", shards]
    defaults = _defaults(wanted)
    for flag, value in flat(asdict(wanted)).items():
        if flag == "split" or value is None or value == defaults.get(flag):
            continue
        flag = f"--{flag.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, str(one)]
    return shlex.join(words)


def _defaults(wanted: Any) -> dict[str, Any]:
    """Defaults by flag; a group whose default is None has the defaults of its own class."""
    found = flat(asdict(type(wanted)()))
    for one in fields(wanted):
        value = getattr(wanted, one.name)
        if is_dataclass(value):
            kind: Any = type(value)
            found |= flat(asdict(kind()), f"{one.name}.")
    return found
