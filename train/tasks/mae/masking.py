"""The masks of a run: those of its settings, for clips of one grid.

Shape suffixes: B clips, N cubes of a clip.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from train.device.sending import sent
from train.models.cubes import CubeGrid
from train.tasks.mae.masks import MaskCounts, decoded_cubes, mask_counts, tube_masks
from train.tasks.mae.settings import MaeSettings


@dataclass(frozen=True)
class Masks:
    """What is hidden of clips, bool [B, N], and what of it is predicted: all where `decoded_BN` is None."""

    masked_BN: torch.Tensor
    decoded_BN: torch.Tensor | None


@dataclass(frozen=True)
class Masking:
    """Draws masks as `settings` say, for clips of `grid`."""

    settings: MaeSettings
    grid: CubeGrid

    @cached_property
    def counts(self) -> MaskCounts:
        """How many cubes of a clip are hidden, and how many of those predicted."""
        settings = self.settings
        return mask_counts(
            self.grid,
            mask_ratio=settings.mask_ratio,
            decoder_mask=settings.decoder_mask,
            decoder_mask_ratio=settings.decoder_mask_ratio,
        )

    def draw(self, positions_B: torch.Tensor, *, device: torch.device, is_training: bool = True) -> Masks:
        """The masks of the samples at some positions; outside of training everything hidden is predicted."""
        settings, grid, positions_B = self.settings, self.grid, sent(positions_B, device)
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
