"""RandAugment (Cubuk et al. 2020) on the device, with strengths that all increase with the magnitude, as in timm.

N operations are drawn for a clip, with repetition; each is applied with probability 1/2, to all frames with the same
strength. The strength s is normally distributed around magnitude / 10 and clamped to [0, 1]; operations with two
directions get a random sign:

    autocontrast, equalize, invert   without strength; statistics are those of each frame
    posterize                        keeps 4 - floor(4 s) bits
    solarize                         inverts values from 256 - floor(256 s) on
    solarize_add                     adds floor(110 s) to values below 128
    saturation, contrast,
    brightness, sharpness            factor 1 + 0.9 s or 1 - 0.9 s, at least 0.1
    rotate                           by 30 s degrees, in either direction
    shear_x, shear_y                 by 0.3 s pixels per pixel, in either direction; the first row or column stays
    translate_x, translate_y         by 0.45 s of the side, in either direction

Colour operations are torchvision's, which work on whole uint8 clips on any device. Sharpness and the geometric
operations are implemented here, the latter bilinear: torchvision computes its grid by a matrix product, which TF32
would round to a tenth of a pixel. Pixels from outside the frame have the mean colour of the model's inputs.

Shape suffixes: B batch, N operations, C channels, T frames, H and W pixels (equal).
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from clipmill.train.augment.draws import OPERATIONS, Draw
from clipmill.train.device.transfer import constant

if TYPE_CHECKING:
    from types import ModuleType

Triple = tuple[float, float, float]

_MAX_BITS, _MAX_ADDED, _MAX_CHANGE, _LEAST_FACTOR = 4, 110, 0.9, 0.1
_MAX_ROTATION, _MAX_SHEAR, _MAX_TRANSLATION = math.radians(30), 0.3, 0.45
_HALF = 128


def rand_augment_clips(video: torch.Tensor, draw: Draw, *, mean: Triple, std: Triple) -> None:
    """Apply the drawn operations to the clips of `video` (float32 [B, C, T, H, W], normalised) in place.

    Clips with operations are rounded to uint8, one at a time; the others keep their exact values.
    """
    mean_C, std_C = (constant(values, video.device, torch.float32)[:, None, None] for values in (mean, std))
    for number in np.flatnonzero((draw.operation >= 0).any(axis=1)):
        clip_TCHW = video[number].transpose(0, 1)
        clip_TCHW = ((clip_TCHW * std_C + mean_C) * 255).round().clamp(0, 255).to(torch.uint8)
        for operation, strength in zip(draw.operation[number], draw.strength[number], strict=True):
            if operation >= 0:
                clip_TCHW = change(clip_TCHW, OPERATIONS[operation], float(strength), fill=mean)
        video[number] = ((clip_TCHW.float() / 255 - mean_C) / std_C).transpose(0, 1)


def change(clip_TCHW: torch.Tensor, name: str, strength: float, *, fill: Triple) -> torch.Tensor:
    """Apply one operation to a uint8 clip.

    Args:
        strength: from -1 to 1; the sign is the direction of operations that have two.
        fill: colour of pixels from outside the frame, from 0 to 1.
    """
    if name in _MOVES:
        return _moved(clip_TCHW, _MOVES[name](strength, clip_TCHW.shape[-1]), fill=fill)
    if name == "sharpness":
        return _sharpened(clip_TCHW, _factor(strength))
    from torchvision.transforms.v2 import functional  # type: ignore[import-untyped]

    # Autocast would round intermediate sums.
    with torch.autocast(clip_TCHW.device.type, enabled=False):
        return _recoloured(functional, clip_TCHW, name, strength)


def _recoloured(functional: "ModuleType", clip_TCHW: torch.Tensor, name: str, strength: float) -> torch.Tensor:
    size = abs(strength)
    if name in ("autocontrast", "equalize", "invert"):
        changed = getattr(functional, name)(clip_TCHW)
    elif name == "posterize":
        changed = functional.posterize(clip_TCHW, _MAX_BITS - int(size * _MAX_BITS))
    elif name == "solarize":
        threshold = 256 - int(size * 256)
        changed = functional.solarize(clip_TCHW, threshold) if threshold < 256 else clip_TCHW
    elif name == "solarize_add":
        # Only below 128, so that no sum overflows.
        changed = torch.where(clip_TCHW < _HALF, clip_TCHW + int(size * _MAX_ADDED), clip_TCHW)
    else:
        changed = getattr(functional, f"adjust_{name}")(clip_TCHW, _factor(strength))
    result: torch.Tensor = changed
    return result


def _factor(strength: float) -> float:
    return max(_LEAST_FACTOR, 1 + _MAX_CHANGE * strength)


def _sharpened(clip_TCHW: torch.Tensor, factor: float) -> torch.Tensor:
    """torchvision's adjust_sharpness, without its kernel tensor, for whose upload the host would wait for the GPU."""
    pixels_TCHW = clip_TCHW.float()
    inner = pixels_TCHW[..., 1:-1, 1:-1]
    # Integers, exact on any device: the pixel five times, each of its neighbours once.
    rows = pixels_TCHW[..., :-2, :] + pixels_TCHW[..., 1:-1, :] + pixels_TCHW[..., 2:, :]
    sums = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]).add_(inner, alpha=4)
    inner.add_(sums.div_(13).round_().sub_(inner), alpha=1 - factor)
    return pixels_TCHW.clamp_(0, 255).to(torch.uint8)


