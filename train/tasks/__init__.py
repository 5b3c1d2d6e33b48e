"""The jobs that the one loop trains, and what it needs of each.

A task owns everything that is particular to a job: which samples, which model, which loss. The loop owns
everything that is not: steps, optimizer, logging, checkpoints, resuming.
"""

from typing import Protocol

import torch
from torch import nn

from train.data.batch import Batch
from train.data.loader import SampleSet


class Task(Protocol):
    """A training job.

    Attributes:
        name: as on the command line.
        columns: of the shard set that its samples are made of.
    """

    name: str
    columns: tuple[str, ...]

    def training_set(self) -> SampleSet:
        """The samples to train on."""
        ...

    def build_model(self) -> nn.Module:
        """A new model, weights drawn from torch's generator."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of a batch (a scalar with gradient) and further numbers for the log."""
        ...

    def after_step(self, model: nn.Module) -> None:
        """Called after each step of the optimizer, for limits that parameters must keep."""
        ...
