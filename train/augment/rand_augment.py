"""RandAugment (Cubuk et al. 2020) on the device. All strengths increase with the magnitude, as in timm.

Several operations are drawn for each clip, with replacement. Each operation is applied with probability 1/2, and with
the same strength in all frames. The strength s is normally distributed around magnitude / 10, and clamped to [0, 1].
Operations with two directions get a random sign. The operations are:

    autocontrast, equalize, invert   have no strength; the first two use the statistics of each frame
    posterize                        keeps 4 - floor(4 s) bits
    solarize                         inverts values of 256 - floor(256 s) or more
    solarize_add                     adds floor(110 s) to values below 128
    saturation, contrast,
    brightness, sharpness            use the factor 1 + 0.9 s or 1 - 0.9 s, at least 0.1
    rotate                           rotates by 30 s degrees, in either direction
    shear_x, shear_y                 shear by 0.3 s, in either direction; the first row or column is fixed
    translate_x, translate_y         translate by 0.45 s of the side length, in either direction

Colour operations give the same results as torchvision's operations on uint8. Operations that map each value separately
are lookup tables, and consecutive tables are combined into one. Geometric operations interpolate bilinearly, on a grid
that is computed by elementwise products: torchvision uses a matrix product, which TF32 would round to a tenth of a
pixel. Pixels from outside the frame get the mean colour of the model's inputs.

A GPU takes longer to launch an operator than to run it on a clip. Therefore clips whose next operations have the same
kind are processed together, and each kind uses as few operators as possible.

Shape suffixes: B batch, N clips that are processed together, C channels, T frames, P planes (the C * T single-channel
images of a clip, channel by channel), H and W pixels (equal), V values.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.train.config.clips import OPERATIONS
from clipmill.train.device.transfer import constant_tensor, send

Triple = tuple[float, float, float]  # values for R, G and B
Operation = tuple[str, float]  # name, and strength from -1 to 1 (the sign is the direction)

_MAX_BITS, _MAX_ADDED, _MAX_CHANGE, _MIN_FACTOR = 4, 110, 0.9, 0.1
_MAX_ROTATION, _MAX_SHEAR, _MAX_TRANSLATION = math.radians(30), 0.3, 0.45
_HALF, _WHITE = 128, 255


def rand_augment_clips(
    video: torch.Tensor,
    operations: NDArray[np.int64],
    strengths: NDArray[np.float64],
    *,
    mean: Triple,
    std: Triple,
) -> None:
    """Apply the drawn operations to the clips of `video` (float32 [B, C, T, H, W], normalised), in place.

    Clips with operations are rounded to uint8. The values of other clips do not change.

    Args:
        operations: Indices of each clip's operations in `OPERATIONS`; -1 means no operation.
        strengths: Strengths of these operations, from -1 to 1.
        mean, std: Mean and standard deviation that `video` was normalised with.
    """
    steps = {
        int(clip): _steps(operations[clip], strengths[clip]) for clip in np.flatnonzero((operations >= 0).any(axis=1))
    }
    if not steps:
        return
    num_frames, device = video.shape[2], video.device
    mean_P11, std_P11 = (_repeat_channels(values, num_frames, device) for values in (mean, std))
    rows = send(np.array([*steps]), device)
    denormalised_NPHW = video.index_select(0, rows).flatten(1, 2).mul_(std_P11).add_(mean_P11)
    clips_PHW = [*denormalised_NPHW.mul_(_WHITE).round_().clamp_(0, _WHITE).to(torch.uint8).unbind(0)]
    remaining_steps = [*steps.values()]
    while unfinished_clips := [clip for clip, clip_steps in enumerate(remaining_steps) if clip_steps]:
        # Choose the kind whose clips have the most remaining steps, so that no long sequence is left until the end.
        num_steps = Counter[str]()
        for clip in unfinished_clips:
            num_steps[_kind(remaining_steps[clip][0][0][0])] += len(remaining_steps[clip])
        kind = max(_KINDS, key=lambda name: num_steps[name])
        group = [clip for clip in unfinished_clips if _kind(remaining_steps[clip][0][0][0]) == kind]
        clips_NPHW = torch.stack([clips_PHW[clip] for clip in group])
        changed_NPHW = apply_operations(clips_NPHW, [remaining_steps[clip].pop(0) for clip in group], fill=mean)
        for clip, clip_PHW in zip(group, changed_NPHW, strict=True):
            clips_PHW[clip] = clip_PHW
    changed_NPHW = torch.stack(clips_PHW).div(_WHITE).sub_(mean_P11).div_(std_P11)
    video.index_copy_(0, rows, changed_NPHW.unflatten(1, (-1, num_frames)))


def _steps(operations_N: NDArray[np.int64], strengths_N: NDArray[np.float64]) -> list[list[Operation]]:
    """Group a clip's operations into steps, in order. Consecutive lookup tables form one step."""
    steps: list[list[Operation]] = []
    for index, strength in zip(operations_N.tolist(), strengths_N.tolist(), strict=True):
        if index < 0:
            continue
        operation = (OPERATIONS[index], strength)
        if steps and _kind(operation[0]) == "table" == _kind(steps[-1][0][0]):
            steps[-1].append(operation)
        else:
            steps.append([operation])
    return steps


