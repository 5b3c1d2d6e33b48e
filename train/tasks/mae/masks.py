"""Which cubes of a clip are masked, and which of those are predicted.

Masks are drawn on the device from seed and position of the sample alone, so they do not depend on ranks, resuming or
microbatches.

Shape suffixes: B batch, S steps of time, P patches of a step, R and C rows and columns of patches, N cubes of a clip
(S * P, in the order of time, row, column).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from clipmill.train.device.random import device_uniform
from clipmill.train.device.transfer import constant_tensor, send
from clipmill.train.models.video_vit import CubeGrid
from clipmill.train.tasks.mae.settings import DecoderMask, MaeSettings, num_masked_places

# The patches of a 2 x 2 cell, numbered around the cell, so that consecutive numbers are neighbours.
_CELL = ((0, 1), (3, 2))
_CELL_PLACES = 4


@dataclass(frozen=True, kw_only=True)
class MaskCounts:
    """Number of masked cubes of a clip, and of predicted ones among them; the same for all clips."""

    num_masked: int
    num_predicted: int


def mask_counts(
    grid: CubeGrid, *, mask_ratio: float, decoder_mask: DecoderMask, decoder_mask_ratio: float
) -> MaskCounts:
    """The counts of `tube_masks` and `decoded_cubes`."""
    num_masked = grid.steps * num_masked_places(mask_ratio, num_places=grid.patches)
    left_out = 0 if decoder_mask == "none" else int(decoder_mask_ratio * num_masked)
    return MaskCounts(num_masked=num_masked, num_predicted=num_masked - left_out)


def tube_masks(positions_B: torch.Tensor, grid: CubeGrid, *, ratio: float, seed: int) -> torch.Tensor:
    """Tube masks of clips, bool [B, N]: int(ratio * P) patches, the same at every step (VideoMAE, section 3.2).

    Args:
        positions_B: int64, positions of the samples in the order of the run, on the device where masks are drawn.
    """
    drawn_BP = device_uniform(positions_B, grid.patches, seed=seed, purpose="tube mask")
    masked_BP = _lowest_mask(drawn_BP, num_masked_places(ratio, num_places=grid.patches))
    return masked_BP.repeat(1, grid.steps)


def decoded_cubes(
    masked_BN: torch.Tensor,
    positions_B: torch.Tensor,
    grid: CubeGrid,
    *,
    kind: Literal["random", "running-cell"],
    ratio: float,
    seed: int,
) -> torch.Tensor:
    """Predicted cubes, bool [B, N]: exactly M - int(ratio * M) of the M masked cubes of each clip.

    random: any of them. running-cell: each cell of 2 x 2 patches keeps a fraction 1 - ratio of its patches, and the
        kept ones move on by one around the cell with each step (Qing et al. 2022, "MAR"), from a random start per clip.
        If the number of steps is a multiple of 4, every patch is kept in equally many steps, so that the number of
        masked and kept cubes is right whatever the tubes; otherwise random ones are dropped or added.

    VideoMAE V2 (section 3.2) draws decoder masks over all cubes and takes the loss on the intersection of both masks,
    whose size differs between clips. Drawn among the masked cubes, it is the same for all, and a batch is dense.
    """
    device = masked_BN.device
    last_BN = device_uniform(positions_B, grid.cubes, seed=seed, purpose="decoder mask", device=device)
    if kind == "running-cell":
        starts_B1 = device_uniform(positions_B, 1, seed=seed, purpose="running cell", device=device) * _CELL_PLACES
        last_BN += ~running_cells(starts_B1[:, 0].long(), grid, ratio=ratio)
    num_masked_B1 = masked_BN.sum(1, keepdim=True)
    num_predicted_B1 = num_masked_B1 - (ratio * num_masked_B1.double()).long()
    return _lowest_mask(last_BN.masked_fill(~masked_BN, torch.inf), num_predicted_B1)


def running_cells(starts_B: torch.Tensor, grid: CubeGrid, *, ratio: float) -> torch.Tensor:
    """Cubes that running cells keep, bool [B, N].

    Args:
        starts_B: int64, the first patch of a cell (0 to 3, around the cell) that is kept in the first step.
        ratio: fraction of a cell's patches that is not kept at a step: 0.25, 0.5 or 0.75.
    """
    device = starts_B.device
    cell = constant_tensor(_CELL, device, torch.int64)
    row_R1, column_C = torch.arange(grid.rows, device=device)[:, None], torch.arange(grid.columns, device=device)
    place_P = cell[row_R1 % 2, column_C % 2].flatten()
    step_S1 = torch.arange(grid.steps, device=device)[:, None]
    ahead_BSP = (place_P - step_S1 - starts_B[:, None, None]) % _CELL_PLACES
    return (ahead_BSP < round(_CELL_PLACES * (1 - ratio))).flatten(1)


def _lowest_mask(values_BN: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """Whether each value is among the `count` lowest of its row, bool [B, N]; `count` is an int or int64 [B, 1]."""
    ranks_BN = values_BN.argsort(dim=1).argsort(dim=1)
    return ranks_BN < count


@dataclass(frozen=True)
class Masks:
    """Masked cubes of clips, bool [B, N], and predicted ones among them; None for all."""

    masked_BN: torch.Tensor
    decoded_BN: torch.Tensor | None


@dataclass(frozen=True)
class Masking:
    """Draws the masks of a run, for clips with a grid of cubes."""

    settings: MaeSettings
    grid: CubeGrid

    @cached_property
    def counts(self) -> MaskCounts:
        """Number of masked and of predicted cubes of a clip."""
        settings = self.settings
        return mask_counts(
            self.grid,
            mask_ratio=settings.mask_ratio,
            decoder_mask=settings.decoder_mask,
            decoder_mask_ratio=settings.decoder_mask_ratio,
        )

    def draw(self, positions_B: torch.Tensor, *, device: torch.device, is_training: bool = True) -> Masks:
        """Masks of the samples at some positions; all masked cubes are predicted except in training."""
        settings, grid, positions_B = self.settings, self.grid, send(positions_B, device)
        masked_BN = tube_masks(positions_B, grid, ratio=settings.mask_ratio, seed=settings.seed)
        if settings.decoder_mask == "none" or not is_training:
            return Masks(masked_BN, None)
        decoded_BN = decoded_cubes(
            masked_BN,
            positions_B,
            grid,
            kind=settings.decoder_mask,
            ratio=settings.decoder_mask_ratio,
            seed=settings.seed,
        )
        return Masks(masked_BN, decoded_BN)
