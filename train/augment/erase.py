"""Random erasing (Zhong et al. 2020): a box becomes noise, the same box in all frames of a clip.

The noise is normal for each pixel, channel and frame, which is what inputs are spread like once they are normalised
(VideoMAE's and timm's "pixel" mode). It is a function of the clip's own seed, so that a clip that is made twice, as the
partner of another one, in another part of its batch, or on another device, is the same clip: torch's generators draw
other numbers on a GPU than on a CPU.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from train.augment.draws import Draw
from train.device.device_chance import device_uniform


def erase_clips(video: torch.Tensor, draw: Draw) -> None:
    """Erases the drawn boxes of `video` (float32 [B, C, T, S, S], normalised) in place."""
    size_px = video.shape[-1]
    for number in np.flatnonzero(draw.box[:, 0]):
        rows, columns = box_of(draw.box[number], size_px=size_px)
        erased = video[number, ..., rows, columns]
        erased.copy_(_noise(int(draw.noise_seed[number]), erased.shape, device=video.device))


def box_of(box_4: np.ndarray, *, size_px: int) -> tuple[slice, slice]:
    """Rows and columns of a drawn box in pictures of `size_px`."""
    height, width = (min(max(1, round(float(side) * size_px)), size_px) for side in box_4[:2])
    top, left = int(box_4[2] * (size_px - height + 1)), int(box_4[3] * (size_px - width + 1))
    return slice(top, top + height), slice(left, left + width)


def _noise(seed: int, shape: Sequence[int], *, device: torch.device) -> torch.Tensor:
    """Normal numbers, the same on any device but for rounding (Box and Muller 1958)."""
    count = math.prod(shape)
    num_pairs = -(-count // 2)
    seed_1 = torch.full((1,), seed, dtype=torch.int64, device=device)
    drawn = device_uniform(seed_1, 2 * num_pairs, seed=0, purpose="erase/pixels")[0]
    radius, angle = (-2 * torch.log1p(-drawn[:num_pairs])).sqrt_(), drawn[num_pairs:] * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].view(shape)
