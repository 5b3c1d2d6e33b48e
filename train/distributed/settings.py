"""Settings of how a model is spread over ranks: a group of the training settings."""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["ddp", "zero1", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """What each of several ranks keeps; one process keeps everything."""

    strategy: Strategy = "ddp"
    """ddp: all of it; zero1: a part of the optimizer's state; fsdp: a part of weights, gradients and state."""
