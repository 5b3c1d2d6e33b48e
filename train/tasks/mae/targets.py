"""What a masked autoencoder is to predict: the values of cubes, normalised within each cube and channel.

Shape suffixes: B batch, C channels, T frames, H and W pixels, M predicted cubes, t frames and p side of a cube, V
values of a cube (t * p * p * C, in this order).
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from train.device.sending import constant
from train.models.cubes import cubes_of, picked

_EPS = 1e-6


@torch.no_grad()
def normalised_cubes(
    video_BCTHW: torch.Tensor,
    predicted_BM: torch.Tensor,
    *,
    cube_frames: int,
    patch_px: int,
    std: Sequence[float] | None = None,
) -> torch.Tensor:
    """Targets of the predicted cubes, [B, M, V], float32 at least: (x - mean) / (sqrt(unbiased variance) + 1e-6).

    Mean and variance are of the t * p * p values of a cube in one channel (VideoMAE, section 3.3 and its code's
    constants, which transformers has too).

    Args:
        video_BCTHW: clips as the model takes them.
        predicted_BM: int64, numbers of the cubes.
        std: by which the clips' channels were divided. A target is of pixels before that, and is the same but for the
            1e-6, so nothing needs to be undone; latents have none.
    """
    cubes = cubes_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    targets_BMtppC = picked(cubes.permute(0, 1, 2, 3, 5, 6, 7, 4), predicted_BM)
    x = targets_BMtppC.flatten(2, 4).to(torch.promote_types(video_BCTHW.dtype, torch.float32))
    # In place: this is most of a batch.
    x.sub_(x.mean(2, keepdim=True))
    deviation = torch.linalg.vector_norm(x, dim=2, keepdim=True).div_((x.shape[2] - 1) ** 0.5)
    eps = _EPS / constant(tuple(std or (1.0,)), x.device, x.dtype)
    x.div_(deviation.add_(eps))
    return x.flatten(2)


def reconstruction_loss(predicted_BMV: torch.Tensor, targets_BMV: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the predicted cubes, in the targets' precision."""
    return functional.mse_loss(predicted_BMV.to(targets_BMV.dtype), targets_BMV)
