"""Rows of all ranks where ranks have different numbers of them."""

import torch

from train.distributed.world import World


def gather_uneven(rows: torch.Tensor, world: World) -> torch.Tensor:
    """The rows of all ranks in their order, without gradient; a rank may have none, of whatever width.

    Shorter parts are filled up for the exchange and cut after it.
    """
    shapes = world.gather(torch.tensor([rows.shape], device=rows.device)).cpu()
    num_rows, width = shapes[:, 0].tolist(), shapes[:, 1:].amax(dim=0).tolist()
    longest = max(num_rows)
    padded = rows.new_zeros(longest, *width)
    if len(rows):
        padded[: len(rows)] = rows
    parts = world.gather(padded).split(longest) if longest else [padded]
    return torch.cat([part[:num] for part, num in zip(parts, num_rows, strict=False)])
