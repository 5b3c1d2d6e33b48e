"""Interface of tasks and evaluations to all commands: `TaskSpec` and `EvaluationSpec`.

`clipmill.train.registry` lists the tasks. The command line, the training loop, `train eval`, `train export` and the
pages use a task only through its spec; code outside a task's folder does not depend on the task's name. A spec is
loaded before a command's flags are read, so it refers to its functions by import path
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
    from clipmill.train.weights.exported import Exported


@dataclass(frozen=True)
class CurveGroup:
    """Metrics of evaluations in the loop that share a chart on the page.

    Attributes:
        pattern: Regular expression that matches the complete names of the metrics, with one group.
        title: Title of the chart; it ends in % or in ", times 100" if values are multiplied by 100.
        label: Function that takes the matched group and returns the label of the line.
    """

    pattern: str
    title: str
    label: Callable[[str], str] = lambda group: group.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Evaluation, run by `train eval NAME`.

    Attributes:
        name: Name of the command.
        result: Name in result files, if it differs from `name`.
        help: Description of the command; the first line is its summary.
        example: Example of a command line.
        run_help: Description of the runs that the command accepts.
        needs: Required flags, such as `--label NAME`; empty for none.
        settings: Frozen dataclass with a field `split`, whose fields are the flags.
        score: Function that takes an opened run and settings, and returns an `evaluation.runner.Score`. It may raise
            UserError and FailedWork.
        table: Function that takes a result and returns its table.
        pictures: Key in results for values that only pages show, such as clips with data URIs and numbers for each
            class. The console and --json omit it.
        section: Template of the part of the page that shows these values.
        strips: Function that takes a result and returns its clips in the overview: objects with `words`, `frames` (data
            URIs) and `is_right`.
        curves: Charts of the metrics in the loop.
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
        """Name in result files."""
        return self.result or self.name


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Weights to write in a different format.

    Attributes:
        title: Title of the weights, for errors.
        settings: Settings of the training.
        task: Opened task, with the classes or the decoder of the weights.
        weights: Tensors of the task's model, by name.
        shape: Dimensions of the model.
        logits: Scale and bias that turn cosines into logits.
        form: Name of the format.
        frame_embedding: Temporal embedding of a single image, for dual encoders.
    """

    title: str
    settings: Any
    task: Any
    weights: dict[str, torch.Tensor]
    shape: ModelShape
    logits: Logits
    form: str
    frame_embedding: Literal["mean", "zero"]


@dataclass(frozen=True, kw_only=True)
class AdoptedModel:
    """Weights from another project as the model of a task.

    Attributes:
        settings: Effective settings, with the sizes of clips that the weights record.
        shape: Dimensions of the model.
        open_arguments: Further arguments of `TaskSpec.open`, which otherwise come from a run.
        missing_part: Part of the task's model that the weights lack, such as "a decoder".
    """

    settings: ClipSettings
    shape: ModelShape
    open_arguments: Mapping[str, Any] = field(default_factory=dict)
    missing_part: str = ""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Frozen features of a task's video tower, for probes.

    Attributes:
        description: Description of the features.
        inputs: Function that takes a task and returns a function that converts a batch to clips [B, C, T, H, W], as in
            an evaluation.
        is_consecutive: Function that takes settings and returns True if the latent frames in a clip are consecutive.
    """

    description: str
    inputs: Callable[[Any], Callable[[Batch], torch.Tensor]]
    is_consecutive: Callable[[Any], bool] = lambda settings: False


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """Proposals of `train quickstart` for a task.

    Attributes:
        cpu_preset: Preset for a CPU.
        gpu_preset: Preset for a large GPU; None if all such presets need further files.
        weights: Initial weights with which this preset was published, as for `--init.weights`.
        latents_flags: Flags for data without video; '' if the task does not support a first run on such data.
        no_text_flags: Further flags for captions without stored embeddings.
        needs_captions: True if samples have captions.
        needs_label: True if samples have labels.
        can_search: True if the embeddings of the task's models can be searched by text.
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
    """Task, trained by `train NAME`.

    Attributes:
        name: Name of the command, and of the task in run.json.
        help: Description of the command.
        example: Example of a command line.
        settings: Settings class, whose fields are the flags.
        make: Function that takes settings, attention, device and the result of `run_arguments`, and returns the task.
        run_arguments: Function that takes a run with a checkpoint and returns more arguments for `make`: the classes or
            the tokenizer of the run, so that its task can be opened without its data.
        effective_settings: Function that takes settings, source (None without initial weights) and say. It returns the
            settings with the values that the weights of the source determine.
        evaluations: Evaluations, in the order of the results page.
        finish_run: Function that takes run, settings and say. Rank 0 calls it at the end of a run, before it writes the
            results page.
        start_lines: Function that takes the content of run.json and returns lines to print when training starts.
        formats: Formats of `train export --format`, each with the code that reads it.
        export: Function that takes an `ExportRequest` and returns the exported files; None if `formats` is empty.
        adopt: Function that takes source, path and say. It returns weights that do not come from a run as this task's
            model, or None if they belong to a different task.
        adoptable: Description of the weights that `adopt` accepts, such as "a CLIP with both towers".
        adopts_tags: True if a NAME:TAG of open_clip can be this task's model; other tasks reject it before a download.
        has_frame_embedding: True if an export lets the user choose the temporal embedding of a single image.
        features: Features of the task's video tower; None if it cannot be probed.
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
    export: Callable[[ExportRequest], Exported] | None = None
    adopt: Callable[..., AdoptedModel | None] | None = None
    adoptable: str = ""
    adopts_tags: bool = False
    has_frame_embedding: bool = False
    features: Features | None = None
    first_run: FirstRun | None = None
    pipeline: str | None = None

    @property
    def first_evaluation(self) -> EvaluationSpec | None:
        """First evaluation without required flags; None if all evaluations need flags."""
        return next((evaluation for evaluation in self.evaluations if not evaluation.needs), None)

    def open(self, settings: Any, *, run: RunFolder | None = None, **opened: Any) -> StartableTask:
        """Open the task for settings, and for a run if it has a checkpoint.

        Args:
            opened: Attention backend, device, and for weights other than a run's, the `shape` of the model.
        """
        return self.make(settings, **{**({} if run is None else self.run_arguments(run)), **opened})


# Functions that load the specs of tasks when they are needed, by name.
Tasks = Mapping[str, Callable[[], TaskSpec]]


def take_tags(tasks: Tasks) -> bool:
    """Return True if a NAME:TAG of open_clip may be the model of one of these tasks."""
    return any(open_spec().adopts_tags for open_spec in tasks.values())
