"""Settings of how a model is spread over ranks: a group of the training settings."""

import re
from dataclasses import dataclass
from typing import Literal

from manifests.errors import UserError

TYPE_RULE = "type:"
COUNTS_RULE = re.compile(r"\d+(,\d+)*")

Strategy = Literal["ddp", "zero1", "fsdp"]
Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """What each of several ranks keeps; one process keeps everything."""

    strategy: Strategy = "ddp"
    """ddp: all of it; zero1: a part of the optimizer's state; fsdp: a part of weights, gradients and state."""
    stages: int = 1
    """Processes that the layers of a model lie on, as a pipeline; more processes make more such pipelines."""
    schedule: Schedule = "1f1b"
    """Order of a pipeline's microbatches; gpipe: all forward, then all back; 1f1b: back as soon as can be."""
    partition: str = "parameters"
    """Layers of each stage, by: parameters, uniform, type:KIND (as type:block), or their numbers (as 5,9)."""

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= 4096:
            raise UserError(f"--parallel.stages is {self.stages}", hint="it must be from 1 to 4,096")
        check_rule(self.partition)
        if self.stages > 1 and self.strategy == "fsdp":
            raise UserError(
                f"--parallel.strategy fsdp and --parallel.stages {self.stages} do not go together",
                hint="a stage has its own layers alone: use ddp, or zero1 for a part of the optimizer's state too",
            )


def check_rule(rule: str) -> None:
    """Raises a UserError where `rule` is none of those of `partition`."""
    if (
        rule in ("parameters", "uniform")
        or COUNTS_RULE.fullmatch(rule)
        or (rule.startswith(TYPE_RULE) and rule != TYPE_RULE)
    ):
        return
    raise UserError(
        f"--parallel.partition is {rule!r}",
        hint="use parameters, uniform, type:KIND (as type:block), or the number of layers of each stage, as 5,9",
    )


# Settings of tracking: a group of the training settings. The console and metrics.jsonl always get the numbers.


@dataclass(frozen=True, kw_only=True)
class TrackSettings:
    """Who else gets the numbers of a run."""

    tensorboard: bool = False
    """Event files in the run's folder, for tensorboard --logdir."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline: files in the run's folder, for wandb sync."""
    project: str = "clipmill"
    """Project of Weights & Biases."""
