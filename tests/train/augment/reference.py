"""Reference for the fused pass: the same steps in sequence, in float64, written as plainly as possible."""

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.train.augment.model_input import Draw
from clipmill.train.augment.rand_augment import Triple, apply_operations

Array = NDArray[np.float64]
WEIGHTS = np.array([0.299, 0.587, 0.114])


def model_input(planes: NDArray[np.uint8], kind: int, *, size_px: int, mean: object, std: object) -> Array:
    """Convert a clip [T, S * S * 3 // 2] without augmentation to [3, T, S, S]."""
    return normalise(np.clip(rgb_clip(planes, kind, size_px=size_px), 0, 1), mean, std)


def augment_clip(
    planes: NDArray[np.uint8], kind: int, draw: Draw, number: int, *, size_px: int, mean: object, std: object
) -> Array:
    """Convert a clip with the parameters that were drawn for clip `number`."""
    rgb = rgb_clip(planes, kind, size_px=size_px)
    if draw.flip[number]:
        rgb = rgb[:, :, ::-1]
    rgb = rgb * draw.brightness[number]
    rgb = blend(rgb, np.full_like(rgb, (rgb @ WEIGHTS).mean()), draw.contrast[number])
    rgb = blend(rgb, np.repeat((rgb @ WEIGHTS)[..., None], 3, axis=-1), draw.saturation[number])
    rgb = np.clip(turn_hue(rgb, float(draw.hue[number])), 0, 1)
    if draw.blur_sigma_px[number]:
        rgb = np.stack([blur_picture(picture, float(draw.blur_sigma_px[number])) for picture in rgb])
    return normalise(rgb, mean, std)


def blend(rgb: Array, grey: Array, factor: float) -> Array:
    return factor * rgb + (1 - factor) * grey


def rgb_clip(planes: NDArray[np.uint8], kind: int, *, size_px: int) -> Array:
    """Convert a clip to RGB [T, S, S, 3], without clamping to [0, 1]."""
    return np.stack([rgb_picture(picture.astype(float), kind, size_px) for picture in planes])


def rgb_picture(planes: Array, kind: int, size_px: int) -> Array:
    luma, half = planes[: size_px**2].reshape(size_px, size_px), size_px // 2
    blue, red = (enlarge(plane) for plane in planes[size_px**2 :].reshape(2, half, half))
    if kind % 2 == 0:
        luma, blue, red = (luma - 16) / 219, (blue - 128) / 224, (red - 128) / 224
    else:
        luma, blue, red = luma / 255, (blue - 128) / 255, (red - 128) / 255
    of_red, of_blue = ((0.299, 0.114), (0.2126, 0.0722), (0.2627, 0.0593))[kind // 2]
    r = luma + 2 * (1 - of_red) * red
    b = luma + 2 * (1 - of_blue) * blue
    g = (luma - of_red * r - of_blue * b) / (1 - of_red - of_blue)
    return np.stack([r, g, b], axis=-1)


def enlarge(plane: Array) -> Array:
    """Double the size: along each axis, mix three parts of the nearest sample and one part of the next."""
    for axis in (0, 1):
        moved = np.moveaxis(plane, axis, 0)
        before, after = np.concatenate([moved[:1], moved[:-1]]), np.concatenate([moved[1:], moved[-1:]])
        pairs = np.stack([0.75 * moved + 0.25 * before, 0.75 * moved + 0.25 * after], axis=1)
        plane = np.moveaxis(pairs.reshape(-1, *moved.shape[1:]), 0, axis)
    return plane


def turn_hue(rgb: Array, part_of_circle: float) -> Array:
    to_yiq = np.array([WEIGHTS, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
    yiq = rgb @ to_yiq.T
    cos, sin = np.cos(2 * np.pi * part_of_circle), np.sin(2 * np.pi * part_of_circle)
    turned = np.stack([yiq[..., 0], cos * yiq[..., 1] + sin * yiq[..., 2], cos * yiq[..., 2] - sin * yiq[..., 1]], -1)
    return turned @ np.linalg.inv(to_yiq).T


def blur_picture(picture: Array, sigma_px: float, radius: int = 6) -> Array:
    """Blur with the complete two-dimensional kernel, tap by tap."""
    steps = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (steps[:, None] ** 2 + steps[None] ** 2) / sigma_px**2)
    kernel /= kernel.sum()
    padded = np.pad(picture, ((radius, radius), (radius, radius), (0, 0)), mode="reflect")
    height, width = picture.shape[:2]
    result = np.zeros_like(picture)
    for row in range(2 * radius + 1):
        for column in range(2 * radius + 1):
            result += kernel[row, column] * padded[row : row + height, column : column + width]
    return result


def normalise(rgb: Array, mean: object, std: object) -> Array:
    return np.moveaxis((rgb - np.array(mean)) / np.array(std), -1, 0)


def apply_operation(clip_TCHW: torch.Tensor, name: str, strength: float, *, fill: Triple) -> torch.Tensor:
    """Apply one operation of RandAugment to a uint8 clip."""
    clip_PHW = clip_TCHW.transpose(0, 1).flatten(0, 1)
    [changed_PHW] = apply_operations(clip_PHW[None], [[(name, strength)]], fill=fill)
    return changed_PHW.unflatten(0, (-1, len(clip_TCHW))).transpose(0, 1)
