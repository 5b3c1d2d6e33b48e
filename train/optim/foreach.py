"""What this package's optimizers share: steps over many tensors at once, and steps that a device may refuse."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from train.device.transfer import Scalar, sent
from train.distributed.parallel import buckets
from train.distributed.sharded import local_part


class ForeachOptimizer(Optimizer):
    """An optimizer that updates the parameters of a group together. They may be whole or sharded.

    Attributes:
        found_inf: float without dimensions, on the device: a step is not taken where it is not 0 (torch's fused
            optimizers have an attribute of this name and meaning); None where every step is taken.
    """

    found_inf: torch.Tensor | None = None

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """State of a parameter before its first step."""
        raise NotImplementedError

    def update(self, trained: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Moves parameters that have gradients, and their state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step from the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            for one in trained:
                if not self.state[one]:
                    self.state[one].update(self.start(one))
            if not trained:
                continue
            if self.found_inf is None:
                self.update(trained, group)
                continue
            # A part at a time, as copies of everything might not fit.
            for some in buckets(trained):
                self._update_if_finite(some, group, found_inf=self.found_inf)
        return loss

    def _update_if_finite(
        self, trained: Sequence[torch.Tensor], group: dict[str, Any], *, found_inf: torch.Tensor
    ) -> None:
        changed = [local_part(one) for one in trained]
        for one in trained:
            state = self.state[one]
            for name, value in state.items():
                # A count of steps that lies on the CPU cannot follow what the device decides.
                state[name] = sent(value, one.device)
                changed.append(local_part(state[name]))
        before = [one.clone() for one in changed]
        self.update(trained, group)
        for now, old in zip(changed, before, strict=True):
            torch.where(found_inf == 0, now, old, out=now)


def subtract(weights: Sequence[torch.Tensor], updates: Sequence[torch.Tensor], *, lr: Scalar) -> None:
    """weights -= lr updates; a GPU's `lr` is not waited for."""
    if isinstance(lr, torch.Tensor):
        for weight, update in zip(weights, updates, strict=True):
            weight.addcmul_(update, lr.to(weight.dtype), value=-1)
    else:
        torch._foreach_add_(list(weights), list(updates), alpha=-lr)