def apply_operations(clips_NPHW: torch.Tensor, steps: Sequence[Sequence[Operation]], *, fill: Triple) -> torch.Tensor:
    """Apply one step to each of several uint8 clips. All steps must have the same kind.

    Args:
        steps: Operations of each clip's step. Only a step of lookup tables has several operations.
        fill: Colour of pixels from outside the frame, with values from 0 to 1.
    """
    operations = [step[0] for step in steps]
    # Disable autocast, which would round intermediate sums.
    with torch.autocast(clips_NPHW.device.type, enabled=False):
        kind = _kind(operations[0][0])
        if kind == "move":
            maps = [_MOVES[name](strength, clips_NPHW.shape[-1]) for name, strength in operations]
            return _resample(clips_NPHW, maps, fill=fill)
        if kind == "table":
            tables = send(np.concatenate([_table(step) for step in steps]), clips_NPHW.device)
            # Add the offset of each clip's table to the clip's values.
            offset_N111 = send(256 * np.arange(len(steps), dtype=np.int32)[:, None, None, None], clips_NPHW.device)
            index = clips_NPHW.to(torch.int32).add_(offset_N111)
            return tables.index_select(0, index.flatten()).view(clips_NPHW.shape)
        if kind == "blend":
            return _blend(clips_NPHW, operations)
        if kind == "sharpness":
            return _sharpen(clips_NPHW, operations)
        return {"autocontrast": _autocontrast, "equalize": _equalize}[kind](clips_NPHW)


_KINDS = ("autocontrast", "equalize", "table", "blend", "sharpness", "move")


def _kind(name: str) -> str:
    """Return the kind of an operation. All operations of the same kind use the same torch operators."""
    if name in _MOVES:
        return "move"
    if name in ("saturation", "contrast"):
        return "blend"
    return name if name in _KINDS else "table"


def _repeat_channels(values: Triple, num_frames: int, device: torch.device) -> torch.Tensor:
    """Return a cached tensor with the value of each plane's channel, [P, 1, 1]."""
    return constant_tensor(tuple(((value,),) for value in values for _ in range(num_frames)), device, torch.float32)


def _table(step: Sequence[Operation]) -> NDArray[np.uint8]:
    """Return the lookup table of a step: the result of its operations for each of the 256 values, uint8 [256]."""
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
            # The sum does not overflow, because only values below 128 change.
            values = np.where(values < _HALF, values + np.uint8(size * _MAX_ADDED), values)
        else:
            values = np.clip(values * np.float32(_factor(strength)), 0, _WHITE).astype(np.uint8)
    return values


def _factor(strength: float) -> float:
    return max(_MIN_FACTOR, 1 + _MAX_CHANGE * strength)


def _autocontrast(clips_NPHW: torch.Tensor) -> torch.Tensor:
    """Map the lowest value of each plane to 0 and the highest to 255, as torchvision's autocontrast does."""
    low, high = clips_NPHW.amin((-2, -1), keepdim=True), clips_NPHW.amax((-2, -1), keepdim=True)
    # A plane whose values are all equal does not change.
    is_flat = high == low
    scale = (high - low).mul(1 / _WHITE).masked_fill_(is_flat, 1)
    return (clips_NPHW - low.masked_fill_(is_flat, 0)).div(scale).to(torch.uint8)


