"""The jobs that the one loop trains, and what it needs of each.

A task owns everything that is particular to a job: which samples, which model, which loss. The loop owns
everything that is not: steps, optimizer, logging, checkpoints, resuming.
"""

from typing import Any, Protocol

import torch
from torch import nn

from train.data.batch import Batch
from train.data.loader import TrainingSet


class Task(Protocol):
    """A training job.

    Attributes:
        name: as on the command line.
        columns: of the shard set that its samples are made of.
    """

    name: str
    columns: tuple[str, ...]

    def training_set(self) -> TrainingSet:
        """The samples to train on."""
        ...

    def build_model(self, samples: Any) -> nn.Module:
        """A new model for samples as in `samples`, one of its own sets; weights drawn from torch's generator."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of a batch (a scalar with gradient) and further numbers for the log."""
        ...

    def after_step(self, model: nn.Module) -> None:
        """Called after each step of the optimizer, for limits that parameters must keep."""
        ...
