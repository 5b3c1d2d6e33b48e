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

Colour operations are torchvision's, on uint8; those that map each value by itself are tables. Sharpness and the
geometric operations are implemented here, the latter bilinear: torchvision computes its grid by a matrix product, which
TF32 would round to a tenth of a pixel. Pixels from outside the frame have the mean colour of the model's inputs.

Shape suffixes: B batch, N clips that are changed together, C channels, T frames, H and W pixels (equal).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.train.augment.draws import OPERATIONS, Draw
from clipmill.train.device.transfer import constant, send

Triple = tuple[float, float, float]

_MAX_BITS, _MAX_ADDED, _MAX_CHANGE, _LEAST_FACTOR = 4, 110, 0.9, 0.1
_MAX_ROTATION, _MAX_SHEAR, _MAX_TRANSLATION = math.radians(30), 0.3, 0.45
_HALF = 128


def rand_augment_clips(video: torch.Tensor, draw: Draw, *, mean: Triple, std: Triple) -> None:
    """Apply the drawn operations to the clips of `video` (float32 [B, C, T, H, W], normalised) in place.

    Clips with operations are rounded to uint8; the others keep their exact values. A GPU takes longer to launch an
    operator than to run it on a clip, so clips whose next operation is of the same kind are changed together.
    """
    mean_C, std_C = (constant(values, video.device, torch.float32)[:, None, None] for values in (mean, std))
    waiting = {
        int(number): [
            (OPERATIONS[operation], float(strength))
            for operation, strength in zip(draw.operation[number], draw.strength[number], strict=True)
            if operation >= 0
        ]
        for number in np.flatnonzero((draw.operation >= 0).any(axis=1))
    }
    if not waiting:
        return
    rows = send(np.array([*waiting]), video.device)
    chosen_NTCHW = video.index_select(0, rows).transpose(1, 2).mul_(std_C).add_(mean_C)
    clips_TCHW = [*chosen_NTCHW.mul_(255).round_().clamp_(0, 255).to(torch.uint8).unbind(0)]
    places, left = {number: place for place, number in enumerate(waiting)}, dict(waiting)
    while left:
        kinds = Counter(_kind(steps[0][0]) for steps in left.values())
        # The kind that most clips wait for; of several, the first in the order of operations.
        kind = max(_KINDS, key=lambda one: kinds[one])
        numbers = [number for number, steps in left.items() if _kind(steps[0][0]) == kind]
        first = [left[number][0] for number in numbers]
        changed = change_clips(torch.stack([clips_TCHW[places[number]] for number in numbers]), first, fill=mean)
        for number, clip_TCHW in zip(numbers, changed.unbind(0), strict=True):
            clips_TCHW[places[number]] = clip_TCHW
            left[number] = left[number][1:]
        left = {number: steps for number, steps in left.items() if steps}
    changed_NTCHW = torch.stack(clips_TCHW).float().div_(255).sub_(mean_C).div_(std_C)
    video.index_copy_(0, rows, changed_NTCHW.transpose(1, 2))


def change(clip_TCHW: torch.Tensor, name: str, strength: float, *, fill: Triple) -> torch.Tensor:
    """Apply one operation to a uint8 clip; see `change_clips`."""
    return change_clips(clip_TCHW[None], [(name, strength)], fill=fill)[0]


def change_clips(clips_NTCHW: torch.Tensor, operations: Sequence[tuple[str, float]], *, fill: Triple) -> torch.Tensor:
    """Apply an operation to each of several uint8 clips; all are of one kind.

    Args:
        operations: Name and strength of each, from -1 to 1; the sign is the direction of operations that have two.
        fill: Colour of pixels from outside the frame, from 0 to 1.
    """
    names, strengths = [name for name, _ in operations], [strength for _, strength in operations]
    # Autocast would round intermediate sums.
    with torch.autocast(clips_NTCHW.device.type, enabled=False):
        kind = _kind(names[0])
        if kind == "move":
            maps = [_MOVES[name](strength, clips_NTCHW.shape[-1]) for name, strength in operations]
            return _moved(clips_NTCHW, maps, fill=fill)
        if kind == "table":
            return _looked_up(clips_NTCHW, operations)
        if kind == "sharpness":
            return _sharpened(clips_NTCHW, [*map(_factor, strengths)])
        if kind == "blend":
            return _blended(clips_NTCHW, names, [*map(_factor, strengths)])
        from torchvision.transforms.v2 import functional  # type: ignore[import-untyped]

        changed: torch.Tensor = getattr(functional, kind)(clips_NTCHW)  # autocontrast, equalize: of each frame
        return changed


_KINDS = ("autocontrast", "equalize", "table", "blend", "sharpness", "move")


def _kind(name: str) -> str:
    """The operations that are computed by the same operators, with other numbers."""
    if name in _MOVES:
        return "move"
    if name in ("saturation", "contrast"):
        return "blend"
    return name if name in _KINDS else "table"


