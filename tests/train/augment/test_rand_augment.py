"""Operations of RandAugment, compared with PIL, and how they are drawn."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import functional  # type: ignore[import-untyped]

from clipmill.train.augment.model_input import draw_parameters, to_model_input, to_rgb_uint8
from clipmill.train.augment.rand_augment import rand_augment_clips
from clipmill.train.config.clips import OPERATIONS, Augment
from tests.train.augment.planes import random_planes
from tests.train.augment.reference import apply_operation

SIZE_PX = 32
FILL = (0.485, 0.456, 0.406)
FILL_BYTES = tuple(round(255 * value) for value in FILL)
VIDEOMAE = Augment(rand_ops=4, rand_magnitude=7, rand_std=0.5)
Pictures = NDArray[np.uint8]


def smooth_clip() -> Pictures:
    """Return a clip [T, S, S, 3] with frames of different brightness that are not completely smooth."""
    y, x = np.mgrid[:SIZE_PX, :SIZE_PX] / SIZE_PX
    grain = np.random.default_rng(0).integers(-9, 10, (SIZE_PX, SIZE_PX, 1))
    frames = [
        np.stack([90 + 70 * np.sin(5 * x + t), 100 + 60 * np.cos(4 * y + t), 60 + 20 * t + 80 * x * y], -1)
        for t in range(3)
    ]
    return (np.stack(frames).round() + grain).astype(np.uint8)


def change_clip(clip: Pictures, name: str, strength: float) -> Pictures:
    tensor = torch.from_numpy(clip).permute(0, 3, 1, 2)
    return apply_operation(tensor, name, strength, fill=FILL).permute(0, 2, 3, 1).numpy()


def by_pil(clip: Pictures, operation: Callable[[Image.Image], Image.Image]) -> Pictures:
    return np.stack([np.asarray(operation(Image.fromarray(picture))) for picture in clip])


def moved_by_pil(*coefficients: float) -> Callable[[Image.Image], Image.Image]:
    def move(picture: Image.Image) -> Image.Image:
        size = picture.size
        method, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
        return picture.transform(size, method, coefficients, resample=bilinear, fillcolor=FILL_BYTES)

    return move


def solarized_add(picture: Image.Image) -> Image.Image:
    return picture.point([min(255, value + 77) if value < 128 else value for value in range(256)] * 3)


COLOURS: dict[str, tuple[float, Callable[[Image.Image], Image.Image], int]] = {
    "autocontrast": (0.7, ImageOps.autocontrast, 1),
    "equalize": (0.7, ImageOps.equalize, 0),
    "invert": (0.7, ImageOps.invert, 0),
    "posterize": (0.7, lambda picture: ImageOps.posterize(picture, 2), 0),
    "solarize": (0.7, lambda picture: ImageOps.solarize(picture, 77), 0),
    "solarize_add": (0.7, solarized_add, 0),
    "saturation": (0.7, lambda picture: ImageEnhance.Color(picture).enhance(1.63), 2),
    "contrast": (-0.7, lambda picture: ImageEnhance.Contrast(picture).enhance(0.37), 1),
    "brightness": (0.7, lambda picture: ImageEnhance.Brightness(picture).enhance(1.63), 1),
    "sharpness": (-0.7, lambda picture: ImageEnhance.Sharpness(picture).enhance(0.37), 1),
}
MOVES: dict[str, tuple[float, Callable[[Image.Image], Image.Image]]] = {
    "rotate": (
        0.7,
        lambda picture: picture.rotate(21, resample=Image.Resampling.BILINEAR, fillcolor=FILL_BYTES),
    ),
    "shear_x": (0.7, moved_by_pil(1, 0.21, 0, 0, 1, 0)),
    "shear_y": (-0.7, moved_by_pil(1, 0, 0, -0.21, 1, 0)),
    "translate_x": (0.7, moved_by_pil(1, 0, 0.315 * SIZE_PX, 0, 1, 0)),
    "translate_y": (-0.7, moved_by_pil(1, 0, 0, 0, 1, -0.315 * SIZE_PX)),
}


def test_every_operation_is_compared() -> None:
    assert set(OPERATIONS) == COLOURS.keys() | MOVES.keys() and len(OPERATIONS) == 15


@pytest.mark.parametrize("name", COLOURS)
def test_a_change_of_colour_is_pils_on_every_frame(name: str) -> None:
    strength, operation, tolerance = COLOURS[name]
    clip = smooth_clip()
    changed_clip, expected = change_clip(clip, name, strength).astype(int), by_pil(clip, operation).astype(int)
    assert np.abs(changed_clip - expected).max() <= tolerance
    assert np.abs(changed_clip - clip.astype(int)).max() > 5


@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_pils_on_every_frame(name: str) -> None:
    strength, operation = MOVES[name]
    clip = smooth_clip()
    changed_clip, expected = change_clip(clip, name, strength).astype(int), by_pil(clip, operation).astype(int)
    # PIL truncates values that clipmill rounds, and may treat a pixel on the edge as outside.
    off = np.abs(changed_clip - expected).max(axis=-1)
    assert (off <= 1).mean() > 0.99 and np.abs(changed_clip - clip.astype(int)).mean() > 5
    outside = (expected == FILL_BYTES).all(axis=-1)
    assert outside.any() and (np.abs(changed_clip[outside] - FILL_BYTES).max(axis=-1) <= 1).mean() > 0.99


def test_weak_operations_change_little_and_strong_ones_much() -> None:
    clip = smooth_clip().astype(int)
    for name in OPERATIONS[3:]:
        off = [np.abs(change_clip(clip.astype(np.uint8), name, at) - clip).mean() for at in (0.0, 0.3, 1.0)]
        # At strength 0, posterize keeps four bits and solarize keeps all values.
        assert off[0] < (8 if name == "posterize" else 0.6), name
        assert off[0] <= off[1] < off[2], name


def test_operations_are_drawn_evenly_done_by_half_and_as_strong_as_asked_for() -> None:
    drawn = draw_parameters(np.arange(50_000), VIDEOMAE, seed=0)
    assert drawn.operation.shape == (50_000, 4)
    done = drawn.operation >= 0
    assert done.mean() == pytest.approx(0.5, abs=0.005)
    counts = np.bincount(drawn.operation[done], minlength=15) / done.sum()
    assert np.abs(counts - 1 / 15).max() < 0.003
    sizes = np.abs(drawn.strength) * 10
    assert sizes.mean() == pytest.approx(7, abs=0.01) and sizes.std() == pytest.approx(0.5, abs=0.01)
    within = np.abs(sizes - 7) < 0.5
    assert within.mean() == pytest.approx(math.erf(2**-0.5), abs=0.005)  # a normal distribution's
    assert (drawn.strength > 0).mean() == pytest.approx(0.5, abs=0.005)
    strongest = draw_parameters(np.arange(1000), Augment(rand_ops=1, rand_magnitude=10, rand_std=5), seed=0).strength
    assert np.abs(strongest).max() == 1.0


def test_a_clip_is_what_its_operations_make_of_its_bytes_whatever_its_batch() -> None:
    planes, colour = torch.from_numpy(random_planes(8, 2, SIZE_PX)), torch.zeros(8, dtype=torch.uint8)
    positions, std = np.arange(8), (0.229, 0.224, 0.225)

    def augment_rows(rows: list[int]) -> torch.Tensor:
        drawn = draw_parameters(positions[rows], VIDEOMAE, seed=1)
        return to_model_input(planes[rows], colour[rows], size_px=SIZE_PX, mean=FILL, std=std, draw=drawn)

    whole = augment_rows(list(range(8)))
    torch.testing.assert_close(augment_rows([5, 2]), whole[[5, 2]], rtol=0, atol=0)
    drawn = draw_parameters(positions, VIDEOMAE, seed=1)
    expected = to_rgb_uint8(planes, colour, size_px=SIZE_PX).permute(0, 1, 4, 2, 3)
    for number, clip in enumerate(expected):
        for operation, strength in zip(drawn.operation[number], drawn.strength[number], strict=True):
            if operation >= 0:
                clip = apply_operation(clip, OPERATIONS[operation], strength, fill=FILL)
        back = whole[number] * torch.tensor(std)[:, None, None, None] + torch.tensor(FILL)[:, None, None, None]
        # Without an operation, the clip keeps its fractional values.
        tolerance = 1e-3 if (drawn.operation[number] >= 0).any() else 0.501
        assert (back.transpose(0, 1) * 255 - clip.float()).abs().max() < tolerance


@pytest.mark.parametrize(("batch", "most"), [(8, 12), (16, 8), (64, 4)])
def test_a_clip_of_a_batch_takes_few_operators(batch: int, most: int) -> None:
    """On a GPU, launching an operator takes longer than running it on a clip."""
    count = 0

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            count += not func.is_view  # a view launches no kernel
            return func(*args, **(kwargs or {}))

    video = torch.zeros(batch, 3, 2, 16, 16)
    with Operators():
        for seed in range(8):
            drawn = draw_parameters(np.arange(batch), VIDEOMAE, seed=seed)
            rand_augment_clips(video, drawn.operation, drawn.strength, mean=FILL, std=FILL)
    assert count / 8 <= most * batch


@pytest.mark.parametrize("settings", [VIDEOMAE, Augment(rand_ops=6, rand_magnitude=10)])
def test_clips_of_a_batch_are_those_of_torchvision_one_by_one(settings: Augment) -> None:
    video, std = (
        torch.randn(24, 3, 2, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(0)),
        (0.229, 0.224, 0.225),
    )
    video[3], video[4] = 0.3, (2 * video[4]).round() / 2  # a clip with one value, and a clip with few values
    drawn, changed = draw_parameters(np.arange(24), settings, seed=3), video.clone()
    rand_augment_clips(changed, drawn.operation, drawn.strength, mean=FILL, std=std)
    mean_C11, std_C11 = (torch.tensor(values)[:, None, None] for values in (FILL, std))
    for number in np.flatnonzero((drawn.operation >= 0).any(axis=1)):
        clip_TCHW = (video[number].transpose(0, 1) * std_C11 + mean_C11).mul(255).round().clamp(0, 255).to(torch.uint8)
        for operation, strength in zip(drawn.operation[number], drawn.strength[number], strict=True):
            if operation >= 0:
                clip_TCHW = by_torchvision(clip_TCHW, OPERATIONS[operation], float(strength))
        expected = ((clip_TCHW.float() / 255 - mean_C11) / std_C11).transpose(0, 1)
        torch.testing.assert_close(changed[number], expected, rtol=0, atol=1e-6)


def by_torchvision(clip_TCHW: torch.Tensor, name: str, strength: float) -> torch.Tensor:
    """Apply an operation to a single clip; moves use an explicit grid."""
    size, factor, side = abs(strength), max(0.1, 1 + 0.9 * strength), clip_TCHW.shape[-1]
    if name in COLOURS:
        colours: dict[str, Callable[[], torch.Tensor]] = {
            "posterize": lambda: functional.posterize(clip_TCHW, 4 - int(4 * size)),
            # torchvision rejects a threshold above the largest value.
            "solarize": lambda: functional.solarize(clip_TCHW, 256 - int(256 * size)) if size >= 1 / 256 else clip_TCHW,
            "solarize_add": lambda: torch.where(clip_TCHW < 128, clip_TCHW + int(110 * size), clip_TCHW),
        }
        if name in colours:
            return colours[name]()
        if name in ("autocontrast", "equalize", "invert"):
            return getattr(functional, name)(clip_TCHW)  # type: ignore[no-any-return]
        return getattr(functional, f"adjust_{name}")(clip_TCHW, factor)  # type: ignore[no-any-return]
    cos, sin, middle = math.cos(math.radians(30 * strength)), math.sin(math.radians(30 * strength)), side / 2
    of_x, of_y = {
        "rotate": ((cos, -sin, middle - (cos - sin) * middle), (sin, cos, middle - (sin + cos) * middle)),
        "shear_x": ((1, 0.3 * strength, 0), (0, 1, 0)),
        "shear_y": ((1, 0, 0), (0.3 * strength, 1, 0)),
        "translate_x": ((1, 0, 0.45 * strength * side), (0, 1, 0)),
        "translate_y": ((1, 0, 0), (0, 1, 0.45 * strength * side)),
    }[name]
    y_HW, x_HW = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    from_HW2 = torch.stack([a * x_HW + b * y_HW + c for a, b, c in (of_x, of_y)], dim=-1)
    grid_THW2 = (2 * from_HW2 / side - 1).expand(len(clip_TCHW), -1, -1, -1)
    moved = torch.nn.functional.grid_sample(
        clip_TCHW.float(), grid_THW2, mode="bilinear", padding_mode="border", align_corners=False
    )
    is_inside_HW = ((from_HW2 >= 0) & (from_HW2 < side)).all(dim=-1)
    return torch.where(is_inside_HW, moved, torch.tensor(FILL)[:, None, None] * 255).round().to(torch.uint8)


def test_clips_that_are_changed_together_are_changed_as_each_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    video = torch.randn(24, 3, 2, 16, 16, generator=generator)
    drawn = draw_parameters(np.arange(24), Augment(rand_ops=4), seed=5)
    together = video.clone()
    rand_augment_clips(together, drawn.operation, drawn.strength, mean=FILL, std=FILL)
    for number in range(24):
        row_clip = video[number : number + 1].clone()
        row = slice(number, number + 1)
        rand_augment_clips(row_clip, drawn.operation[row], drawn.strength[row], mean=FILL, std=FILL)
        assert torch.equal(row_clip[0], together[number]), number
