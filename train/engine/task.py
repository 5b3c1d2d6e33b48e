"""Interface between the training loop and the tasks.

A task provides its samples, model, objective and evaluations. The loop does everything else: steps, optimizer, ranks,
logging, checkpoints and resuming.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.augment.model_input import draw_parameters, to_model_input
from clipmill.train.config.clips import ClipSettings, adapted_towers
from clipmill.train.config.evaluation import EvaluatedData
from clipmill.train.config.model import Tower, frozen_part
from clipmill.train.config.training import ParallelSettings, TrainingSettings
from clipmill.train.data.batch import Batch
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.query import open_mixed
from clipmill.train.distributed.world import World
from clipmill.train.engine.rank_consistency import NamedSamples
from clipmill.train.losses.objective import Objective
from clipmill.train.models.attention import AttentionBackend
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.models.transformer import blocks_of, compile_blocks
from clipmill.train.optim.parameters import freeze, plain_name
from clipmill.train.run.folder import data_facts
from clipmill.train.weights.conversion import LOGIT_SCALE
from clipmill.train.weights.source import Base, Say, Source

if TYPE_CHECKING:
    from clipmill.train.data.held_out import EvaluatedClips
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.distributed.pipeline import LayerCost
    from clipmill.train.weights.loading import LoadedWeights

    class EvaluatedSet(NamedSamples, EvaluatedClips, Protocol):
        """Samples of an evaluation during training."""


class Task(Protocol):
    """Training task, as seen by the training loop.

    Attributes:
        name: Name on the command line.
        columns: Columns of the data folder that the samples are read from.
    """

    name: str
    columns: tuple[str, ...]

    def training_set(self, world: World) -> TrainingSet:
        """Return this rank's training samples: `batch / world.size` samples of each batch."""
        ...

    def build_model(self, samples: Any) -> nn.Module:
        """Return a new model for `samples`. Its weights are drawn from torch's default generator."""
        ...

    def build_objective(self, samples: Any, world: World) -> Objective:
        """Return the objective. If the objective stores a value for each sample, the ranks shard these values."""
        ...

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that FSDP shards individually: the blocks of the transformers."""
        ...

    def evaluate(self, model: nn.Module, world: World) -> Mapping[str, float | list[float]]:
        """Evaluate a model during training. Return the same metrics on all ranks; {} if there are no evaluations.

        Each entry of `settings.evaluated_data()` is evaluated. The metrics have keys `<name>/<metric>`, where `<name>`
        is the name of the entry. A metric with one value per batch, such as the loss, is a list. Lists are logged, but
        --best cannot select them.

        All ranks call this method at the same step, with the model in evaluation mode and gradients disabled. Forward
        passes must not communicate, because the number of passes may differ between ranks.
        """
        ...


class StartableTask(Task, Protocol):
    """Task that the commands can start. Its model can be initialised from weights, and run.json describes the task."""

    def training_set(self, world: World) -> NamedSamples:
        """Return this rank's training samples."""
        ...

    def start_from(self, source: Source, samples: Any, *, say: Say) -> "LoadedWeights":
        """Make `build_model` initialise models from the weights in `source`.

        Raises:
            UserError: The weights do not fit the model.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Return the entries about this task for run.json. The training set must already be open."""
        ...

    def files(self) -> dict[str, bytes]:
        """Return files ({path: content}) to store next to run.json, so that the weights can be used without data."""
        ...


@runtime_checkable
class PipelineTask(Protocol):
    """Task whose model is a flat list of layers, and whose objective can train a `distributed.pipeline.Pipeline`."""

    def build_model(self, samples: Any) -> nn.Module: ...

    def layers(self, model: Any) -> "Sequence[LayerCost]":
        """Return the layers of a model, in order."""
        ...

    def extract_layers(self, model: Any, layers: range) -> nn.Module:
        """Move the given layers of the model into a new module, and return the module. Parameters keep their names."""
        ...


