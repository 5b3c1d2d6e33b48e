"""RandAugment (Cubuk et al. 2020) on the device. All strengths increase with the magnitude, as in timm.

N operations are drawn for a clip, with repetition. Each is applied with probability 1/2, with the same strength in all
frames. The strength s is normally distributed around magnitude / 10, and clamped to [0, 1]. Operations with two
directions get a random sign:

    autocontrast, equalize, invert   no strength; the first two use the statistics of each frame
    posterize                        keeps 4 - floor(4 s) bits
    solarize                         inverts values of 256 - floor(256 s) or more
    solarize_add                     adds floor(110 s) to values below 128
    saturation, contrast,
    brightness, sharpness            factor 1 + 0.9 s or 1 - 0.9 s, at least 0.1
    rotate                           by 30 s degrees, in either direction
    shear_x, shear_y                 by 0.3 s pixels per pixel, in either direction; the first row or column is fixed
    translate_x, translate_y         by 0.45 s of the side, in either direction

Colour operations give the same results as torchvision's on uint8. An operation that maps each value separately is a
lookup table, and consecutive tables are combined into one. Geometric operations are bilinear, with a grid of
elementwise products: torchvision computes the grid by a matrix product, which TF32 would round to a tenth of a pixel.
Pixels from outside the frame get the mean colour of the model's inputs.

A GPU takes longer to launch an operator than to run it on a clip. Therefore clips whose next operations have the same
kind are changed together, and each kind uses as few operators as possible.

Shape suffixes: B batch, N clips that are changed together, C channels, T frames, P pictures of one channel (C * T, in
the order of channels), H and W pixels (equal).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.train.augment.draws import OPERATIONS, Draw
from clipmill.train.device.transfer import constant_tensor, send

Triple = tuple[float, float, float]
Operation = tuple[str, float]  # name, and strength from -1 to 1, whose sign is the direction of the operation

_MAX_BITS, _MAX_ADDED, _MAX_CHANGE, _LEAST_FACTOR = 4, 110, 0.9, 0.1
_MAX_ROTATION, _MAX_SHEAR, _MAX_TRANSLATION = math.radians(30), 0.3, 0.45
_HALF, _WHITE = 128, 255


def rand_augment_clips(video: torch.Tensor, draw: Draw, *, mean: Triple, std: Triple) -> None:
    """Apply the drawn operations to the clips of `video` (float32 [B, C, T, H, W], normalised) in place.

    Clips with operations are rounded to uint8; other clips keep their exact values.
    """
    steps = {
        int(number): _steps(draw.operation[number], draw.strength[number])
        for number in np.flatnonzero((draw.operation >= 0).any(axis=1))
    }
    if not steps:
        return
    num_frames, device = video.shape[2], video.device
    mean_P11, std_P11 = (_repeat_channels(values, num_frames, device) for values in (mean, std))
    rows = send(np.array([*steps]), device)
    augmented_NPHW = video.index_select(0, rows).flatten(1, 2).mul_(std_P11).add_(mean_P11)
    clips_PHW = [*augmented_NPHW.mul_(_WHITE).round_().clamp_(0, _WHITE).to(torch.uint8).unbind(0)]
    remaining = [*steps.values()]
    while unfinished := [clip for clip, clip_steps in enumerate(remaining) if clip_steps]:
        # Choose the kind whose clips have the most remaining steps, so that long sequences do not remain at the end.
        num_steps = Counter[str]()
        for clip in unfinished:
            num_steps[_kind(remaining[clip][0][0][0])] += len(remaining[clip])
        kind = max(_KINDS, key=lambda name: num_steps[name])
        group = [clip for clip in unfinished if _kind(remaining[clip][0][0][0]) == kind]
        clips_NPHW = torch.stack([clips_PHW[clip] for clip in group])
        changed_NPHW = change_clips(clips_NPHW, [remaining[clip].pop(0) for clip in group], fill=mean)
        for clip, clip_PHW in zip(group, changed_NPHW, strict=True):
            clips_PHW[clip] = clip_PHW
    changed_NPHW = torch.stack(clips_PHW).div(_WHITE).sub_(mean_P11).div_(std_P11)
    video.index_copy_(0, rows, changed_NPHW.unflatten(1, (-1, num_frames)))


def _steps(operations_N: NDArray[np.int64], strengths_N: NDArray[np.float64]) -> list[list[Operation]]:
    """Return a clip's operations in order, as steps. Consecutive table operations form one step."""
    steps: list[list[Operation]] = []
    for number, strength in zip(operations_N.tolist(), strengths_N.tolist(), strict=True):
        if number < 0:
            continue
        operation = (OPERATIONS[number], strength)
        if steps and _kind(operation[0]) == "table" == _kind(steps[-1][0][0]):
            steps[-1].append(operation)
        else:
            steps.append([operation])
    return steps


