"""AdamW and its learning rate."""

import math

import torch
from torch import nn

_BETAS = (0.9, 0.98)  # CLIP, table 18


def make_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves gains, biases and single numbers alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=_BETAS)


def learning_rate(step: int, *, peak: float, warmup_steps: int, num_steps: int) -> float:
    """Learning rate of step 1, 2, ..., num_steps: a straight rise to `peak`, then half a cosine towards zero."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