def check_stages(task: Task, samples: Any, settings: TrainingSettings, *, world: World) -> None:
    """Check on the meta device that the model of a task can be cut into --parallel.stages stages.

    Raises:
        UserError: The model cannot be cut into this many stages, or a batch cannot be divided into suitable
            microbatches.
    """
    parallel = settings.parallel
    if parallel.stages == 1:
        return
    if not isinstance(task, PipelineTask):
        raise UserError(
            f"--parallel.stages {parallel.stages} is not supported: "
            f"models trained by `train {task.name}` cannot be cut into stages",
            hint="use --parallel.strategy fsdp if the model does not fit on one GPU",
            flags=("--parallel.stages",),
        )
    from clipmill.train.distributed.pipeline import check_microbatches, partition

    share = world.replicas.share(settings.batch)
    check_microbatches(share, size=settings.microbatch or share, settings=parallel)
    with torch.device("meta"):
        model = task.build_model(samples)
    partition(task.layers(model), num_stages=parallel.stages, rule=parallel.partition)


def take_stage(task: object, model: nn.Module, parallel: ParallelSettings, *, stages: World) -> nn.Module:
    """Return the layers of a model in the pipeline stage of this rank, or the complete model if there is one stage.

    Raises:
        UserError: The model cannot be cut into this many stages.
    """
    if stages.size == 1:
        return model
    from clipmill.train.distributed.pipeline import partition

    assert isinstance(task, PipelineTask)
    layers_of_stages = partition(task.layers(model), num_stages=stages.size, rule=parallel.partition)
    return task.extract_layers(model, layers_of_stages[stages.rank])


# Parts of pretrained models that a video tower does not use: descriptions, keyed by the prefix of the tensor names.
UNUSED_PARTS = {
    "text.": "the text tower",
    "head.": "a classifier's last layer (head)",
    "video.proj": "the projection (video.proj)",
    LOGIT_SCALE: "the temperature (logit_scale)",
    "decoder.": "the decoder and its mask token (decoder)",
}
Settings = TypeVar("Settings", bound=ClipSettings)
Samples = TypeVar("Samples")
Opened = TypeVar("Opened")
Rgb = tuple[float, float, float]
Model = TypeVar("Model", bound=nn.Module)


