"""RGB on the CPU, for those who want it: by OpenCV, since torch's threads crawl inside the loader's."""

from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from train.augment.colour import rgb_matrices


def rgb_pictures(video: NDArray[np.uint8], colour: int, *, size_px: int) -> list[NDArray[np.uint8]]:
    """The pictures of a YUV clip, uint8 [T, S * S * 3 / 2], as RGB [S, S, 3].

    The same conversion as `train.augment.pictures.to_rgb_uint8`, but for rounding.

    Args:
        colour: matrix and range (train.augment.colour).
    """
    num_luma, half_px = size_px * size_px, size_px // 2
    pictures = []
    for planes in video:
        chroma = planes[num_luma:].reshape(2, half_px, half_px)
        full = [cv2.resize(plane, (size_px, size_px), interpolation=cv2.INTER_LINEAR) for plane in chroma]
        yuv = cv2.merge([planes[:num_luma].reshape(size_px, size_px), *full])
        pictures.append(np.asarray(cv2.transform(yuv, _matrices()[colour]), dtype=np.uint8))
    return pictures


@cache
def _matrices() -> NDArray[np.float64]:
    return rgb_matrices() * 255
