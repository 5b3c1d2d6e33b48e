"""What a run's checkpoint knows of its temperature."""

import math
from pathlib import Path

import torch

from train.distributed.world import World
from train.run.checkpoint import fill, read_table
from train.weights.numbers import require_finite

_LOG_SCALE, _TEMPERATURE = "objective.logit_scale", "objective.temperature"


def read_log_scale(path: Path) -> float | None:
    """log(1 / temperature) of the loss in a checkpoint; None where it has none, or one for each sample.

    Raises:
        UserError: the checkpoint cannot be read, or the number is not finite.
    """
    table = read_table(path)
    for name in (_LOG_SCALE, _TEMPERATURE):
        if name in table and not table[name]["size"]:
            number = torch.zeros(())
            fill(path, table, {name: number}, world=World())
            require_finite({name: number}, source=path)
            return float(number) if name == _LOG_SCALE else -math.log(float(number))
    return None
