"""Small values of the host, brought to a device without a wait for what it still computes.

`torch.tensor(..., device="cuda")`, and `.to` without `non_blocking`, wait until the GPU has done all that it was given
before; a copy from memory that is not pinned may do so too. None of the three belongs into a training step.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def sent(values: torch.Tensor | NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`values` on `device`, through pinned memory where that is a GPU; the host may change them at once.

    Where the device is a CPU, or they lie on it already, memory is shared.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    # A copy, even of what is pinned already: that belongs to someone who may write into it.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


@cache
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that are the same in every step, as deep as their tuples, sent once; nobody may write into them."""
    return torch.tensor(values, dtype=dtype, device=device)
