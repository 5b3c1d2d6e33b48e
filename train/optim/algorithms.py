"""SGD, Lion and LAMB over many tensors at once, for whole or sharded parameters, with steps that a GPU may skip."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from clipmill.train.device.transfer import Scalar, send
from clipmill.train.distributed.parallel import buckets, local_part, norms


class ForeachOptimizer(Optimizer):
    """An optimizer that updates the parameters of a group together.

    Attributes:
        found_inf: zero-dimensional float on the device; the step is skipped if it is not 0, as in torch's fused
            optimizers. None to take every step.
    """

    found_inf: torch.Tensor | None = None

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The initial state of a parameter."""
        raise NotImplementedError

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters that have gradients, and their state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            for one in trained:
                if not self.state[one]:
                    self.state[one].update(self.start(one))
            if trained and self.found_inf is None:
                self.update(trained, group)
            elif self.found_inf is not None:
                # In buckets, because copies of everything might not fit into memory.
                for some in buckets(trained):
                    self._update_if_finite(some, group, found_inf=self.found_inf)

    def _update_if_finite(
        self, trained: Sequence[torch.Tensor], group: dict[str, Any], *, found_inf: torch.Tensor
    ) -> None:
        changed = [local_part(one) for one in trained]
        for one in trained:
            state = self.state[one]
            for name, value in state.items():
                # A step count on the CPU cannot depend on the device's decision.
                state[name] = send(value, one.device)
                changed.append(local_part(state[name]))
        before = [one.clone() for one in changed]
        self.update(trained, group)
        for now, old in zip(changed, before, strict=True):
            torch.where(found_inf == 0, now, old, out=now)


class Sgd(ForeachOptimizer):
    """SGD with momentum (FastCLIP procedure 4), with the values and state of torch's.

    g += decay theta;  m = momentum m + g;  theta -= lr m. The first step's momentum is g.

    torch's own cannot skip steps, except for the fused one, whose momentum is uninitialised if the first is skipped.
    """

    def __init__(self, params: ParamsT, *, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        weights, updates = _weights_and_gradients(trained)
        if group["weight_decay"]:
            updates = list(torch._foreach_add(updates, weights, alpha=group["weight_decay"]))
        momenta = [local_part(self.state[one]["momentum_buffer"]) for one in trained]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates)
        subtract(weights, momenta, lr=group["lr"])


class Lion(ForeachOptimizer):
    """Lion: the sign of a momentum, with decoupled weight decay (Chen et al. 2023, program 1; FastCLIP procedure 4).

    c = beta1 m + (1 - beta1) g;  theta -= lr (sign(c) + decay theta);  m = beta2 m + (1 - beta2) g.
    """

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        weights, gradients = _weights_and_gradients(trained)
        momenta = [local_part(self.state[one]["exp_avg"]) for one in trained]
        beta1, beta2 = group["betas"]
        updates = list(torch._foreach_lerp(momenta, gradients, 1 - beta1))
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        subtract(weights, updates, lr=group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class Lamb(ForeachOptimizer):
    """LAMB: Adam with a trust ratio per tensor (You et al. 2020, algorithm 2; FastCLIP procedure 4).

    theta -= lr alpha (r + decay theta) with Adam's update r and alpha = |theta| / |r + decay theta|, norms of whole
    tensors. alpha is 1 (AdamW) in groups with `adapts` False, for tensors of zeros, which could not grow otherwise, and
    for updates of zeros.
    """

    def __init__(
        self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": True})

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        # As in torch's optimizers, the step count is a CPU tensor, so that checkpoints treat it as one.
        step = torch.tensor(0.0)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[one] for one in trained]
        for state in states:
            state["step"] += 1
        weights, gradients = _weights_and_gradients(trained)
        # If the device decides about steps, only the device knows their number.
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


def subtract(weights: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], *, lr: Scalar) -> None:
    """weights -= lr updates, without synchronising if `lr` is on a GPU."""
    if isinstance(lr, torch.Tensor):
        for weight, update in zip(weights, updates, strict=True):
            weight.addcmul_(update, lr.to(weight.dtype), value=-1)
    else:
        torch._foreach_add_(list(weights), list(updates), alpha=-lr)


def _weights_and_gradients(trained: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [local_part(one) for one in trained], [local_part(one.grad) for one in trained if one.grad is not None]


def _adam_updates(
    states: list[dict[str, torch.Tensor]],
    gradients: list[torch.Tensor],
    *,
    steps: Sequence[Any],
    betas: tuple[float, float],
    eps: float,
) -> list[torch.Tensor]:
    """Adam's updates without learning rate and decay; advances the moments in `states`."""
    beta1, beta2 = betas
    first = [local_part(state["exp_avg"]) for state in states]
    second = [local_part(state["exp_avg_sq"]) for state in states]
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    # r = (m / b1) / (sqrt(v / b2) + eps), with both bias corrections b in the divisor and one copy of the weights.
    corrections = [1 - beta1**step for step in steps]
    factors = [one / (1 - beta2**step) ** 0.5 for one, step in zip(corrections, steps, strict=True)]
    updates = list(torch._foreach_sqrt(second))
    torch._foreach_mul_(updates, factors)
    torch._foreach_add_(updates, [one * eps for one in corrections])
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, first)
    return updates
