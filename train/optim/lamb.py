"""LAMB: Adam with steps as long as the weights are large (You et al. 2020, algorithm 2; FastCLIP procedure 4)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from train.distributed.sharded import local_part, norms
from train.optim.foreach import ForeachOptimizer, subtract


class Lamb(ForeachOptimizer):
    """Adam's update r with its decay, scaled for each tensor by alpha = |theta| / |r + decay theta|.

    theta -= lr alpha (r + decay theta). Groups with `adapts` False have alpha 1, which is AdamW. So has a tensor of
    zeros, which alpha would hold where it is, and one without update. Parameters may be whole or sharded: norms are
    those of whole tensors.
    """

    def __init__(
        self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": True})

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """No moments yet."""
        # As torch's own optimizers keep it: a number on the CPU that checkpoints take for a tensor.
        step = torch.tensor(0.0)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Moves them as Adam does, and as far as they are long."""
        states = [self.state[one] for one in trained]
        for state in states:
            state["step"] += 1
        weights = [local_part(one) for one in trained]
        gradients = [local_part(one.grad) for one in trained if one.grad is not None]
        # Where the device decides which steps are taken, only it knows how many there were.
        steps = [int(one["step"]) if self.found_inf is None else one["step"].double() for one in states]
        updates = _adam_updates(states, gradients, steps=steps, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if not group["adapts"]:
            subtract(weights, updates, lr=group["lr"])
            return
        weight_norms_N, update_norms_N = norms([*weights, *updates], like=[*trained, *trained]).chunk(2)
        moves_N = (weight_norms_N > 0) & (update_norms_N > 0)
        alphas_N = torch.where(moves_N, weight_norms_N / update_norms_N, 1.0)
        for weight, update, alpha in zip(weights, updates, alphas_N, strict=True):
            weight.addcmul_(update, alpha.to(weight.dtype), value=-group["lr"])


def _adam_updates(
    states: list[dict[str, torch.Tensor]],
    gradients: list[torch.Tensor],
    *,
    steps: Sequence[Any],
    betas: tuple[float, float],
    eps: float,
) -> list[torch.Tensor]:
    """Adam's updates without learning rate and decay; the moments in `states` go on by one step."""
    beta1, beta2 = betas
    first = [local_part(state["exp_avg"]) for state in states]
    second = [local_part(state["exp_avg_sq"]) for state in states]
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    # r = (m / b1) / (sqrt(v / b2) + eps), with both corrections b in the divisor, and in one copy of the weights.
    corrections = [1 - beta1**step for step in steps]
    factors = [one / (1 - beta2**step) ** 0.5 for one, step in zip(corrections, steps, strict=True)]
    updates = list(torch._foreach_sqrt(second))
    torch._foreach_mul_(updates, factors)
    torch._foreach_add_(updates, [one * eps for one in corrections])
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, first)
    return updates
