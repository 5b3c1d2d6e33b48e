"""A task and an evaluation as every command knows them: `TaskSpec` and `EvaluationSpec`.

`clipmill.train.registry` lists the tasks. The command line, the training loop, `train eval`, `train export` and the
pages take a task's spec and ask it; nothing outside of a task's folder names the task. A spec is loaded before a
command's flags are read, so it names its functions by their import paths (`clipmill.manifests.plugins.import_late`).
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
    from clipmill.train.weights.exported import Exported
    from clipmill.train.weights.logits import Logits


@dataclass(frozen=True)
class CurveGroup:
    """Metrics of evaluations in the loop that share a chart on the page.

    Attributes:
        pattern: full match of their names, with one group.
        title: of the chart; it ends in % or in ", times 100" where values are shown times 100.
        label: of a line, from the group of the match.
    """

    pattern: str
    title: str
    label: Callable[[str], str] = lambda group: group.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """One evaluation, which is `train eval NAME`.

    Attributes:
        name: of the command.
        result: what result files call it, where that is another name.
        help: what the command does; the first line is its summary.
        example: a command line.
        run_help: which runs it takes.
        needs: flags that it cannot do without, such as `--label NAME`; empty for none.
        settings: frozen dataclass with a field `split`, whose fields are the flags.
        score: (opened run, settings) -> what was found, an `evaluation.runner.Score`. It may raise UserError and
            FailedWork.
        table: of a result.
        pictures: key of a result under which it has what only pages show, such as clips with data URIs and numbers of
            each class. The console and --json leave it out.
        section: template of the part of the page that shows it.
        strips: a result's clips as the overview shows them: objects with `words`, `frames` (data URIs) and `is_right`.
        curves: charts of its metrics in the loop.
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
        """Its name in result files."""
        return self.result or self.name


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Weights that are to be written in another format.

    Attributes:
        title: of the weights, for errors.
        settings: that they were trained with.
        task: opened with them; it has their classes or their decoder.
        weights: of the task's model, by name.
        shape: dimensions of the model.
        logits: what turns cosines into logits.
        frame_embedding: what a picture gets for a temporal embedding; of dual encoders.
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
class Adopted:
    """Weights of another project as the model of a task.

    Attributes:
        settings: effective ones, with the sizes of clips that the weights were trained on as far as they say so.
        shape: dimensions of the model.
        given: further arguments of `TaskSpec.open`: what the task otherwise reads from a run.
        lacks: part of the task's model that the weights do not have, such as "a decoder".
    """

    settings: ClipSettings
    shape: ModelShape
    given: Mapping[str, Any] = field(default_factory=dict)
    lacks: str = ""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The frozen features of a task's video tower, which probes look at.

    Attributes:
        description: which features these are.
        inputs: (task) -> from a batch to clips [B, C, T, H, W] as the tower takes them in an evaluation.
        is_consecutive: whether the frames of latents that a clip shows are consecutive.
    """

    description: str
    inputs: Callable[[Any], Callable[[Batch], torch.Tensor]]
    is_consecutive: Callable[[Any], bool] = lambda settings: False


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """What `train quickstart` proposes for a task.

    Attributes:
        on_gpu: preset for a large GPU; None if there is none that needs no further files.
        weights: initial weights that this preset was published with, as `--init.weights` takes them.
        on_latents: flags for data without video; '' if the task cannot be the first run on them.
        without_text: further ones for captions without stored embeddings.
        needs_captions: whether samples have captions.
        needs_label: whether samples have labels.
        searches: whether the embeddings of its models can be searched by text.
    """

    on_cpu: str
    on_gpu: str | None = None
    weights: str = ""
    on_latents: str = ""
    without_text: str = ""
    needs_captions: bool = True
    needs_label: bool = False
    searches: bool = False


def _keep_nothing(run: RunFolder) -> dict[str, Any]:
    return {}


def _no_lines(facts: Mapping[str, Any]) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task, which is `train NAME`.

    Attributes:
        name: of the command, and of the task in run.json.
        help: what the command does.
        example: a command line.
        settings: its settings, whose fields are the flags.
        make: (settings, attention, device, what `kept` has found) -> the task.
        kept: (run with a checkpoint) -> further arguments of `make`: classes or tokens, which the data may not have had
            when the run began.
        effective: (settings, source, say) -> the settings that take effect with the weights of a source, or of none.
        evaluations: in the order in which the page shows them.
        at_end: (run, settings, say), called by the first rank before the page of a finished run is written.
        start_lines: what run.json's facts say of the start, for the console.
        formats: of `train export --format`.
        export: the files of an export.
        adopt: (source, path, say) -> weights that are not a run as this task's model; None if they are of another task.
        adopted: which these are, such as "a CLIP with both towers".
        adopts_tags: whether a NAME:TAG of open_clip is this task's model; others refuse it before a download.
        has_frame_embedding: whether an export chooses the temporal embedding of a picture.
        features: of its video tower, None where it cannot be probed.
        first_run: None for a task that `train quickstart` does not offer.
        pipeline: the Hugging Face Hub's name of what exported weights are for.
    """

    name: str
    help: str
    example: str
    settings: type[ClipSettings]
    make: Callable[..., StartableTask]
    kept: Callable[[RunFolder], dict[str, Any]] = _keep_nothing
    effective: Callable[..., Any]
    evaluations: Sequence[EvaluationSpec] = ()
    at_end: Callable[..., None] | None = None
    start_lines: Callable[[Mapping[str, Any]], list[str]] = _no_lines
    formats: Mapping[str, str] = field(default_factory=dict)
    export: Callable[[ExportRequest], Exported] | None = None
    adopt: Callable[..., Adopted | None] | None = None
    adopted: str = ""
    adopts_tags: bool = False
    has_frame_embedding: bool = False
    features: Features | None = None
    first_run: FirstRun | None = None
    pipeline: str | None = None

    @property
    def first_evaluation(self) -> EvaluationSpec | None:
        """The evaluation to begin with: the first that needs no flags."""
        return next((one for one in self.evaluations if not one.needs), None)

    def open(self, settings: Any, *, run: RunFolder | None = None, **opened: Any) -> StartableTask:
        """The task for settings, and for a run that has a checkpoint, if there is one.

        Args:
            opened: the attention backend, the device, and for weights that are used as they are the `shape` of models.
        """
        return self.make(settings, **{**({} if run is None else self.kept(run)), **opened})


# Specs of some tasks by name, opened when they are needed.
Tasks = Mapping[str, Callable[[], TaskSpec]]


def take_tags(tasks: Tasks) -> bool:
    """Whether a NAME:TAG of open_clip may be the model of one of these tasks."""
    return any(open_spec().adopts_tags for open_spec in tasks.values())
