"""Conversion of YUV planes to a model's input: RGB clips, augmented at random and normalised, on the device.

All colour changes are affine, so they are combined into one matrix and applied in one pass.

Chroma has half the resolution of luma, and is upsampled bilinearly. Each chroma sample lies at the centre of the four
pixels that it represents, where cropping and resizing (and swscale) put it. By default, swscale repeats each sample
instead of interpolating, which is less accurate; the README contains measurements. Upsampled values are multiples of
1/16, which float32 represents exactly, so the result for flipped planes is the exact mirror image.

Peak memory of a clip in bytes per pixel: result 12, upsampled chroma 8, flipped planes 1.5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from clipmill.train.augment.colour import rgb_matrices
from clipmill.train.config.clips import MAX_MAGNITUDE, OPERATIONS, Augment
from clipmill.train.device.random import Positions, device_uniform, draw_uniform
from clipmill.train.device.transfer import send

if TYPE_CHECKING:
    from clipmill.train.augment.rand_augment import Triple

# SimCLR's range of the blur's standard deviation (Chen et al. 2020), in pixels of the model's input.
MIN_SIGMA_PX, MAX_SIGMA_PX = 0.1, 2.0
_DRAWN_NAMES = ("flip", "brightness", "contrast", "saturation", "hue", "blur", "sigma")
_OPERATION_PROBABILITY = 0.5
# Range of the erased box's area as a fraction of the frame, and maximum aspect ratio of the box: the defaults of timm's
# RandomErasing. Zhong et al. (2020) use areas of up to 0.4.
_MIN_AREA, _MAX_AREA = 0.02, 1 / 3
_MAX_ASPECT = 10 / 3
_BOX_ATTEMPTS = 10
_NUM_SEEDS = 2.0**53


@dataclass(frozen=True)
class Draw:
    """Augmentation parameters drawn for a batch, with one row per clip. The shape is [B] unless stated otherwise."""

    flip: NDArray[np.bool_]
    brightness: NDArray[np.float32]
    """Factor; 1 means no change. Contrast and saturation are also factors."""
    contrast: NDArray[np.float32]
    saturation: NDArray[np.float32]
    hue: NDArray[np.float32]
    """Rotation as a fraction of a full turn; 0 means no change."""
    blur_sigma_px: NDArray[np.float32]
    """Standard deviation of the blur kernel; 0 means no blur."""
    operation: NDArray[np.int64]
    """Indices of N operations in `OPERATIONS`, in the order in which they are applied, [B, N]; -1 means no
    operation."""
    strength: NDArray[np.float64]
    """Strengths of the operations, from -1 to 1, [B, N]. The sign is the direction of the operation."""
    box: NDArray[np.float64]
    """Erased box, [B, 4]: height and width as fractions of the side length, then the distances from the top and left
    edges as fractions of the space that the box leaves free. A height of 0 means no box."""
    noise_seed: NDArray[np.int64]
    """Seed of the noise that fills the erased box."""


def draw_parameters(positions: Positions, settings: Augment, *, seed: int) -> Draw:
    """Draw the augmentation parameters of the samples at `positions` (int64 [B]).

    The result is a pure function of the seed and the positions (clipmill.train.device.random).
    """
    positions = np.asarray(positions, dtype=np.int64)
    values_BN = draw_uniform(positions, len(_DRAWN_NAMES), seed=seed, purpose="augment")
    uniform = dict(zip(_DRAWN_NAMES, values_BN.T, strict=True))
    factors = {
        name: _scale_to_range(uniform[name], max(0.0, 1 - strength), 1 + strength)
        for name, strength in (
            ("brightness", settings.brightness),
            ("contrast", settings.contrast),
            ("saturation", settings.saturation),
        )
    }
    sigma_px = _scale_to_range(uniform["sigma"], MIN_SIGMA_PX, MAX_SIGMA_PX)
    operation_BN, strength_BN = _draw_operations(positions, settings, seed=seed)
    return Draw(
        flip=uniform["flip"] < settings.flip,
        hue=_scale_to_range(uniform["hue"], -settings.hue, settings.hue),
        blur_sigma_px=np.where(uniform["blur"] < settings.blur, sigma_px, np.float32(0)),
        operation=operation_BN,
        strength=strength_BN,
        box=_draw_boxes(positions, settings.erase, seed=seed),
        noise_seed=(draw_uniform(positions, 1, seed=seed, purpose="erase/noise")[:, 0] * _NUM_SEEDS).astype(np.int64),
        **factors,
    )


def _scale_to_range(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float32]:
    return (low + (high - low) * values).astype(np.float32)


def _draw_operations(
    positions: Positions, settings: Augment, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    values_BN5 = draw_uniform(positions, 5 * settings.rand_ops, seed=seed, purpose="rand-augment").reshape(
        len(positions), settings.rand_ops, 5
    )
    kind, application, radius, angle, sign = np.moveaxis(values_BN5, -1, 0)
    operation_BN = np.where(application < _OPERATION_PROBABILITY, (kind * len(OPERATIONS)).astype(np.int64), -1)
    # Draw standard normal numbers (Box and Muller 1958).
    normal_BN = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
    magnitude_BN = np.clip(settings.rand_magnitude + settings.rand_std * normal_BN, 0, MAX_MAGNITUDE)
    return operation_BN, magnitude_BN / MAX_MAGNITUDE * np.where(sign < 0.5, -1.0, 1.0)


def _draw_boxes(positions: Positions, probability: float, *, seed: int) -> NDArray[np.float64]:
    """Draw boxes with random areas and aspect ratios, [B, 4]. A clip gets the first of ten boxes that fits, or none."""
    boxes_B4 = np.zeros((len(positions), 4))
    if not probability:
        return boxes_B4
    values_BN = draw_uniform(positions, 3 + 2 * _BOX_ATTEMPTS, seed=seed, purpose="erase")
    area_BA = _MIN_AREA + (_MAX_AREA - _MIN_AREA) * values_BN[:, 3 : 3 + _BOX_ATTEMPTS]
    aspect_BA = np.exp(math.log(_MAX_ASPECT) * (2 * values_BN[:, 3 + _BOX_ATTEMPTS :] - 1))
    height_BA, width_BA = np.sqrt(area_BA * aspect_BA), np.sqrt(area_BA / aspect_BA)
    fits_BA = np.maximum(height_BA, width_BA) < 1
    has_box_B = (values_BN[:, 0] < probability) & fits_BA.any(axis=1)
    rows, attempts = np.flatnonzero(has_box_B), fits_BA.argmax(axis=1)[has_box_B]
    boxes_B4[rows, 0], boxes_B4[rows, 1] = height_BA[rows, attempts], width_BA[rows, attempts]
    boxes_B4[rows, 2:] = values_BN[rows, 1:3]
    return boxes_B4


# Colour jitter with normalisation, Gaussian blur, and random erasing.
#
# Jitter and normalisation are one affine map of RGB. Brightness, contrast, saturation and hue are changed as in
# torchvision's ColorJitter, with two differences:
#
# - A change of hue rotates the chroma plane of YIQ. A rotation in HSV, as in torchvision, preserves the maximum of R, G
#   and B, but is not linear. A rotation in YIQ preserves the grey value and is linear, so it fits into the matrix.
# - Values are clamped to [0, 1] once, after all changes, instead of after each change. A value that one change moves
#   beyond white is not lost if the next change moves it back.
#
# All four changes preserve or scale the grey value of a pixel. They therefore commute, and a random order would have no
# effect.
#
# Gaussian blur consists of two matrix products, along rows and along columns. It uses the kernel of torchvision's
# GaussianBlur: a Gaussian sampled at integer pixels, normalised to a sum of 1. Frames are padded by reflection without
# repeating the edge. The kernel is truncated at three times the largest sigma.
#
# Random erasing (Zhong et al. 2020) replaces a box with noise; the box is the same in all frames of a clip. The noise
# is drawn from the standard normal distribution for each pixel, channel and frame (the "pixel" mode of VideoMAE and
# timm). It is a function of the clip's seed, so a clip gets the same noise whenever it is converted: as the mixup
# partner of another clip, at a different index in a batch, or on a different device. torch's generators would draw
# different numbers on a GPU and on a CPU.


# BT.601 weights, used for clips with any colour encoding. They sum to 1; torchvision's 0.2989 for red does not.
GREY_WEIGHTS = (0.299, 0.587, 0.114)
RADIUS_PX = math.ceil(3 * MAX_SIGMA_PX)  # radius of the blur kernel

_YIQ = np.array([GREY_WEIGHTS, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_GREY = np.outer(np.ones(3), GREY_WEIGHTS)
_CHROMA = np.eye(3) - _GREY
# Quarter turn of the chroma plane in the direction of increasing hue, from red via yellow to green.
_QUARTER_TURN = np.linalg.inv(_YIQ) @ np.array([[0, 0, 0], [0, 0, 1], [0, -1, 0]]) @ _YIQ @ _CHROMA


def colour_map(draw: Draw | None, *, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return the affine map of each clip's colours, float32 [B, 3, 5] (B = 1 if `draw` is None).

    The map is multiplied by the vector (R, G, B, 1, g), where R, G and B are in [0, 1], and g is the mean grey value of
    the clip. The product is the augmented and normalised colour.
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
    """Return the blur matrix, float32 [S, S]. The product of a row of pixels and this matrix is the blurred row."""
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

    Clips are blurred one at a time, so the additional memory is the size of two clips, regardless of the batch size.
    """
    # Disable autocast, because bf16 has a mantissa of only eight bits.
    with torch.autocast(video.device.type, enabled=False):
        for clip in np.flatnonzero(sigma_px):
            matrix = send(blur_matrix(video.shape[-1], sigma_px=float(sigma_px[clip])), video.device)
            video[clip] = matrix.T @ (video[clip] @ matrix)


