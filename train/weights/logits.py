"""What turns cosines into logits: the temperature and the bias that a dual encoder was trained with."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from clipmill.train.distributed.world import World
from clipmill.train.run.checkpoint import fill, read_table
from clipmill.train.weights.conversion import LOGIT_SCALE, Tensors, require_finite

_LOG_SCALE, _TEMPERATURE, _BIAS = "objective.logit_scale", "objective.temperature", "objective.logit_bias"


@dataclass(frozen=True)
class Logits:
    """Logits are cosines times exp(log_scale), plus the bias.

    Attributes:
        log_scale: log(1 / temperature); None if the weights do not say, or have a temperature for each sample.
        bias: SigLIP's; None without one.
    """

    log_scale: float | None = None
    bias: float | None = None


def logits_of(tensors: Tensors) -> Logits:
    """Those of weights of another project or of an export, by our names."""
    scale = tensors.get(LOGIT_SCALE)
    return Logits(None if scale is None else float(scale))


def read_logits(checkpoint: Path) -> Logits:
    """Those of the loss in a checkpoint.

    Raises:
        UserError: the checkpoint cannot be read, or a number is not finite.
    """
    table, found = read_table(checkpoint), dict[str, float]()
    for name in (_LOG_SCALE, _TEMPERATURE, _BIAS):
        if name in table and not table[name]["size"]:
            number = torch.zeros(())
            fill(checkpoint, table, {name: number}, world=World())
            require_finite({name: number}, source=checkpoint)
            found[name] = float(number)
    temperature = found.get(_TEMPERATURE)
    return Logits(found.get(_LOG_SCALE, None if temperature is None else -math.log(temperature)), found.get(_BIAS))
