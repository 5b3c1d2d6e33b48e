"""`TaskSpec` and `EvaluationSpec`: descriptions of tasks and evaluations for all commands.

`clipmill.train.registry` lists the tasks. The command line, the training loop, `train eval`, `train export` and the
results pages use a task only through its spec; code outside a task's folder does not depend on the task's name. A spec
is imported before the flags of a command are parsed, so it refers to its functions by import path
(`clipmill.manifests.plugins.import_late`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from clipmill.train.config.clips import ClipSettings
    from clipmill.train.data.batch import Batch
    from clipmill.train.engine.task import StartableTask
    from clipmill.train.evaluation.tables import Table
    from clipmill.train.models.dual_encoder import ModelShape
    from clipmill.train.run.folder import RunFolder
    from clipmill.train.weights.architecture import Logits
    from clipmill.train.weights.exported import Export


@dataclass(frozen=True)
class CurveGroup:
    """Metrics from evaluations during training. The metrics of a group share a chart on the results page.

    Attributes:
        pattern: Regular expression that matches the complete names of the metrics, with one group.
        title: Title of the chart. If it ends in "%" or ", times 100", the chart shows the values multiplied by 100.
        label: Function that takes the text of the group and returns the label of the metric's line.
    """

    pattern: str
    title: str
    label: Callable[[str], str] = lambda group: group.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Evaluation that `train eval NAME` runs.

    Attributes:
        name: Name of the command.
        result: Name of the evaluation in result files; empty if it is `name`.
        help: Description of the command; the first line is its summary.
        example: Example of a command line.
        run_help: Description of the runs that the command accepts.
        needs: Required flags, such as `--label NAME`; empty for none.
        settings: Frozen dataclass whose fields are the flags. It must have a field `split`.
        score: Function that takes an opened run and settings, and returns an `evaluation.runner.Score`. The function
            may raise UserError and FailedWork.
        table: Function that takes a result and returns its table.
        pictures: Key of the values in a result that are shown only on pages, such as clips as data URIs and metrics of
            each class. The console and --json omit these values.
        section: Template of the section of the results page that shows these values.
        strips: Function that takes a result and returns its clips for the overview page: objects with `words`,
            `frames` (data URIs) and `is_right`.
        curves: Charts of this evaluation's metrics during training.
    """

    name: str
    result: str = ""
    help: str
    example: str
    run_help: str
    needs: str = ""
    settings: type[Any]
    score: Callable[[Any, Any], Any]
    table: Callable[[dict[str, Any]], Table]
    pictures: str = ""
    section: Path | None = None
    strips: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None
    curves: tuple[CurveGroup, ...] = ()

    @property
    def result_name(self) -> str:
        """Name of the evaluation in result files."""
        return self.result or self.name


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Trained weights, and the format in which to write them.

    Attributes:
        title: Title of the weights, for error messages.
        settings: Settings of the run that trained the weights.
        task: Opened task, including the classes or the decoder that belong to the weights.
        weights: Tensors of the task's model, keyed by name.
        shape: Dimensions of the model.
        logits: Scale and bias that turn cosines into logits.
        format_name: Name of the format.
        frame_embedding: Temporal embedding of a single image: the mean over all frames, or zero. Only dual encoders
            use this value.
    """

    title: str
    settings: Any
    task: Any
    weights: dict[str, torch.Tensor]
    shape: ModelShape
    logits: Logits
    format_name: str
    frame_embedding: Literal["mean", "zero"]


@dataclass(frozen=True, kw_only=True)
class AdoptedModel:
    """Weights from another project that a task uses as its model.

    Attributes:
        settings: Effective settings, with the clip dimensions that the weights record.
        shape: Dimensions of the model.
        open_arguments: Additional arguments for `TaskSpec.open` that a run would otherwise provide.
        missing_part: Part of the task's model that the weights lack, such as "a decoder"; empty if they are complete.
    """

    settings: ClipSettings
    shape: ModelShape
    open_arguments: Mapping[str, Any] = field(default_factory=dict)
    missing_part: str = ""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Frozen features from a task's video tower, for probes and searches.

    Attributes:
        description: Description of the features.
        inputs: Function that takes a task and returns a function that converts a batch to the clips [B, C, T, H, W]
            that the model takes in evaluations.
        is_consecutive: Function that takes settings and returns True if the latent frames in a clip are consecutive.
    """

    description: str
    inputs: Callable[[Any], Callable[[Batch], torch.Tensor]]
    is_consecutive: Callable[[Any], bool] = lambda settings: False


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """Flags and presets that `train quickstart` proposes for a task.

    Attributes:
        cpu_preset: Preset for a CPU.
        gpu_preset: Preset for a large GPU; None if all such presets need additional files.
        weights: Value of `--init.weights` with which `gpu_preset` was published; empty for random weights.
        latents_flags: Flags for data that have latents but no video; empty if the task has no first run on such data.
        no_text_flags: Additional flags if the captions have no stored embeddings.
        needs_captions: True if samples have captions.
        needs_label: True if samples have labels.
        can_search: True if embeddings from the task's models can be searched by text.
    """

    cpu_preset: str
    gpu_preset: str | None = None
    weights: str = ""
    latents_flags: str = ""
    no_text_flags: str = ""
    needs_captions: bool = True
    needs_label: bool = False
    can_search: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Task that `train NAME` trains.

    Attributes:
        name: Name of the command, and of the task in run.json.
        help: Description of the command.
        example: Example of a command line.
        settings: Settings class. Its fields are the flags.
        make: Function that takes settings, attention, device and the result of `run_arguments`, and returns the task.
        run_arguments: Function that takes a run with a checkpoint and returns additional arguments for `make`: the
            classes or the tokenizer of the run, so that the task can be opened without the run's data.
        effective_settings: Function that takes settings, source (None without initial weights) and `say`. It returns
            the settings with the values that the initial weights determine.
        evaluations: Evaluations, in the order of the results page.
        finish_run: Function that takes run, settings and `say`. Rank 0 calls the function at the end of a run, before
            the results page is written.
        start_lines: Function that takes the content of run.json and returns lines to print when training starts.
        formats: Code that opens an exported folder, keyed by the format (`train export --format`).
        export: Function that takes an `ExportRequest` and returns the exported files; None if `formats` is empty.
        adopt: Function that takes source, path and `say`. It returns this task's model for weights that do not come
            from a run, or None if the weights belong to a different task.
        adoptable: Description of the weights that `adopt` accepts, such as "a CLIP with both towers".
        adopts_tags: True if the task accepts a NAME:TAG of open_clip as its model. Other tasks reject a tag without
            downloading anything.
        has_frame_embedding: True if an export lets the user choose the temporal embedding of a single image.
        features: Features of the task's video tower; None if the tower cannot be probed.
        first_run: Proposals for a first run; None for a task that `train quickstart` does not offer.
        pipeline: Pipeline tag of exported weights on the Hugging Face Hub.
    """

    name: str
    help: str
    example: str
    settings: type[ClipSettings]
    make: Callable[..., StartableTask]
    run_arguments: Callable[[RunFolder], dict[str, Any]] = lambda run: {}
    effective_settings: Callable[..., Any]
    evaluations: Sequence[EvaluationSpec] = ()
    finish_run: Callable[..., None] | None = None
    start_lines: Callable[[Mapping[str, Any]], list[str]] = lambda facts: []
    formats: Mapping[str, str] = field(default_factory=dict)
    export: Callable[[ExportRequest], Export] | None = None
    adopt: Callable[..., AdoptedModel | None] | None = None
    adoptable: str = ""
    adopts_tags: bool = False
    has_frame_embedding: bool = False
    features: Features | None = None
    first_run: FirstRun | None = None
    pipeline: str | None = None

    @property
    def first_evaluation(self) -> EvaluationSpec | None:
        """First evaluation that has no required flags; None if there is no such evaluation."""
        return next((evaluation for evaluation in self.evaluations if not evaluation.needs), None)

    def open(self, settings: Any, *, run: RunFolder | None = None, **arguments: Any) -> StartableTask:
        """Open the task with the given settings.

        Args:
            run: Run with a checkpoint that provides the classes or the tokenizer; None for a new run or other weights.
            arguments: Attention backend and device. For weights that do not come from a run, also the `shape` of the
                model, and the `AdoptedModel.open_arguments`.
        """
        return self.make(settings, **{**({} if run is None else self.run_arguments(run)), **arguments})


# Functions that import the spec of a task, keyed by the name of the task.
Tasks = Mapping[str, Callable[[], TaskSpec]]


def take_tags(tasks: Tasks) -> bool:
    """Return True if one of these tasks accepts a NAME:TAG of open_clip as its model."""
    return any(open_spec().adopts_tags for open_spec in tasks.values())