def _equalize(clips_NPHW: torch.Tensor) -> torch.Tensor:
    """Equalize the histogram of each plane, as torchvision's equalize does."""
    num_pixels, device = clips_NPHW.shape[-1] ** 2, clips_NPHW.device
    index_NPM = clips_NPHW.flatten(2).long()
    ones_NPM = constant_tensor((1,), device, torch.int32).expand_as(index_NPM)
    counts_NPV = torch.zeros(*index_NPM.shape[:2], 256, dtype=torch.int32, device=device)
    counts_NPV.scatter_add_(-1, index_NPM, ones_NPM)
    cumulative_NPV = counts_NPV.cumsum(-1)
    # The step is the number of pixels below the maximum value of the plane, divided by 255.
    step_NP1 = (cumulative_NPV % num_pixels).amax(-1, keepdim=True).floor_divide_(_WHITE)
    # Round halves up. In float32, quotients of integers below 2^24 are never rounded across a half.
    table_NPV = (cumulative_NPV - counts_NPV).div(step_NP1).add_(0.5).clamp_(max=_WHITE)
    # A plane with fewer than 255 pixels below the maximum does not change.
    table_NPV = torch.where(step_NP1 > 0, table_NPV, constant_tensor(tuple(range(256)), device, torch.float32))
    return table_NPV.to(torch.uint8).gather(-1, index_NPM).view(clips_NPHW.shape)


def _blend(clips_NPHW: torch.Tensor, operations: Sequence[Operation]) -> torch.Tensor:
    """Blend frames with their grey version (saturation) or with its mean (contrast).

    The results equal torchvision's adjust_saturation and adjust_contrast.
    """
    clips_NCTHW = clips_NPHW.unflatten(1, (3, -1))
    red, green, blue = clips_NCTHW.unbind(1)
    grey_NTHW = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).to(torch.uint8)
    factors_N = np.array([_factor(strength) for _, strength in operations], dtype=np.float32)
    blended_NCTHW = clips_NCTHW.float().mul_(send(factors_N[:, None, None, None, None], clips_NPHW.device))
    # Add one clip at a time, because only `add_` with `alpha` rounds once, as torchvision does.
    for (name, strength), blended_CTHW, grey_THW in zip(operations, blended_NCTHW, grey_NTHW, strict=True):
        grey = grey_THW if name == "saturation" else grey_THW.mean((1, 2), keepdim=True, dtype=torch.float32)
        blended_CTHW.add_(grey, alpha=1 - _factor(strength))
    return blended_NCTHW.flatten(1, 2).clamp_(0, _WHITE).to(torch.uint8)


def _sharpen(clips_NPHW: torch.Tensor, operations: Sequence[Operation]) -> torch.Tensor:
    """Sharpen frames as torchvision's adjust_sharpness does."""
    pixels_NPHW = clips_NPHW.float()
    num_planes = pixels_NPHW.shape[1]
    # Use integer weights, which are exact on any device: 5 for the pixel, and 1 for each neighbour. The kernel is a
    # cached tensor, because the host would have to wait for the transfer of a new tensor.
    weights_P133 = constant_tensor(
        ((((1, 1, 1), (1, 5, 1), (1, 1, 1)),),) * num_planes, pixels_NPHW.device, torch.float32
    )
    smooth = torch.nn.functional.conv2d(pixels_NPHW, weights_P133, groups=num_planes).div_(13).round_()
    inner = pixels_NPHW[..., 1:-1, 1:-1]
    for (_, strength), inner_PHW, difference_PHW in zip(operations, inner, smooth.sub_(inner), strict=True):
        inner_PHW.add_(difference_PHW, alpha=1 - _factor(strength))  # as in `_blend`
    return pixels_NPHW.clamp_(0, _WHITE).to(torch.uint8)


# Affine map ((a, b, c), (d, e, f)): a pixel at (x, y) is sampled at (a x + b y + c, d x + e y + f). Coordinates range
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
    num_planes, size_px, device = clips_NPHW.shape[1], clips_NPHW.shape[-1], clips_NPHW.device
    # Double the source coordinates, because the grid of `grid_sample` ranges from -1 to 1. Doubling is exact.
    coefficients = 2 * np.array(maps, dtype=np.float32).transpose(2, 0, 1)[:, :, None, None]
    centres = np.arange(size_px, dtype=np.float32) + np.float32(0.5)
    x_terms_N1W2, y_terms_NH12 = coefficients[0] * centres[:, None], coefficients[1] * centres[:, None, None]
    source_NHW2 = send(x_terms_N1W2, device) + send(y_terms_NH12, device)
    source_NHW2.add_(send(coefficients[2], device))
    is_outside_NHW = source_NHW2.floor_divide(2 * size_px).any(dim=-1)
    # The map is the same for all planes of a clip, so they are the channels of `grid_sample`.
    moved_NPHW = torch.nn.functional.grid_sample(
        clips_NPHW.float(),
        source_NHW2.div_(size_px).sub_(1),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    red, green, blue = fill
    fill_P11 = _repeat_channels((red * _WHITE, green * _WHITE, blue * _WHITE), num_planes // 3, device)
    return torch.where(is_outside_NHW[:, None], fill_P11, moved_NPHW).round_().to(torch.uint8)
