"""The interface between the training loop and a task.

A task owns what is particular to it: samples, model, objective and evaluation. The loop owns the rest: steps,
optimizer, ranks, logging, checkpoints, resuming.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import ParallelSettings, TrainingSettings
from clipmill.train.data.loader import TrainingSet
from clipmill.train.distributed.world import World
from clipmill.train.engine.rank_consistency import NamedSamples
from clipmill.train.losses.objective import Objective
from clipmill.train.weights.source import Say, Source

if TYPE_CHECKING:
    from clipmill.train.distributed.pipeline import LayerCost
    from clipmill.train.weights.loading import Loaded


class Task(Protocol):
    """A training task as the loop sees it.

    Attributes:
        name: as on the command line.
        columns: of the shard set that its samples are made of.
    """

    name: str
    columns: tuple[str, ...]

    def training_set(self, world: World) -> TrainingSet:
        """This rank's part of the training samples: `batch / world.size` of each batch."""
        ...

    def build_model(self, samples: Any) -> nn.Module:
        """A new model for `samples`, one of the task's own sets; torch's generator initialises the weights."""
        ...

    def build_objective(self, samples: Any, world: World) -> Objective:
        """The loss. State per sample covers all of `samples`, sharded over the ranks."""
        ...

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules that FSDP shards one by one: the blocks of the transformers."""
        ...

    def evaluate(self, model: nn.Module, world: World) -> Mapping[str, float | list[float]]:
        """Metrics of the evaluations in the loop, equal on all ranks; {} if there is none.

        There is one for each of `settings.evaluated_data()`, whose name begins its metrics: `<name>/<metric>`. A list
        has a value for each batch, such as its loss; it is logged, and cannot be selected by --best.
        All ranks call it at the same step, with the model in evaluation mode and without gradients. Forward passes
        must not communicate, as ranks may make different numbers of them.
        """
        ...


class StartableTask(Task, Protocol):
    """A task that the commands can start: its model can be initialised from weights, and run.json describes it."""

    def training_set(self, world: World) -> NamedSamples:
        """This rank's part of the training samples."""
        ...

    def start_from(self, source: Source, samples: Any, *, say: Say) -> "Loaded":
        """Make `build_model` initialise models from these weights; raise a UserError if they do not fit."""
        ...

    def facts(self) -> dict[str, Any]:
        """Entries of run.json about this task, once its training set is open."""
        ...

    def files(self) -> dict[str, bytes]:
        """Files by path that a run keeps beside run.json, so that its weights can be used without the data."""
        ...


@runtime_checkable
class PipelineTask(Protocol):
    """A task whose model is a flat list of layers and whose objective can run a `distributed.pipeline.Pipeline`."""

    def build_model(self, samples: Any) -> nn.Module: ...

    def layers(self, model: Any) -> "Sequence[LayerCost]":
        """The layers of a model, in order."""
        ...

    def part(self, model: Any, layers: range) -> nn.Module:
        """A module of some layers, which takes them out of the model; parameters keep their names."""
        ...


def check_stages(task: Task, samples: Any, settings: TrainingSettings, *, world: World) -> None:
    """Check that the task's model can be cut into --parallel.stages, on a model without memory.

    Raises:
        UserError: the task's models cannot be cut, not into as many stages, or the microbatches do not fit them.
    """
    parallel = settings.parallel
    if parallel.stages == 1:
        return
    if not isinstance(task, PipelineTask):
        raise UserError(
            f"--parallel.stages is {parallel.stages}, and the models of train {task.name} cannot be cut into stages",
            hint="use --parallel.strategy fsdp for models that are larger than a GPU",
            flags=("--parallel.stages",),
        )
    from clipmill.train.distributed.pipeline import check_microbatches, partition

    share = world.replicas.share(settings.batch)
    check_microbatches(share, size=settings.microbatch or share, settings=parallel)
    with torch.device("meta"):
        model = task.build_model(samples)
    partition(task.layers(model), num_stages=parallel.stages, rule=parallel.partition)


def own_part(task: object, model: nn.Module, parallel: ParallelSettings, *, stages: World) -> nn.Module:
    """This rank's layers of a model; the model itself if there is a single stage.

    Raises:
        UserError: it cannot be cut into as many stages.
    """
    if stages.size == 1:
        return model
    from clipmill.train.distributed.pipeline import partition

    assert isinstance(task, PipelineTask)
    cut = partition(task.layers(model), num_stages=stages.size, rule=parallel.partition)
    return task.part(model, cut[stages.rank])
