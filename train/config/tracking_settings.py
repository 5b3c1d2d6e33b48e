"""Settings of tracking: a group of the training settings. The console and metrics.jsonl always get the numbers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrackSettings:
    """Who else gets the numbers of a run."""

    tensorboard: bool = False
    """Event files in the run's folder, for tensorboard --logdir."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline: files in the run's folder, for wandb sync."""
    project: str = "clipmill"
    """Project of Weights & Biases."""
