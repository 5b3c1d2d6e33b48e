"""Questions of the simulated device about operators and their tensors."""

from functools import cache
from typing import Any

import torch


@cache
def name_of(func: Any) -> str:
    """Name of an operator without namespace and overload."""
    return str(func._opname) if hasattr(func, "_opname") else str(func._overloadpacket).rpartition(".")[2]


@cache
def has_aliases(func: Any) -> bool:
    """Return whether an operator writes to its arguments or returns views of them."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))


def collect_tensors(values: Any, tensors: list[torch.Tensor]) -> None:
    """Append all tensors in nested lists; torch's own trees take most of the time of a small operator."""
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif type(value) in (list, tuple):
            collect_tensors(value, tensors)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill a part of memory without gaps."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True
