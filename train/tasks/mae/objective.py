"""Reconstruction of masked cubes: targets and loss (VideoMAE, Tong et al. 2022).

Shape suffixes: B batch of a rank, R rows of a microbatch, C channels, T frames, H and W pixels, M predicted cubes of a
clip, t frames and p side of a cube, V values of a cube (t * p * p * C, in this order).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from clipmill.train.data.batch import Batch
from clipmill.train.device.transfer import Scalar, constant_tensor
from clipmill.train.distributed.step import Step
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.models.video_vit import VideoViTSize, cubes_of, pick_cubes
from clipmill.train.models.videomae import predicted_cubes
from clipmill.train.tasks.mae.masks import Masking

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
    targets_BMtppC = pick_cubes(cubes.permute(0, 1, 2, 3, 5, 6, 7, 4), predicted_BM)
    x = targets_BMtppC.flatten(2, 4).to(torch.promote_types(video_BCTHW.dtype, torch.float32))
    # In place: this is the largest part of a batch.
    x.sub_(x.mean(2, keepdim=True))
    deviation = torch.linalg.vector_norm(x, dim=2, keepdim=True).div_((x.shape[2] - 1) ** 0.5)
    eps = _EPS / constant_tensor(tuple(std or (1.0,)), x.device, x.dtype)
    x.div_(deviation.add_(eps))
    return x.flatten(2)


def reconstruction_loss(predicted_BMV: torch.Tensor, targets_BMV: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the predicted cubes, in the targets' precision."""
    return functional.mse_loss(predicted_BMV.to(targets_BMV.dtype), targets_BMV)
