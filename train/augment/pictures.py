"""Augmented RGB clips from YUV planes in one pass: all colour changes are affine, and combine into one 3x4 matrix.

Chroma has half the resolution of luma, and is upsampled bilinearly. Each chroma sample lies at the centre of the four
pixels that it represents, because planes are cropped and resized this way (and swscale positions them this way).
Swscale's default repeats each sample instead, which is less accurate; see the README for figures. Upsampled values are
multiples of 1/16, which are exact in float32, so flipping the planes mirrors the result exactly.

Peak memory of a clip in bytes per pixel: result 12, upsampled chroma 8, flipped planes 1.5.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from clipmill.train.augment.colour import rgb_matrices
from clipmill.train.augment.draws import MAX_SIGMA_PX, Draw
from clipmill.train.device.random import device_uniform
from clipmill.train.device.transfer import send

if TYPE_CHECKING:
    from clipmill.train.augment.rand_augment import Triple

# Effects on clips: colour jitter with normalisation, Gaussian blur, and random erasing.
#
# Jitter and normalisation are one affine map of RGB. Brightness, contrast, saturation and hue change as in
# torchvision's ColorJitter, with two differences:
#
# - Hue rotates the colour plane of YIQ. Torchvision rotates hue in HSV, which preserves the largest of R, G and B, but
#   is not linear. A rotation in YIQ preserves the grey value, and is linear, so it fits into the matrix.
# - Values are clamped to [0, 1] once, after all changes, not after each change. A value is not lost if one change moves
#   it beyond white and the next change moves it back.
#
# All four changes preserve or scale the grey value of a pixel, so they commute, and their order is not random.
#
# Gaussian blur consists of two matrix products, along rows and columns. It uses the kernel of torchvision's
# GaussianBlur: values of the bell curve at integer pixels, normalised to a sum of 1. The frame is extended by
# reflection without repeating the edge. The kernel is truncated at three times the largest sigma.
#
# Random erasing (Zhong et al. 2020) replaces a box with noise; all frames of a clip have the same box. The noise is
# normally distributed for each pixel, channel and frame, like normalised inputs (the "pixel" mode of VideoMAE and
# timm). It is a function of the clip's seed, so a clip that is made twice, for example as the partner of another clip,
# at a different position in its batch or on a different device, is the same both times. torch's generators would draw
# different numbers on a GPU and on a CPU.


# BT.601 weights, for clips with any matrix. They equal torchvision's weights, but sum to exactly 1.
GREY_WEIGHTS = (0.299, 0.587, 0.114)
RADIUS_PX = math.ceil(3 * MAX_SIGMA_PX)  # radius of the blur kernel

_YIQ = np.array([GREY_WEIGHTS, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_GREY = np.outer(np.ones(3), GREY_WEIGHTS)
_CHROMA = np.eye(3) - _GREY
# A quarter turn of the colour plane, from red via yellow to green, the direction of increasing hue.
_QUARTER_TURN = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1], [0, -1, 0]]) @ _YIQ @ _CHROMA


def colour_map(draw: Draw | None, *, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return the affine map of colours, [B, 3, 5] (B = 1 without a draw).

    A colour c in [0, 1] is mapped to map @ (c, 1, g), normalised, where g is the mean grey of the clip.
    """
    mean_3, std_3 = np.array(mean), np.array(std)
    if draw is None:
        linear, grey_weight = np.eye(3)[None], np.zeros(1)
    else:
        angle = 2 * np.pi * draw.hue.astype(float)[:, None, None]
        saturation, contrast, brightness = (
            values.astype(float)[:, None, None] for values in (draw.saturation, draw.contrast, draw.brightness)
        )
        chroma = saturation * (np.cos(angle) * _CHROMA + np.sin(angle) * _QUARTER_TURN)
        linear = brightness * contrast * (_GREY + chroma)
        grey_weight = (brightness * (1 - contrast))[:, 0, 0]
    result = np.empty((len(linear), 3, 5), dtype=np.float32)
    result[..., :3] = linear / std_3[:, None]
    result[..., 3] = -mean_3 / std_3
    result[..., 4] = grey_weight[:, None] / std_3
    return result