def _looked_up(clips_NTCHW: torch.Tensor, operations: Sequence[tuple[str, float]]) -> torch.Tensor:
    """Operations that map each of the 256 values by itself."""
    tables = send(np.concatenate([_table(*operation) for operation in operations]), clips_NTCHW.device)
    first_N = 256 * torch.arange(len(operations), dtype=torch.int32, device=clips_NTCHW.device)
    index = clips_NTCHW.to(torch.int32).add_(first_N.view(-1, 1, 1, 1, 1))
    return tables.index_select(0, index.flatten()).view(clips_NTCHW.shape)


def _table(name: str, strength: float) -> NDArray[np.uint8]:
    """What torchvision's operation makes of each of the 256 values."""
    values, size = np.arange(256, dtype=np.uint8), abs(strength)
    if name == "invert":
        return 255 - values
    if name == "posterize":
        return values & np.uint8(256 - (1 << (4 + int(size * _MAX_BITS))))
    if name == "solarize":
        return np.where(values >= 256 - int(size * 256), 255 - values, values)
    if name == "solarize_add":
        # Only below 128, so that no sum overflows.
        return np.where(values < _HALF, values + np.uint8(size * _MAX_ADDED), values)
    return np.clip(values * np.float32(_factor(strength)), 0, 255).astype(np.uint8)


def _factor(strength: float) -> float:
    return max(_LEAST_FACTOR, 1 + _MAX_CHANGE * strength)


def _blended(clips_NTCHW: torch.Tensor, names: Sequence[str], factors: Sequence[float]) -> torch.Tensor:
    """torchvision's adjust_saturation and adjust_contrast: mixed with the grey picture, or with its mean."""
    from torchvision.transforms.v2 import functional

    grey_NT1HW = functional.rgb_to_grayscale(clips_NTCHW, num_output_channels=1)
    mean_NT111 = grey_NT1HW.float().mean((2, 3, 4), keepdim=True)
    is_saturation_N = send(torch.tensor([name == "saturation" for name in names]), clips_NTCHW.device)
    other = torch.where(is_saturation_N.view(-1, 1, 1, 1, 1), grey_NT1HW, mean_NT111)
    factor, rest = _numbers(factors, clips_NTCHW.device), _numbers([1 - one for one in factors], clips_NTCHW.device)
    return _added(clips_NTCHW * factor, other, rest).clamp_(0, 255).to(torch.uint8)


def _added(values: torch.Tensor, others: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """`values + factors * others` with a single rounding, as `add` has it for one factor."""
    return torch.addcmul(values.double(), others.double(), factors.double()).float()


def _numbers(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """A float32 number for each clip, [N, 1, 1, 1, 1]."""
    return send(torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1, 1), device)


def _sharpened(clips_NTCHW: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """torchvision's adjust_sharpness, without its kernel tensor, for whose upload the host would wait for the GPU."""
    pixels = clips_NTCHW.float()
    inner = pixels[..., 1:-1, 1:-1]
    # Integers, exact on any device: the pixel five times, each of its neighbours once.
    rows = pixels[..., :-2, :] + pixels[..., 1:-1, :] + pixels[..., 2:, :]
    sums = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]).add_(inner, alpha=4)
    differences = sums.div_(13).round_().sub_(inner)
    inner.copy_(_added(inner, differences, _numbers([1 - factor for factor in factors], clips_NTCHW.device)))
    return pixels.clamp_(0, 255).to(torch.uint8)


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


def _moved(clips_NTCHW: torch.Tensor, origins: Sequence[_Map], *, fill: Triple) -> torch.Tensor:
    device, num_frames, size_px = clips_NTCHW.device, clips_NTCHW.shape[1], clips_NTCHW.shape[-1]
    x_W1, y_H11 = _pixel_centres(size_px, device)
    # Coefficients of x and y of the source, [3, N, 1, 1, 2]; sources are [N, H, W, 2].
    of_x, of_y, offset = send(
        torch.tensor(origins, dtype=torch.float32).permute(2, 0, 1)[:, :, None, None].contiguous(), device
    ).unbind(0)
    from_NHW2 = (of_x * x_W1 + of_y * y_H11).add_(offset)
    inside_NHW = ((from_NHW2 >= 0) & (from_NHW2 < size_px)).all(dim=-1)
    grid_NHW2 = from_NHW2.mul_(2).div_(size_px).sub_(1)
    moved_NTCHW = torch.nn.functional.grid_sample(
        clips_NTCHW.flatten(0, 1).float(),
        grid_NHW2[:, None].expand(-1, num_frames, -1, -1, -1).flatten(0, 1),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    ).view(clips_NTCHW.shape)
    fill_C11 = constant(tuple(value * 255 for value in fill), device, torch.float32)[:, None, None]
    return torch.where(inside_NHW[:, None, None], moved_NTCHW, fill_C11).round_().to(torch.uint8)


@cache
def _pixel_centres(size_px: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x of each column, [W, 1], and y of each row, [H, 1, 1]."""
    middles = torch.arange(size_px, device=device) + 0.5
    return middles[:, None], middles[:, None, None]
