"""Lion: the sign of a momentum (Chen et al. 2023, program 1; FastCLIP procedure 4)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from train.distributed.sharded import local_part


class Lion(Optimizer):
    """Every weight moves by the learning rate, whatever the size of its gradient; the decay is apart.

    c = beta1 m + (1 - beta1) g;  theta -= lr (sign(c) + decay theta);  m = beta2 m + (1 - beta2) g.
    Parameters may be whole or sharded.
    """

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step from the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        trained = [one for one in group["params"] if one.grad is not None]
        if not trained:
            return
        for one in trained:
            if not self.state[one]:
                self.state[one]["exp_avg"] = torch.zeros_like(one)
        weights = [local_part(one) for one in trained]
        gradients = [local_part(one.grad) for one in trained]
        momenta = [local_part(self.state[one]["exp_avg"]) for one in trained]
        beta1, beta2 = group["betas"]
        updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
        torch._foreach_sign_(updates)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
