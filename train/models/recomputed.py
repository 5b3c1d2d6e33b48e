"""Cheap steps before a matrix product, computed again in the backward pass instead of kept for it."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

# Numbers below which they are kept after all: to compute again costs some tenths of a millisecond at least.
SMALL = 2**18


def linear_of(
    layer: Callable[[torch.Tensor], torch.Tensor], prepare: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """`layer(prepare(*inputs))`, of which only the inputs are kept for the backward pass.

    For layer norms, activations and copies, which cost little beside the product: torch stops computing again once
    it has what the backward pass asks for, so the product itself is computed once.

    Args:
        layer: ends with a matrix product.
        prepare: draws nothing at random.
        inputs: the last is the largest.
    """

    def product(*inputs: torch.Tensor) -> torch.Tensor:
        return layer(prepare(*inputs))

    is_small = inputs[-1].numel() < SMALL
    # What torch.compile keeps is its own choice.
    if is_small or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return product(*inputs)
    out: torch.Tensor = checkpoint(product, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
