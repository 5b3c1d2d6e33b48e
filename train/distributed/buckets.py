"""Tensors that are exchanged together: many small ones cost as little as one, and the copy of all of them is small."""

from collections.abc import Sequence
from typing import TypeVar

import torch

Some = TypeVar("Some", bound=torch.Tensor)
_BUCKET_BYTES = 64 << 20


def buckets(tensors: Sequence[Some]) -> list[list[Some]]:
    """Runs of tensors of one type, each small enough that its copy does not weigh."""
    found: list[list[Some]] = []
    size_bytes = 0
    for one in tensors:
        added_bytes = one.numel() * one.element_size()
        if not found or size_bytes + added_bytes > _BUCKET_BYTES or found[-1][0].dtype != one.dtype:
            found.append([])
            size_bytes = 0
        found[-1].append(one)
        size_bytes += added_bytes
    return found