def change(clip_TCHW: torch.Tensor, name: str, strength: float, *, fill: Triple) -> torch.Tensor:
    """Apply one operation to a uint8 clip; see `change_clips` for the arguments."""
    clip_PHW = clip_TCHW.transpose(0, 1).flatten(0, 1)
    [changed_PHW] = change_clips(clip_PHW[None], [[(name, strength)]], fill=fill)
    return changed_PHW.unflatten(0, (-1, len(clip_TCHW))).transpose(0, 1)


def change_clips(clips_NPHW: torch.Tensor, steps: Sequence[Sequence[Operation]], *, fill: Triple) -> torch.Tensor:
    """Apply one step to each of several uint8 clips. All steps must have the same kind.

    Args:
        steps: Operations of each clip's step. A step has several operations only if they are tables.
        fill: Colour of pixels from outside the frame, values from 0 to 1.
    """
    operations = [step[0] for step in steps]
    # Disable autocast, which would round intermediate sums.
    with torch.autocast(clips_NPHW.device.type, enabled=False):
        kind = _kind(operations[0][0])
        if kind == "move":
            maps = [_MOVES[name](strength, clips_NPHW.shape[-1]) for name, strength in operations]
            return _resample(clips_NPHW, maps, fill=fill)
        if kind == "table":
            # These operations map each of the 256 values separately.
            tables = send(np.concatenate([_table(step) for step in steps]), clips_NPHW.device)
            first_N111 = send(256 * np.arange(len(steps), dtype=np.int32)[:, None, None, None], clips_NPHW.device)
            index = clips_NPHW.to(torch.int32).add_(first_N111)
            return tables.index_select(0, index.flatten()).view(clips_NPHW.shape)
        if kind == "blend":
            return _blend(clips_NPHW, operations)
        if kind == "sharpness":
            return _sharpen(clips_NPHW, operations)
        return {"autocontrast": _autocontrast, "equalize": _equalize}[kind](clips_NPHW)


_KINDS = ("autocontrast", "equalize", "table", "blend", "sharpness", "move")


def _kind(name: str) -> str:
    """Return the kind of an operation. All operations of a kind are computed by the same operators."""
    if name in _MOVES:
        return "move"
    if name in ("saturation", "contrast"):
        return "blend"
    return name if name in _KINDS else "table"


def _repeat_channels(values: Triple, num_frames: int, device: torch.device) -> torch.Tensor:
    """Return the value of each picture's channel, [P, 1, 1]."""
    return constant_tensor(tuple(((value,),) for value in values for _ in range(num_frames)), device, torch.float32)


def _table(step: Sequence[Operation]) -> NDArray[np.uint8]:
    """Return the result of a step's operations, which are equal to torchvision's, for each of the 256 values."""
    values = np.arange(256, dtype=np.uint8)
    for name, strength in step:
        size = abs(strength)
        if name == "invert":
            values = _WHITE - values
        elif name == "posterize":
            values = values & np.uint8(256 - (1 << (4 + int(size * _MAX_BITS))))
        elif name == "solarize":
            values = np.where(values >= 256 - int(size * 256), _WHITE - values, values)
        elif name == "solarize_add":
            # Only values below 128 change, so the sum does not overflow.
            values = np.where(values < _HALF, values + np.uint8(size * _MAX_ADDED), values)
        else:
            values = np.clip(values * np.float32(_factor(strength)), 0, _WHITE).astype(np.uint8)
    return values


def _factor(strength: float) -> float:
    return max(_LEAST_FACTOR, 1 + _MAX_CHANGE * strength)


def _autocontrast(clips_NPHW: torch.Tensor) -> torch.Tensor:
    """Stretch contrast as torchvision's autocontrast does: a picture's darkest value becomes 0, its brightest 255."""
    low, high = clips_NPHW.amin((-2, -1), keepdim=True), clips_NPHW.amax((-2, -1), keepdim=True)
    # A picture in which all pixels are equal stays unchanged.
    is_flat = high == low
    scale = (high - low).mul(1 / _WHITE).masked_fill_(is_flat, 1)
    return (clips_NPHW - low.masked_fill_(is_flat, 0)).div(scale).to(torch.uint8)


