"""Lion: the sign of a momentum (Chen et al. 2023, program 1; FastCLIP procedure 4)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from train.distributed.sharded import local_part
from train.optim.foreach import ForeachOptimizer, subtract


class Lion(ForeachOptimizer):
    """Every weight moves by the learning rate, whatever the size of its gradient; the decay is apart.

    c = beta1 m + (1 - beta1) g;  theta -= lr (sign(c) + decay theta);  m = beta2 m + (1 - beta2) g.
    """

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """No momentum yet."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Moves them by the signs of their momenta."""
        weights = [local_part(one) for one in trained]
        gradients = [local_part(one.grad) for one in trained if one.grad is not None]
        momenta = [local_part(self.state[one]["exp_avg"]) for one in trained]
        beta1, beta2 = group["betas"]
        updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        subtract(weights, updates, lr=group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
