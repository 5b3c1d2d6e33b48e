"""The jobs that the one loop trains, and what it needs of each.

A task owns everything that is particular to a job: which samples, which model, which objective, which evaluation. The
loop owns everything that is not: steps, optimizer, ranks, logging, checkpoints, resuming.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from train.data.loader import TrainingSet
from train.distributed.world import World
from train.losses.objective import Objective


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
