"""Work of torch that no test needs, a tenth of the time of a run of a few steps.

- For kinds of devices that are missing, `torch.manual_seed` keeps the stack of its caller, in case they are initialized
  later: below pytest that takes longer than a step of a tiny model.
- A checkpoint asks of each of its entries whether it has the methods of a protocol, whose names Python 3.11 collects
  each time.
- Weights without memory, by which a run counts its parameters, are drawn by a decomposition in Python.
"""

import typing
from functools import cache

import torch
from torch import Tensor
from torch.nn import init

_FILL = init._no_grad_normal_


def omit_torch_work() -> None:
    """From now on, in this process, seed only devices that are present, and draw only weights that have memory."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _ignore_seed  # type: ignore[attr-defined]
    if hasattr(typing, "_get_protocol_attrs"):
        typing._get_protocol_attrs = cache(typing._get_protocol_attrs)
    init._no_grad_normal_ = _fill_normally  # type: ignore[assignment]


def _ignore_seed(seed: int) -> None:
    pass


def _fill_normally(tensor: Tensor, mean: float, std: float, generator: torch.Generator | None = None) -> Tensor:
    return tensor if tensor.is_meta else _FILL(tensor, mean, std, generator)
