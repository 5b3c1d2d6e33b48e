"""Random erasing (Zhong et al. 2020): a box becomes noise, the same box in all frames of a clip.

The noise is normal for each pixel, channel and frame, which is what inputs are spread like once they are normalised
(VideoMAE's and timm's "pixel" mode). It comes from a generator of the clip's own, so that a clip that is made twice, as
the partner of another one or in another part of its batch, is the same clip.
"""

import numpy as np
import torch

from train.augment.draws import Draw


def erase_clips(video: torch.Tensor, draw: Draw) -> None:
    """Erases the drawn boxes of `video` (float32 [B, C, T, S, S], normalised) in place."""
    size_px = video.shape[-1]
    for number in np.flatnonzero(draw.box[:, 0]):
        rows, columns = box_of(draw.box[number], size_px=size_px)
        generator = torch.Generator(video.device).manual_seed(int(draw.noise_seed[number]))
        video[number, ..., rows, columns].normal_(generator=generator)


def box_of(box_4: np.ndarray, *, size_px: int) -> tuple[slice, slice]:
    """Rows and columns of a drawn box in pictures of `size_px`."""
    height, width = (min(max(1, round(float(side) * size_px)), size_px) for side in box_4[:2])
    top, left = int(box_4[2] * (size_px - height + 1)), int(box_4[3] * (size_px - width + 1))
    return slice(top, top + height), slice(left, left + width)
