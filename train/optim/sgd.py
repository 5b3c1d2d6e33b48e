"""SGD with momentum, as torch has it: FastCLIP procedure 4."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from train.distributed.sharded import local_part
from train.optim.foreach import ForeachOptimizer, subtract


class Sgd(ForeachOptimizer):
    """g += decay theta;  m = momentum m + g;  theta -= lr m. The decay is not apart; the first step's momentum is g.

    torch's own has the same values and the same state, but takes every step: its fused one, which can leave one out,
    begins with a momentum of whatever lies in memory if it leaves out the first.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """No momentum yet."""
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Moves them along their momenta."""
        weights = [local_part(one) for one in trained]
        updates = [local_part(one.grad) for one in trained if one.grad is not None]
        if group["weight_decay"]:
            updates = list(torch._foreach_add(updates, weights, alpha=group["weight_decay"]))
        momenta = [local_part(self.state[one]["momentum_buffer"]) for one in trained]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates)
        subtract(weights, momenta, lr=group["lr"])