def _equalize(clips_NPHW: torch.Tensor) -> torch.Tensor:
    """Equalize each picture as torchvision does."""
    num_pixels, device = clips_NPHW.shape[-1] ** 2, clips_NPHW.device
    index_NPM = clips_NPHW.flatten(2).long()
    ones_NPM = constant_tensor((1,), device, torch.int32).expand_as(index_NPM)
    counts_NPV = torch.zeros(*index_NPM.shape[:2], 256, dtype=torch.int32, device=device)
    counts_NPV.scatter_add_(-1, index_NPM, ones_NPM)
    up_to_NPV = counts_NPV.cumsum(-1)
    # A step is the number of pixels, except pixels with the largest value, divided by 255.
    step_NP1 = (up_to_NPV % num_pixels).amax(-1, keepdim=True).floor_divide_(_WHITE)
    # Halves are rounded up. Float32 quotients of integers below 2^24 are never rounded across a half.
    table_NPV = (up_to_NPV - counts_NPV).div(step_NP1).add_(0.5).clamp_(max=_WHITE)
    # If a picture has too few pixels with other values, it stays unchanged.
    table_NPV = torch.where(step_NP1 > 0, table_NPV, constant_tensor(tuple(range(256)), device, torch.float32))
    return table_NPV.to(torch.uint8).gather(-1, index_NPM).view(clips_NPHW.shape)


def _blend(clips_NPHW: torch.Tensor, operations: Sequence[Operation]) -> torch.Tensor:
    """Mix pictures with their grey version or its mean, as torchvision's adjust_saturation and adjust_contrast do."""
    clips_NCTHW = clips_NPHW.unflatten(1, (3, -1))
    red, green, blue = clips_NCTHW.unbind(1)
    grey_NTHW = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).to(torch.uint8)
    factors_N = np.array([_factor(strength) for _, strength in operations], dtype=np.float32)
    mixed_NCTHW = clips_NCTHW.float().mul_(send(factors_N[:, None, None, None, None], clips_NPHW.device))
    # Add one clip at a time, because only `alpha` adds with a single rounding, as torchvision does.
    for (name, strength), mixed_CTHW, grey_THW in zip(operations, mixed_NCTHW, grey_NTHW, strict=True):
        other = grey_THW if name == "saturation" else grey_THW.mean((1, 2), keepdim=True, dtype=torch.float32)
        mixed_CTHW.add_(other, alpha=1 - _factor(strength))
    return mixed_NCTHW.flatten(1, 2).clamp_(0, _WHITE).to(torch.uint8)


def _sharpen(clips_NPHW: torch.Tensor, operations: Sequence[Operation]) -> torch.Tensor:
    """Sharpen as torchvision's adjust_sharpness does.

    The kernel is a cached tensor, because the host would have to wait for the upload of a new one.
    """
    pixels_NPHW = clips_NPHW.float()
    num_pictures = pixels_NPHW.shape[1]
    # Use integer weights, which are exact on any device: 5 for the pixel and 1 for each of its neighbours.
    weights_P133 = constant_tensor(
        ((((1, 1, 1), (1, 5, 1), (1, 1, 1)),),) * num_pictures, pixels_NPHW.device, torch.float32
    )
    smooth = torch.nn.functional.conv2d(pixels_NPHW, weights_P133, groups=num_pictures).div_(13).round_()
    inner = pixels_NPHW[..., 1:-1, 1:-1]
    for (_, strength), inner_PHW, difference_PHW in zip(operations, inner, smooth.sub_(inner), strict=True):
        inner_PHW.add_(difference_PHW, alpha=1 - _factor(strength))  # as in `_blend`
    return pixels_NPHW.clamp_(0, _WHITE).to(torch.uint8)


# Source of a pixel (x, y), as ((a, b, c), (d, e, f)): the source is (a x + b y + c, d x + e y + f). Coordinates range
# from 0 to the side length, and pixel centres are at half-integers.
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


def _resample(clips_NPHW: torch.Tensor, maps: Sequence[_Map], *, fill: Triple) -> torch.Tensor:
    num_pictures, size_px, device = clips_NPHW.shape[1], clips_NPHW.shape[-1], clips_NPHW.device
    # Compute twice the source coordinates, because the grid ranges from -1 to 1. Doubling a number is exact.
    coefficients = 2 * np.array(maps, dtype=np.float32).transpose(2, 0, 1)[:, :, None, None]
    middles = np.arange(size_px, dtype=np.float32) + np.float32(0.5)
    x_terms_N1W2, y_terms_NH12 = coefficients[0] * middles[:, None], coefficients[1] * middles[:, None, None]
    source_NHW2 = send(x_terms_N1W2, device) + send(y_terms_NH12, device)
    source_NHW2.add_(send(coefficients[2], device))
    is_outside_NHW = source_NHW2.floor_divide(2 * size_px).any(dim=-1)
    # All pictures of a clip move in the same way, so they are the sampler's channels.
    moved_NPHW = torch.nn.functional.grid_sample(
        clips_NPHW.float(),
        source_NHW2.div_(size_px).sub_(1),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    red, green, blue = fill
    fill_P11 = _repeat_channels((red * _WHITE, green * _WHITE, blue * _WHITE), num_pictures // 3, device)
    return torch.where(is_outside_NHW[:, None], fill_P11, moved_NPHW).round_().to(torch.uint8)
