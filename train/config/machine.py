"""Settings of distributed training and of experiment tracking."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from manifests.errors import UserError
from train.config.fields import Checked, Range, caught

TYPE_RULE = "type:"
COUNTS_RULE = re.compile(r"\d+(,\d+)*")

Strategy = Literal["ddp", "zero1", "fsdp"]
Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Checked):
    """How a model is distributed over several processes."""

    prefix = "parallel"

    strategy: Strategy = "ddp"
    """Data parallelism. ddp: full replicas; zero1: sharded optimizer state; fsdp: sharded weights, gradients and
    optimizer state."""
    stages: Annotated[int, Range(1, 4096)] = 1
    """Number of pipeline stages, one process each. More processes form replicas of the pipeline."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule. gpipe: all forward passes, then all backward passes; 1f1b: each backward pass as early as
    possible."""
    partition: str = "parameters"
    """How layers are assigned to stages. parameters: balanced by size; uniform: equal counts; type:KIND: equal counts
    of a kind (type:block); 5,9: these counts."""

    def rules(self) -> Iterator[UserError]:
        """The partition is one, and the strategy suits it."""
        yield from caught(check_rule, self.partition)
        if self.stages > 1 and self.strategy == "fsdp":
            yield UserError(
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


@dataclass(frozen=True, kw_only=True)
class TrackSettings(Checked):
    """Where metrics are logged besides the console and metrics.jsonl."""

    prefix = "track"

    tensorboard: bool = False
    """Write TensorBoard event files to the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Log to Weights & Biases. offline: to files in the run folder, for `wandb sync`."""
    project: str = "clipmill"
    """Weights & Biases project."""
