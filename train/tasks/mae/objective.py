"""Reconstruction of masked cubes: targets and loss (VideoMAE, Tong et al. 2022).

Shape suffixes: B batch of a rank, R rows of a microbatch, C channels, T frames, H and W pixels, M predicted cubes of a
clip, t frames and p side of a cube, V values of a cube (t * p * p * C, in this order).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from clipmill.train.data.batch import Batch
from clipmill.train.device.random import device_uniform
from clipmill.train.device.transfer import Scalar, constant, sent
from clipmill.train.distributed.world import Step
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.models.masked_autoencoder import predicted_cubes
from clipmill.train.models.video_vit import CubeGrid, VideoViTSize, cubes_of, picked
from clipmill.train.tasks.mae.settings import DecoderMask, MaeSettings, num_masked_places

# Which cubes of a clip are masked, and which of those are predicted.
#
# Masks are drawn on the device from seed and position of the sample alone, so they do not depend on ranks, resuming or
# microbatches.
#
# Shape suffixes: B batch, S steps of time, P patches of a step, R and C rows and columns of patches, N cubes of a clip
# (S * P, in the order of time, row, column).


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
    masked_BP = _lowest(drawn_BP, num_masked_places(ratio, num_places=grid.patches))
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
    return _lowest(last_BN.masked_fill(~masked_BN, torch.inf), num_predicted_B1)


def running_cells(starts_B: torch.Tensor, grid: CubeGrid, *, ratio: float) -> torch.Tensor:
    """Cubes that running cells keep, bool [B, N].

    Args:
        starts_B: int64, the first patch of a cell (0 to 3, around the cell) that is kept in the first step.
        ratio: fraction of a cell's patches that is not kept at a step: 0.25, 0.5 or 0.75.
    """
    device = starts_B.device
    cell = constant(_CELL, device, torch.int64)
    row_R1, column_C = torch.arange(grid.rows, device=device)[:, None], torch.arange(grid.columns, device=device)
    place_P = cell[row_R1 % 2, column_C % 2].flatten()
    step_S1 = torch.arange(grid.steps, device=device)[:, None]
    ahead_BSP = (place_P - step_S1 - starts_B[:, None, None]) % _CELL_PLACES
    return (ahead_BSP < round(_CELL_PLACES * (1 - ratio))).flatten(1)


def _lowest(values_BN: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
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


_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MaskedClips:
    """Clips as the model sees them, and as it predicts them.

    Attributes:
        inputs: normalised clips [R, C, T, H, W] of some rows of a batch.
        masking: draws the masks.
        size: of the encoder, whose cubes are predicted.
        std: divisor of the clips' channels; None if they were not divided.
    """

    inputs: Callable[[Batch, slice], torch.Tensor]
    masking: Masking
    size: VideoViTSize
    std: Sequence[float] | None

    def targets(self, clips_RCTHW: torch.Tensor, predicted_RM: torch.Tensor) -> torch.Tensor:
        """`normalised_cubes` of clips."""
        return normalised_cubes(
            clips_RCTHW,
            predicted_RM,
            cube_frames=self.size.cube_frames,
            patch_px=self.size.patch_px,
            std=self.std,
        )


class MaskedReconstruction(Objective):
    """Mean squared error over the predicted cubes of all clips of a batch (VideoMAE, section 3).

    Every clip has equally many of them, so the mean over microbatches and ranks is the mean over the batch.
    """

    def __init__(self, clips: MaskedClips) -> None:
        super().__init__()
        self._clips = clips

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Add the gradients of this rank's share of the batch; return the loss of the whole batch."""
        num_samples = len(batch["position"])

        def loss_of(rows: slice) -> torch.Tensor:
            return self._loss(model, batch, rows, step=step) * ((rows.stop - rows.start) / num_samples)

        losses = backward_microbatches(loss_of, num_samples=num_samples, step=step)
        return {"loss": step.world.sum(torch.stack(losses).sum()).double() / step.world.size}

    def _loss(self, model: nn.Module, batch: Batch, rows: slice, *, step: Step) -> torch.Tensor:
        clips_RCTHW, masking = self._clips.inputs(batch, rows), self._clips.masking
        masks, counts = masking.draw(batch["position"][rows], device=clips_RCTHW.device), masking.counts
        predicted_RM = predicted_cubes(masks.masked_BN, masks.decoded_BN, count=counts.num_predicted)
        targets_RMV = self._clips.targets(clips_RCTHW, predicted_RM)
        with step.autocast():
            values_RMV = model(
                clips_RCTHW,
                masks.masked_BN,
                masks.decoded_BN,
                num_masked=counts.num_masked,
                num_predicted=counts.num_predicted,
            )
        return reconstruction_loss(values_RMV, targets_RMV)


@torch.no_grad()
def normalised_cubes(
    video_BCTHW: torch.Tensor,
    predicted_BM: torch.Tensor,
    *,
    cube_frames: int,
    patch_px: int,
    std: Sequence[float] | None = None,
) -> torch.Tensor:
    """Targets of the predicted cubes, [B, M, V], at least float32: (x - mean) / (sqrt(unbiased variance) + 1e-6).

    Mean and variance are over the t * p * p values of a cube in one channel (VideoMAE, section 3.3; the constants are
    those of its code and of transformers).

    Args:
        video_BCTHW: clips as the model takes them.
        predicted_BM: int64, indices of the cubes.
        std: divisor of the clips' channels. VideoMAE defines targets on pixels before the division, which changes only
            the effect of 1e-6; so 1e-6 is divided instead. None for latents.
    """
    cubes = cubes_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    targets_BMtppC = picked(cubes.permute(0, 1, 2, 3, 5, 6, 7, 4), predicted_BM)
    x = targets_BMtppC.flatten(2, 4).to(torch.promote_types(video_BCTHW.dtype, torch.float32))
    # In place: this is the largest part of a batch.
    x.sub_(x.mean(2, keepdim=True))
    deviation = torch.linalg.vector_norm(x, dim=2, keepdim=True).div_((x.shape[2] - 1) ** 0.5)
    eps = _EPS / constant(tuple(std or (1.0,)), x.device, x.dtype)
    x.div_(deviation.add_(eps))
    return x.flatten(2)


def reconstruction_loss(predicted_BMV: torch.Tensor, targets_BMV: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the predicted cubes, in the targets' precision."""
    return functional.mse_loss(predicted_BMV.to(targets_BMV.dtype), targets_BMV)