class ClipTask(Generic[Settings, Samples, Model]):
    """Base class of tasks that train a video tower on clips.

    The class stores the settings, device and initial weights, and prepares the input of the model. A subclass adds
    samples, model and objective. Tasks outside clipmill may also derive from this class, but clipmill requires only the
    interface of `StartableTask`.

    Args:
        shape: Shape of the model, if existing weights determine it; `build_model` then needs no samples.

    Attributes:
        base: Frozen weights that checkpoints omit. Set by `start_from` in a run with adapters; None otherwise.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        attention: AttentionBackend,
        device: torch.device,
        shape: ModelShape | None = None,
    ) -> None:
        self._settings, self._attention, self._device, self._shape = settings, attention, device, shape
        size_of(settings.model, settings.towers)  # report an invalid model size before training starts
        self._start: LoadedWeights | None = None
        self.base: Base | None = None
        self._evaluations: dict[str, dict[str, Any]] = {}

    def with_data(self, shards: str | None) -> Self:
        """Return a copy of the task, with the same classes or tokenizer, for the data of an evaluation during training.

        Args:
            shards: Data of the evaluation; None for the data of the run.
        """
        settings = self._settings if shards is None else self._settings.with_data(shards)
        return self._copy_with(replace(settings, where=settings.evaluate.where, share=1.0))

    def open_mixture(self, open_folder: Callable[[Self], Opened]) -> "Opened | MixedSamples":
        """Open the training set of the data folder, or a mixture of the training sets of several data folders.

        Args:
            open_folder: Function that opens one data folder with a copy of this task.

        Raises:
            UserError: See `open_mixed`.
        """
        return open_mixed(lambda folder: open_folder(self._copy_with(self._settings.with_data(folder))), self._settings)

    def _copy_with(self, settings: Settings) -> Self:
        task = copy(self)
        task._settings = settings
        return task

    def record_evaluation(
        self,
        evaluated: EvaluatedData,
        samples: "EvaluatedSet",
        *,
        averaged_items: tuple[int, str] | None = None,
        **entries: str,
    ) -> None:
        """Record the data of an evaluation during training, for run.json and the results page.

        Args:
            averaged_items: Number and noun of the items that the metrics are averaged over; None for clips.
            entries: Additional entries about the evaluation.
        """
        from clipmill.train.data.held_out import held_out_facts

        data = data_facts(self._settings.shards, evaluated.shards)
        held_out = held_out_facts(samples, self.with_data(evaluated.shards)._settings, split=evaluated.split, data=data)
        cautions = [] if held_out is None else held_out.cautions(items=averaged_items)
        self._evaluations[evaluated.name] = {
            **data,
            "split": evaluated.split,
            "data": samples.describe(),
            "variant": samples.variant_name,
            **entries,
            **({"caution": "; ".join(cautions)} if cautions else {}),
        }

    def new_model(self, samples: Samples) -> Model:
        """Return a model with random weights for the clips in `samples`. Subclasses must override this method."""
        raise NotImplementedError

    def fit_weights(self, model: Model, source: Source, *, say: Say) -> "LoadedWeights":
        """Fit initial weights to a model on the meta device."""
        from clipmill.train.weights.loading import fit_to

        return fit_to(model, source, allow=self._settings.init.allow, say=say)

    def fit_all_parameters(self, model: Model, source: Source, *, say: Say) -> "LoadedWeights":
        """Fit weights to all parameters of a model on any device, for `load_all_parameters` in weights/loading.py."""
        from clipmill.train.weights.loading import fit_to

        return fit_to(model, source, say=say)

    def start_from(self, source: Source, samples: Samples, *, say: Say) -> "LoadedWeights":
        """Make `build_model` initialise models from the weights in `source`.

        Raises:
            UserError: The weights do not fit the model; see `clipmill.train.weights.loading.fit_to`.
        """
        with torch.device("meta"):
            model = self.new_model(samples)
        self._start = self.fit_weights(model, source, say=say)
        if self._settings.lora.rank:
            self.base = self._base(self.freeze_and_adapt(model), source)
        return self._start

    def _base(self, model: Model, source: Source) -> Base:
        from clipmill.train.weights.sources import base_of

        assert self._start is not None
        fitted_tensors, source_tensors = self._start.fitted.tensors, source.converted.tensors
        for tower in self.pretrained_towers():
            if not any(name.startswith(f"{tower}.") for name in fitted_tensors):
                raise UserError(
                    f"--lora.towers {tower} adapts pretrained weights, but {source.title} does not contain that tower",
                    hint="use other weights, or other --lora.towers",
                    flags=("--lora.towers",),
                )
        # Resized tensors are new objects. They are stored in checkpoints, so that the base is read without resizing.
        frozen = [plain_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad]
        names = [name for name in frozen if name in source_tensors and fitted_tensors.get(name) is source_tensors[name]]
        return base_of(source, self._settings.init, names=names, scale=self._settings.lora.scale)

    def build_model(self, samples: Samples) -> Model:
        """Return a model for the clips in `samples`, with the weights that were passed to `start_from`, if any."""
        model = self.new_model(samples)
        if self._start is not None:
            from clipmill.train.weights.loading import copy_into

            copy_into(model, self._start)
        model = self.freeze_and_adapt(model)
        if self._settings.compile:
            compile_blocks(model)
        return model

    def freeze_and_adapt(self, model: Model) -> Model:
        """Freeze parts of a new model and add adapters, as the settings specify.

        In a tower with adapters, tensors that are missing from the initial weights are also trained, such as a new
        projection, or a temporal embedding if the weights come from an image model.
        """
        freeze(model, map(frozen_part, self._settings.freeze))
        for tower in adapted_towers(self._settings):
            self.adapt(model, tower)
        return model

    def adapt(self, model: Model, tower: Tower) -> None:
        """Add adapters to a tower of a new model."""
        from clipmill.train.models.library_towers import LibraryTower
        from clipmill.train.models.transformer import add_adapters, add_library_adapters

        lora, module = self._settings.lora, model.get_submodule(tower)
        frozen_ids = {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
        if isinstance(module, LibraryTower):
            module.requires_grad_(False)
            add_library_adapters(module.model, lora, blocks=module.blocks(), frozen_ids=frozen_ids)
        else:
            add_adapters(module, rank=lora.rank, scale=lora.scale, targets=lora.targets, frozen_ids=frozen_ids)
        for parameter_name, parameter in module.named_parameters():
            is_new = (
                self._start is not None and f"{tower}.{plain_name(parameter_name)}" not in self._start.fitted.tensors
            )
            if is_new and id(parameter) not in frozen_ids:
                parameter.requires_grad_(True)

    def pretrained_towers(self) -> Sequence[Tower]:
        """Return the towers that get adapters. --init.weights must contain the weights of these towers."""
        return adapted_towers(self._settings)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of all transformers."""
        return blocks_of(model)

    def frozen_parts(self) -> list[str]:
        """Describe the frozen parts, for run.json."""
        settings, lora = self._settings, self._settings.lora
        adapted_towers_text = [f"{tower}, with adapters of rank {lora.rank}" for tower in adapted_towers(settings)]
        return [*settings.freeze, *adapted_towers_text]

    def facts(self) -> dict[str, Any]:
        """Return the entry for run.json about the evaluations during training, keyed by name; {} if there are none."""
        return {"evaluations": self._evaluations} if self._evaluations else {}

    def files(self) -> dict[str, bytes]:
        """Return the files to store next to run.json; {} by default."""
        return {}

    def pixels(self, batch: Batch, rows: slice, *, mean: Rgb, std: Rgb, is_training: bool) -> torch.Tensor:
        """Return the normalised clips [B, C, T, H, W] in a slice of a batch, augmented if `is_training`.

        Clips from several cameras have shape [B, V, C, T, H, W]. All views of a clip are augmented in the same way.

        Args:
            mean, std: Mean and standard deviation per channel. --init.pixel-mean and --init.pixel-std override them.
        """
        settings, init = self._settings, self._settings.init
        positions = batch["position"][rows].numpy() if is_training else None
        video, colour, num_views = batch["video"][rows], batch["colour"][rows], settings.num_views
        if num_views > 1:
            video, colour = video.flatten(0, 1), colour.flatten()
            positions = None if positions is None else positions.repeat(num_views)
        clips = to_model_input(
            video,
            colour,
            size_px=settings.size_px,
            mean=init.pixel_mean or mean,
            std=init.pixel_std or std,
            draw=None if positions is None else draw_parameters(positions, settings.augment, seed=settings.seed),
        )
        return clips.unflatten(0, (-1, num_views)) if num_views > 1 else clips


