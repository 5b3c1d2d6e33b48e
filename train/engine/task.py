"""The jobs that the one loop trains, and what it needs of each.

A task owns everything that is particular to a job: which samples, which model, which objective, which evaluation. The
loop owns everything that is not: steps, optimizer, ranks, logging, checkpoints, resuming.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from manifests.errors import UserError
from train.config.machine import ParallelSettings
from train.config.training import TrainingSettings
from train.data.loader import TrainingSet
from train.distributed.pipeline import check_microbatches
from train.distributed.stages import LayerCost, partition
from train.distributed.world import World
from train.engine.common_start import NamedSamples
from train.losses.objective import Objective
from train.weights.loading import Loaded
from train.weights.sources import Say, Source


class Task(Protocol):
    """A training job.

    Attributes:
        name: as on the command line.
        columns: of the shard set that its samples are made of.
    """

    name: str
    columns: tuple[str, ...]

    def training_set(self, world: World) -> TrainingSet:
        """This rank's part of the samples to train on: `batch / world.size` of each batch."""
        ...

    def build_model(self, samples: Any) -> nn.Module:
        """A new model for samples as in `samples`, one of its own sets; weights drawn from torch's generator."""
        ...

    def build_objective(self, samples: Any, world: World) -> Objective:
        """What the model is trained towards; per-sample state covers all of `samples`, spread over the ranks."""
        ...

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The parts of `model` that are gathered and checkpointed one by one: the blocks of its Transformers."""
        ...

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Numbers of the evaluation in the loop, equal on all ranks, {} if there is none.

        All ranks call it at the same step, with the model in evaluation mode and no gradients; forward passes exchange
        nothing, so ranks may make different numbers of them.
        """
        ...


class StartableTask(Task, Protocol):
    """A task whose model can start from weights."""

    def training_set(self, world: World) -> NamedSamples:
        """This rank's part of the samples to train on."""
        ...

    def start_from(self, source: Source, samples: Any, *, say: Say) -> Loaded:
        """Has `build_model` give models these weights, once they fit; UserError where they do not."""
        ...

    def facts(self) -> dict[str, Any]:
        """What run.json says of this task, once its training set is open."""
        ...

    def files(self) -> dict[str, bytes]:
        """What a run keeps beside run.json, by name, so that its weights can be used without the data."""
        ...


# Tasks whose models can be cut into the stages of a pipeline.


@runtime_checkable
class CutTask(Protocol):
    """A task whose model is a flat list of layers. Its objective can run a train.distributed.pipeline.Pipeline."""

    def build_model(self, samples: Any) -> nn.Module:
        """As `Task`'s."""
        ...

    def layers(self, model: Any) -> Sequence[LayerCost]:
        """The layers of a model, in order."""
        ...

    def part(self, model: Any, layers: range) -> nn.Module:
        """Some layers of a model, which it takes over: under the names that their parameters have in the whole."""
        ...


def check_stages(task: object, samples: Any, settings: TrainingSettings, *, world: World) -> None:
    """Cuts a model without weights, to see that it can be done.

    Raises:
        UserError: the task's models cannot be cut, not into as many stages, or the microbatches do not suit them.
    """
    parallel = settings.parallel
    if parallel.stages == 1:
        return
    if not isinstance(task, CutTask):
        raise UserError(
            f"--parallel.stages is {parallel.stages}, and only models of train caption can be cut into stages",
            hint="use --parallel.strategy fsdp for models that are larger than a GPU",
        )
    share = world.replicas.share(settings.batch)
    check_microbatches(share, size=settings.microbatch or share, settings=parallel)
    with torch.device("meta"):
        model = task.build_model(samples)
    partition(task.layers(model), num_stages=parallel.stages, rule=parallel.partition)


def own_part(task: object, model: nn.Module, parallel: ParallelSettings, *, stages: World) -> nn.Module:
    """This rank's layers of a model; the model itself where there is one stage.

    Raises:
        UserError: it cannot be cut into as many stages.
    """
    if stages.size == 1:
        return model
    assert isinstance(task, CutTask)
    cut = partition(task.layers(model), num_stages=stages.size, rule=parallel.partition)
    return task.part(model, cut[stages.rank])
