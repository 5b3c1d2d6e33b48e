"""The augmentation pass on the device equals that of a CPU within one level of a byte, for the same draws."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from clipmill.train.augment.model_input import Draw, draw_parameters, to_model_input, to_rgb_uint8
from clipmill.train.config.clips import OPERATIONS, Augment
from tests.train.augment import reference
from tests.train.augment.planes import Bytes, mild_planes, random_planes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
NUM_FRAMES = 3
LEVEL = 1 / 255
# Between devices, of float32 arithmetic.
ROUNDING = 1e-5
CPU = torch.device("cpu")
STRENGTHS = (0.0, 0.37, 0.71, 1.0, -0.37, -0.71, -1.0)
# Kinds of change, each by itself, then everything that works on whole pictures.
AUGMENTS = {
    "nothing": Augment(),
    "flip": Augment(flip=0.5),
    "brightness": Augment(brightness=0.6),
    "contrast": Augment(contrast=0.6),
    "saturation": Augment(saturation=0.8),
    "hue": Augment(hue=0.5),
    "blur": Augment(blur=1.0),
    "erase": Augment(erase=1.0),
    "all": Augment(flip=0.5, brightness=0.6, contrast=0.6, saturation=0.8, hue=0.5, blur=0.5, erase=0.5),
}


@pytest.fixture(scope="module")
def size_px(is_dry_run: bool) -> int:
    return 32 if is_dry_run else 224


def model_input(planes: Bytes, kinds: Bytes, drawn: Draw | None, *, size_px: int, device: torch.device) -> torch.Tensor:
    video, colour = torch.from_numpy(planes).to(device), torch.from_numpy(kinds).to(device)
    outputs = to_model_input(video, colour, size_px=size_px, mean=MEAN, std=STD, draw=drawn)
    assert outputs.device.type == device.type
    return outputs.cpu()


def levels_off(pixels: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Differences of normalised clips [B, C, T, S, S], in levels of a byte."""
    std_C = torch.tensor(STD)[:, None, None, None]
    return (pixels - expected).abs() * std_C / LEVEL


@pytest.mark.parametrize("is_autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", AUGMENTS)
def test_a_change_is_that_of_a_cpu(name: str, is_autocast: bool, size_px: int, device: torch.device) -> None:
    planes, kinds = random_planes(12, NUM_FRAMES, size_px), np.tile(np.arange(6, dtype=np.uint8), 2)
    drawn = draw_parameters(np.arange(12), AUGMENTS[name], seed=1)
    expected = model_input(planes, kinds, drawn, size_px=size_px, device=CPU)
    # Where models compute in half precision, pictures do not.
    with torch.autocast(device.type, dtype=torch.bfloat16) if is_autocast else nullcontext():
        outputs = model_input(planes, kinds, drawn, size_px=size_px, device=device)
    off = levels_off(outputs, expected)
    assert outputs.dtype == torch.float32 and bool((off <= 1).all()), off.max()


@pytest.mark.parametrize("make", [random_planes, mild_planes])
def test_one_pass_equals_the_steps_one_by_one(
    make: Callable[[int, int, int], Bytes], size_px: int, device: torch.device
) -> None:
    """The steps are written down in the tests of the pass, for a CPU."""
    planes, kinds = make(6, 1, size_px), np.arange(6, dtype=np.uint8)
    drawn = draw_parameters(np.arange(6), replace(AUGMENTS["all"], erase=0.0), seed=1)
    outputs = model_input(planes, kinds, drawn, size_px=size_px, device=device)
    for number, kind in enumerate(kinds):
        expected = reference.augment_clip(planes[number], int(kind), drawn, number, size_px=size_px, mean=MEAN, std=STD)
        assert bool((levels_off(outputs[number], torch.as_tensor(np.asarray(expected))) <= 1).all()), number


@pytest.mark.parametrize("is_autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_rand_augment_is_that_of_a_cpu(
    name: str, is_autocast: bool, size_px: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Neighbours alike, as in pictures: of noise, every shift by a part of a pixel is a new picture.
    coarse = torch.rand(NUM_FRAMES, 3, 9, 9, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, (size_px, size_px), mode="bilinear")
    clip_TCHW = (255 * fine).round().to(torch.uint8)
    for strength in STRENGTHS:
        expected = reference.apply_operation(clip_TCHW, name, strength, fill=MEAN)
        with torch.autocast(device.type, dtype=torch.bfloat16) if is_autocast else nullcontext():
            outputs = reference.apply_operation(clip_TCHW.to(device), name, strength, fill=MEAN)
        off = (outputs.cpu().int() - expected.int()).abs()
        assert outputs.dtype == torch.uint8 and int(off.max()) <= 1, (strength, int(off.max()))


def test_chains_of_operations_are_those_of_a_cpu_but_for_single_values(size_px: int, device: torch.device) -> None:
    """A byte that rounds the other variant before the first operation may be enlarged by a later one."""
    planes, kinds = mild_planes(16, NUM_FRAMES, size_px), np.zeros(16, np.uint8)
    drawn = draw_parameters(np.arange(16), Augment(rand_ops=4), seed=1)
    assert (drawn.operation >= 0).any(axis=1).sum() > 8
    expected, outputs = (model_input(planes, kinds, drawn, size_px=size_px, device=place) for place in (CPU, device))
    share = (levels_off(outputs, expected) > 1 + ROUNDING / LEVEL).float().mean().item()
    assert share < 1e-3, share


def test_pictures_to_look_at_are_those_of_a_cpu(size_px: int, device: torch.device) -> None:
    video, colour = torch.from_numpy(random_planes(6, NUM_FRAMES, size_px)), torch.arange(6, dtype=torch.uint8)
    expected, outputs = (
        to_rgb_uint8(video.to(place), colour.to(place), size_px=size_px).cpu() for place in (CPU, device)
    )
    assert int((outputs.int() - expected.int()).abs().max()) <= 1