def drop_parts(source: Source, parts: Mapping[str, str], *, model: str, say: Say) -> Source:
    """Remove the weights of parts that a model lacks, and print a list of these parts.

    Args:
        parts: Descriptions of parts, keyed by the prefix of their tensor names.
        model: Noun for the message, such as "a classifier".
    """
    tensors = source.converted.tensors
    unused_names = {name: prefix for name in tensors for prefix in parts if name.startswith(prefix)}
    if unused_names:
        unused_parts = ", ".join(
            description for prefix, description in parts.items() if prefix in unused_names.values()
        )
        say(f"weights: not used, because {model} has no such parts: {unused_parts}")
    kept_tensors = {name: tensor for name, tensor in tensors.items() if name not in unused_names}
    return replace(source, converted=replace(source.converted, tensors=kept_tensors))


def build_meta_model(task: Task, samples: Any) -> nn.Module | None:
    """Return the model that a `ClipTask` trains, on the meta device; None for any other task."""
    if not isinstance(task, ClipTask):
        return None
    with torch.device("meta"):
        model: nn.Module = task.freeze_and_adapt(task.new_model(samples))
    return model


def describe_parameters(task: Task, model: nn.Module | None) -> dict[str, str]:
    """Return the entry for run.json about the number of parameters and the frozen parts; {} if `model` is None."""
    if model is None or not isinstance(task, ClipTask):
        return {}
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, num_frozen = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if not is_trained)
    frozen = (
        f"{num_frozen:,} of them frozen ({'; '.join(task.frozen_parts())})" if num_frozen else "none of them frozen"
    )
    return {"parameters": f"{total:,}, {frozen}"}
