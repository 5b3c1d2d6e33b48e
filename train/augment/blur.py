"""Gaussian blur as two products with a matrix: along the rows, then along the columns.

The kernel is that of torchvision's GaussianBlur (values of the bell curve at whole pixels, scaled to a sum of 1; the
picture continues beyond its edge as its mirror image, the edge itself not repeated). It is cut at three of the
largest sigma.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from train.augment.draws import MAX_SIGMA_PX
from train.device.sending import sent

RADIUS_PX = math.ceil(3 * MAX_SIGMA_PX)


def blur_matrix(size_px: int, *, sigma_px: float) -> NDArray[np.float32]:
    """[size, size]: a row of pixels times this is the row blurred."""
    radius = min(RADIUS_PX, size_px - 1)
    steps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (steps / sigma_px) ** 2)
    weights /= weights.sum()
    target = np.arange(size_px)
    last = size_px - 1
    source = last - np.abs(last - np.abs(target[:, None] + steps))
    matrix = np.zeros((size_px, size_px))
    np.add.at(matrix, (source, target[:, None]), weights)
    return matrix.astype(np.float32)


def blur_clips(video: torch.Tensor, sigma_px: NDArray[np.float32]) -> None:
    """Blurs those clips of `video` (float32 [B, C, T, S, S]) in place whose sigma [B] is not 0.

    One clip at a time: what it needs beside the video is two clips, however many are blurred.
    """
    # Autocast would round the pictures to eight bits of mantissa.
    with torch.autocast(video.device.type, enabled=False):
        for number in np.flatnonzero(sigma_px):
            matrix = sent(blur_matrix(video.shape[-1], sigma_px=float(sigma_px[number])), video.device)
            video[number] = matrix.T @ (video[number] @ matrix)