# Source of a pixel, as ((a, b, c), (d, e, f)): x from a x + b y + c, and y from d x + e y + f, with x and y from 0 to
# the side, at pixel centres.
_Map = tuple[tuple[float, float, float], tuple[float, float, float]]


def _rotation(strength: float, size_px: int) -> _Map:
    cos, sin, centre = math.cos(_MAX_ROTATION * strength), math.sin(_MAX_ROTATION * strength), size_px / 2
    return (cos, -sin, centre - (cos - sin) * centre), (sin, cos, centre - (sin + cos) * centre)


_MOVES: dict[str, Callable[[float, int], _Map]] = {
    "rotate": _rotation,
    "shear_x": lambda strength, size_px: ((1, _MAX_SHEAR * strength, 0), (0, 1, 0)),
    "shear_y": lambda strength, size_px: ((1, 0, 0), (_MAX_SHEAR * strength, 1, 0)),
    "translate_x": lambda strength, size_px: ((1, 0, _MAX_TRANSLATION * strength * size_px), (0, 1, 0)),
    "translate_y": lambda strength, size_px: ((1, 0, 0), (0, 1, _MAX_TRANSLATION * strength * size_px)),
}


def _moved(clip_TCHW: torch.Tensor, origin: _Map, *, fill: Triple) -> torch.Tensor:
    size_px = clip_TCHW.shape[-1]
    middles = torch.arange(size_px, device=clip_TCHW.device) + 0.5
    y_HW, x_HW = torch.meshgrid(middles, middles, indexing="ij")
    from_HW2 = torch.stack([a * x_HW + b * y_HW + c for a, b, c in origin], dim=-1)
    inside_HW = ((from_HW2 >= 0) & (from_HW2 < size_px)).all(dim=-1)
    grid_THW2 = (2 * from_HW2 / size_px - 1).expand(len(clip_TCHW), -1, -1, -1)
    with torch.autocast(clip_TCHW.device.type, enabled=False):
        moved_TCHW = torch.nn.functional.grid_sample(
            clip_TCHW.float(), grid_THW2, mode="bilinear", padding_mode="border", align_corners=False
        )
    fill_C11 = constant(fill, clip_TCHW.device, torch.float32)[:, None, None] * 255
    return torch.where(inside_HW, moved_TCHW, fill_C11).round().to(torch.uint8)