def blur_matrix(size_px: int, *, sigma_px: float) -> NDArray[np.float32]:
    """Return a matrix [S, S]. The product of a row of pixels and this matrix is the blurred row."""
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
    """Blur the clips of `video` (float32 [B, C, T, S, S]) whose sigma [B] is not 0, in place.

    Clips are blurred one at a time, which takes the memory of two additional clips, regardless of their number.
    """
    # Disable autocast, which would round values to an eight-bit mantissa.
    with torch.autocast(video.device.type, enabled=False):
        for number in np.flatnonzero(sigma_px):
            matrix = send(blur_matrix(video.shape[-1], sigma_px=float(sigma_px[number])), video.device)
            video[number] = matrix.T @ (video[number] @ matrix)


def erase_clips(video: torch.Tensor, draw: Draw) -> None:
    """Erase the drawn boxes in `video` (float32 [B, C, T, S, S], normalised) in place."""
    size_px = video.shape[-1]
    for number in np.flatnonzero(draw.box[:, 0]):
        rows, columns = box_of(draw.box[number], size_px=size_px)
        erased = video[number, ..., rows, columns]
        erased.copy_(_noise(int(draw.noise_seed[number]), erased.shape, device=video.device))


def box_of(box_4: np.ndarray, *, size_px: int) -> tuple[slice, slice]:
    """Return the rows and columns of a drawn box in frames of `size_px`."""
    height, width = (min(max(1, round(float(side) * size_px)), size_px) for side in box_4[:2])
    top, left = int(box_4[2] * (size_px - height + 1)), int(box_4[3] * (size_px - width + 1))
    return slice(top, top + height), slice(left, left + width)


def _noise(seed: int, shape: Sequence[int], *, device: torch.device) -> torch.Tensor:
    """Draw normally distributed numbers, which are equal on all devices up to rounding (Box and Muller 1958)."""
    count = math.prod(shape)
    num_pairs = -(-count // 2)
    seed_1 = torch.full((1,), seed, dtype=torch.int64, device=device)
    drawn = device_uniform(seed_1, 2 * num_pairs, seed=0, purpose="erase/pixels")[0]
    radius, angle = (-2 * torch.log1p(-drawn[:num_pairs])).sqrt_(), drawn[num_pairs:] * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].view(shape)


