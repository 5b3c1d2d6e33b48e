"""Linear layers for a handful of rows, as decoding has them."""

import torch
from torch import nn
from torch.nn.functional import linear

_FEW = 4


def linear_for_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, for up to four rows on a CPU as the product with the weight in front.

    The libraries there take another way through the weight then, in half the time for layers that are not narrower
    behind than in front (docs/captions.md).
    """
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or rows > _FEW or weight.shape[0] < weight.shape[1]:
        return linear(x, weight, bias)
    out = (weight @ x.reshape(rows, -1).T).T.reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias.to(out.dtype)


def apply_to_few(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A linear layer of a few rows."""
    return linear_for_few(x, layer.weight, layer.bias)
