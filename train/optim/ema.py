"""Exponential moving average (EMA) of a model's weights and running statistics, for evaluations."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from clipmill.train.device.transfer import changing_buffers
from clipmill.train.distributed.parallel import local_part, reshard
from clipmill.train.optim.parameters import plain_name


class Ema:
    """Moving average of weights: average = d average + (1 - d) weights, updated after every step.

    d is (1 + step) / (10 + step), but at most `decay`, so that the initial weights are soon forgotten. Averages are
    sharded like the weights. The running statistics of batch norms are averaged too, because the current statistics
    belong to the current weights, not to the averaged weights.

    Args:
        model: Model in training mode.
        decay: Largest value of d.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._decay = decay
        trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        statistics = {name for name, buffer in changing_buffers(model).items() if buffer.is_floating_point()}
        names = {plain_name(name) for name in trained_names | statistics}
        self._averages = {name: value.detach().clone() for name, value in _tensors(model).items() if name in names}

    @torch.no_grad()
    def update(self, model: nn.Module, *, step: int) -> None:
        """Update the averages with the weights after a step. Steps count from 1."""
        weights = _tensors(model)
        decay = min(self._decay, (1 + step) / (10 + step))
        if not self._averages:
            return
        torch._foreach_lerp_(
            [local_part(average) for average in self._averages.values()],
            [local_part(weights[name].detach()) for name in self._averages],
            1 - decay,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages, keyed by tensor name, without copying them. Averages of sharded weights are DTensors."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the averages from a state dict. Raise a ValueError if the dict contains different tensors."""
        if state.keys() != self._averages.keys():
            raise ValueError(
                f"the saved averages belong to different tensors: {sorted(state.keys() ^ self._averages.keys())[:5]}"
            )
        for name, average in self._averages.items():
            average.copy_(state[name])

    @contextmanager
    def swap_in(self, model: nn.Module) -> Iterator[None]:
        """Replace the model's weights with the averages in a `with` block, which must not train or save the model."""
        weights = _tensors(model)
        self._swap(weights)
        try:
            yield
        finally:
            # FSDP may still hold gathered averages, and training must not use them.
            reshard(model)
            self._swap(weights)

    @torch.no_grad()
    def _swap(self, weights: dict[str, torch.Tensor]) -> None:
        for name, average in self._averages.items():
            weight, average = local_part(weights[name].detach()), local_part(average)
            previous_weight = weight.clone()
            weight.copy_(average)
            average.copy_(previous_weight)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a model, sharded if it uses FSDP, keyed by their plain names."""
    reshard(model)
    return {plain_name(name): tensor for name, tensor in chain(model.named_parameters(), model.named_buffers())}