@torch.no_grad()
def to_model_input(
    video: torch.Tensor,
    colour: torch.Tensor,
    *,
    size_px: int,
    mean: "Triple",
    std: "Triple",
    draw: Draw | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Convert clips to a model's input: RGB, augmented by `draw`, clamped between black and white, and normalised.

    Args:
        video: Frames as planes Y, U, V, uint8 [B, T, S * S * 3 // 2]; S is `size_px`, even.
        colour: Colour kinds of the clips (clipmill.train.augment.colour), uint8 [B], on the same device.
        mean, std: Mean and standard deviation of each channel, for values from 0 to 1.
        draw: Drawn augmentation; None for no augmentation.
        dtype: Dtype of the result; the arithmetic is float32.

    Returns:
        The input, [B, 3, T, S, S].

    Raises:
        ValueError: The frames do not have a resolution of `size_px` x `size_px`, or `size_px` is odd.
    """
    if size_px % 2 or video.shape[-1] != size_px * size_px * 3 // 2:
        raise ValueError(f"pictures of {video.shape[-1]} bytes are not 4:2:0 planes of {size_px} x {size_px}")
    device = video.device
    has_contrast = draw is not None and bool((draw.contrast != 1).any())
    flip = send(draw.flip, device) if draw is not None and draw.flip.any() else None
    to_normalised = send(colour_map(draw, mean=mean, std=std), device)
    pictures = one_pass(
        video,
        _rgb_matrices(device)[colour.long()],
        to_normalised,
        flip,
        size_px=size_px,
        has_contrast=has_contrast,
        black=tuple(-m / s for m, s in zip(mean, std, strict=True)),
        white=tuple((1 - m) / s for m, s in zip(mean, std, strict=True)),
    )
    if draw is not None:
        if (draw.operation >= 0).any():
            from clipmill.train.augment.rand_augment import rand_augment_clips

            rand_augment_clips(pictures, draw, mean=mean, std=std)
        blur_clips(pictures, draw.blur_sigma_px)
        erase_clips(pictures, draw)
    return pictures.to(dtype)


def to_rgb_uint8(video: torch.Tensor, colour: torch.Tensor, *, size_px: int) -> torch.Tensor:
    """Convert clips to RGB frames for display: uint8 [B, T, S, S, 3]."""
    scaled = to_model_input(video, colour, size_px=size_px, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
    return scaled.round_().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def one_pass(
    video: torch.Tensor,
    to_rgb_B34: torch.Tensor,
    to_normalised_B35: torch.Tensor,
    flip_B: torch.Tensor | None,
    *,
    size_px: int,
    has_contrast: bool,
    black: tuple[float, ...],
    white: tuple[float, ...],
) -> torch.Tensor:
    """Compute `to_model_input` with tensors only, so that torch.compile can compile it completely."""
    num_luma, half_px = size_px * size_px, size_px // 2
    luma = video[..., :num_luma].unflatten(-1, (size_px, size_px))
    chroma = video[..., num_luma:].unflatten(-1, (2, half_px, half_px))
    if flip_B is not None:
        luma = torch.where(flip_B[:, None, None, None], luma.flip(-1), luma)
        chroma = torch.where(flip_B[:, None, None, None, None], chroma.flip(-1), chroma)
    # Multiply these small matrices elementwise, because autocast and TF32 would round a matrix product.
    matrix = (to_normalised_B35[:, :, :3, None] * to_rgb_B34[:, None]).sum(2)
    offset = to_normalised_B35[:, :, 3]
    if has_contrast:
        offset = offset + to_normalised_B35[:, :, 4] * _mean_grey(luma, chroma, to_rgb_B34)[:, None]
    offset = offset + matrix[:, :, 3]
    matrix, offset = matrix[..., None, None, None], offset[..., None, None, None]
    upsampled = interpolate(chroma.flatten(1, 2).float(), scale_factor=2, mode="bilinear", align_corners=False)
    upsampled = upsampled.unflatten(1, (-1, 2))
    pictures = torch.addcmul(offset, luma[:, None], matrix[:, :, 0])
    pictures.addcmul_(upsampled[:, None, :, 0], matrix[:, :, 1]).addcmul_(upsampled[:, None, :, 1], matrix[:, :, 2])
    for number, (low, high) in enumerate(zip(black, white, strict=True)):
        pictures[:, number].clamp_(low, high)
    return pictures


def _mean_grey(luma: torch.Tensor, chroma: torch.Tensor, to_rgb_B34: torch.Tensor) -> torch.Tensor:
    """Return the mean grey of each clip, [B]. Sums of integers are exact, whatever the order in which a device adds."""
    num_frames, size_px = luma.shape[1:3]
    luma_B = luma.sum((2, 3), dtype=torch.int32).sum(1) / (num_frames * size_px**2)
    chroma_B2 = chroma.sum((3, 4), dtype=torch.int32).sum(1) / (num_frames * (size_px // 2) ** 2)
    mean_B4 = torch.cat([luma_B[:, None], chroma_B2, torch.ones_like(luma_B[:, None])], dim=1)
    red, green, blue = GREY_WEIGHTS
    grey_B4 = red * to_rgb_B34[:, 0] + green * to_rgb_B34[:, 1] + blue * to_rgb_B34[:, 2]
    return (grey_B4 * mean_B4).sum(1)


@cache
def _rgb_matrices(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rgb_matrices()).float().to(device)