def erase_clips(video: torch.Tensor, draw: Draw) -> None:
    """Fill the drawn boxes in `video` (float32 [B, C, T, S, S], normalised) with noise, in place."""
    size_px = video.shape[-1]
    for clip in np.flatnonzero(draw.box[:, 0]):
        rows, columns = box_slices(draw.box[clip], size_px=size_px)
        box = video[clip, ..., rows, columns]
        box.copy_(_noise(int(draw.noise_seed[clip]), box.shape, device=video.device))


def box_slices(box_4: np.ndarray, *, size_px: int) -> tuple[slice, slice]:
    """Return the rows and columns of a drawn box (`Draw.box`) in frames of `size_px` x `size_px`."""
    height, width = (min(max(1, round(float(side) * size_px)), size_px) for side in box_4[:2])
    top, left = int(box_4[2] * (size_px - height + 1)), int(box_4[3] * (size_px - width + 1))
    return slice(top, top + height), slice(left, left + width)


def _noise(seed: int, shape: Sequence[int], *, device: torch.device) -> torch.Tensor:
    """Draw standard normal numbers (Box and Muller 1958), the same on all devices, except for rounding."""
    count = math.prod(shape)
    num_pairs = -(-count // 2)
    seed_1 = torch.full((1,), seed, dtype=torch.int64, device=device)
    uniform = device_uniform(seed_1, 2 * num_pairs, seed=0, purpose="erase/pixels")[0]
    radius, angle = (-2 * torch.log1p(-uniform[:num_pairs])).sqrt_(), uniform[num_pairs:] * (2 * math.pi)
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
    """Convert clips to a model's input: RGB, augmented, clamped between black and white, and normalised.

    Args:
        video: Frames as Y, U and V planes, uint8 [B, T, S * S * 3 // 2].
        colour: Colour encoding of each clip (clipmill.train.augment.colour), uint8 [B], on the device of `video`.
        size_px: Side length S of the frames, even.
        mean, std: Mean and standard deviation of each channel, for values from 0 to 1.
        draw: Augmentation parameters; None for no augmentation.
        dtype: Dtype of the result. The computation uses float32.

    Returns:
        The model's input, [B, 3, T, S, S].

    Raises:
        ValueError: The resolution of the frames is not `size_px` x `size_px`, or `size_px` is odd.
    """
    if size_px % 2 or video.shape[-1] != size_px * size_px * 3 // 2:
        raise ValueError(f"frames of {video.shape[-1]} bytes are not 4:2:0 planes of {size_px} x {size_px}")
    device = video.device
    has_contrast = draw is not None and bool((draw.contrast != 1).any())
    flip = send(draw.flip, device) if draw is not None and draw.flip.any() else None
    to_normalised = send(colour_map(draw, mean=mean, std=std), device)
    clips = convert_planes(
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

            rand_augment_clips(clips, draw.operation, draw.strength, mean=mean, std=std)
        blur_clips(clips, draw.blur_sigma_px)
        erase_clips(clips, draw)
    return clips.to(dtype)


def to_rgb_uint8(video: torch.Tensor, colour: torch.Tensor, *, size_px: int) -> torch.Tensor:
    """Convert clips to RGB frames for display: uint8 [B, T, S, S, 3]."""
    rgb = to_model_input(video, colour, size_px=size_px, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
    return rgb.round_().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def convert_planes(
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
    """Convert and normalise the planes for `to_model_input`. torch.compile compiles this function as one graph.

    Args:
        to_rgb_B34: Conversion matrix of each clip (`rgb_matrices`).
        to_normalised_B35: Affine map of each clip's colours (`colour_map`).
        flip_B: Bool tensor, True for each clip to flip; None to flip no clip.
        has_contrast: True if the contrast of any clip changes, so that the mean grey values are needed.
        black, white: Normalised values of black and white for each channel.
    """
    num_luma, half_px = size_px * size_px, size_px // 2
    luma = video[..., :num_luma].unflatten(-1, (size_px, size_px))
    chroma = video[..., num_luma:].unflatten(-1, (2, half_px, half_px))
    if flip_B is not None:
        luma = torch.where(flip_B[:, None, None, None], luma.flip(-1), luma)
        chroma = torch.where(flip_B[:, None, None, None, None], chroma.flip(-1), chroma)
    # Multiply the small matrices elementwise, because autocast and TF32 would round a matrix product.
    matrix = (to_normalised_B35[:, :, :3, None] * to_rgb_B34[:, None]).sum(2)
    offset = to_normalised_B35[:, :, 3]
    if has_contrast:
        offset = offset + to_normalised_B35[:, :, 4] * _mean_grey(luma, chroma, to_rgb_B34)[:, None]
    offset = offset + matrix[:, :, 3]
    matrix, offset = matrix[..., None, None, None], offset[..., None, None, None]
    upsampled_chroma = interpolate(chroma.flatten(1, 2).float(), scale_factor=2, mode="bilinear", align_corners=False)
    upsampled_chroma = upsampled_chroma.unflatten(1, (-1, 2))
    clips = torch.addcmul(offset, luma[:, None], matrix[:, :, 0])
    clips.addcmul_(upsampled_chroma[:, None, :, 0], matrix[:, :, 1]).addcmul_(
        upsampled_chroma[:, None, :, 1], matrix[:, :, 2]
    )
    for channel, (low, high) in enumerate(zip(black, white, strict=True)):
        clips[:, channel].clamp_(low, high)
    return clips


def _mean_grey(luma: torch.Tensor, chroma: torch.Tensor, to_rgb_B34: torch.Tensor) -> torch.Tensor:
    """Return the mean grey value of each clip, [B].

    Only integers are summed, so the sums are exact in any order.
    """
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
