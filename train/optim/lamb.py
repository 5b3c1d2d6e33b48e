"""LAMB: Adam with steps as long as the weights are large (You et al. 2020, algorithm 2; FastCLIP procedure 4)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from train.distributed.sharded import local_part, norms


class Lamb(Optimizer):
    """Adam's update r with its decay, scaled for each tensor by alpha = |theta| / |r + decay theta|.

    theta -= lr alpha (r + decay theta). Groups with `adapts` False have alpha 1, which is AdamW. So has a tensor of
    zeros, which alpha would hold where it is, and one without update. Parameters may be whole or sharded: norms are
    those of whole tensors.
    """

    def __init__(
        self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": True})

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
        states = [self._state_of(one) for one in trained]
        weights = [local_part(one) for one in trained]
        gradients = [local_part(one.grad) for one in trained]
        updates = _adam_updates(states, gradients, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if not group["adapts"]:
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            return
        weight_norms_N, update_norms_N = norms([*weights, *updates], like=[*trained, *trained]).chunk(2)
        moves_N = (weight_norms_N > 0) & (update_norms_N > 0)
        alphas_N = torch.where(moves_N, weight_norms_N / update_norms_N, 1.0)
        for weight, update, alpha in zip(weights, updates, alphas_N, strict=True):
            weight.addcmul_(update, alpha.to(weight.dtype), value=-group["lr"])

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            # As torch's own optimizers keep it: a number on the CPU that checkpoints take for a tensor.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def _adam_updates(
    states: list[dict[str, torch.Tensor]], gradients: list[torch.Tensor], *, betas: tuple[float, float], eps: float
) -> list[torch.Tensor]:
    """Adam's updates without learning rate and decay; the moments in `states` go on by one step."""
    beta1, beta2 = betas
    first = [local_part(state["exp_avg"]) for state in states]
    second = [local_part(state["exp_avg_sq"]) for state in states]
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    steps = [int(state["step"]) for state in states]
    # r = (m / b1) / (sqrt(v / b2) + eps), with both corrections b in the divisor, and in one copy of the weights.
    corrections = [1 - beta1**step for step in steps]
    updates = list(torch._foreach_sqrt(second))
    torch._foreach_mul_(updates, [one / (1 - beta2**step) ** 0.5 for one, step in zip(corrections, steps, strict=True)])
    torch._foreach_add_(updates, [one * eps for one in corrections])
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, first)
    return updates
