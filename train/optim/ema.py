"""A moving average of the weights: smoother than the last ones, and what is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from train.distributed.sharded import local_part, reshard
from train.optim.groups import plain_name


class Ema:
    """average = d average + (1 - d) weights, after every step.

    d rises towards `decay` as (1 + step) / (10 + step), so that the first steps' weights are soon forgotten. The
    average of a sharded weight is sharded in the same way. Buffers are not averaged.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._averages = {name: one.detach().clone() for name, one in _weights(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module, *, step: int) -> None:
        """Takes in the weights after step 1, 2, ..."""
        weights = _weights(model)
        decay = min(self._decay, (1 + step) / (10 + step))
        if not self._averages:
            return
        torch._foreach_lerp_(
            [local_part(one) for one in self._averages.values()],
            [local_part(weights[name].detach()) for name in self._averages],
            1 - decay,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages by the names of the weights; DTensors where those are. Not copies."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over what `state_dict` gave.

        Raises:
            ValueError: the names are not those of the weights.
        """
        if state.keys() != self._averages.keys():
            raise ValueError(f"averages of other weights: {sorted(state.keys() ^ self._averages.keys())[:5]}")
        for name, average in self._averages.items():
            average.copy_(state[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Within, `model` has the averages as its weights; nothing may be trained or saved there."""
        weights = _weights(model)
        self._swap(weights)
        try:
            yield
        finally:
            # What a forward pass gathered are averages, and the model must not go on with them.
            reshard(model)
            self._swap(weights)

    @torch.no_grad()
    def _swap(self, weights: dict[str, nn.Parameter]) -> None:
        for name, average in self._averages.items():
            weight, average = local_part(weights[name].detach()), local_part(average)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    reshard(model)
    return {plain_name(name): one for name, one in model.named_parameters() if one.requires_grad}
