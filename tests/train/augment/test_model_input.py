from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional as torchvision_functional  # type: ignore[import-untyped]

from clipmill.train.augment.model_input import Draw, colour_map, draw_parameters, to_model_input
from clipmill.train.config.clips import Augment
from tests.train.augment import reference
from tests.train.augment.planes import Bytes, mild_planes, random_planes

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
ZERO, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
SIZE_PX, NUM_FRAMES = 32, 3
KINDS = np.arange(6, dtype=np.uint8)
STRONG = Augment(flip=0.5, brightness=0.6, contrast=0.6, saturation=0.8, hue=0.5, blur=0.5)
TOLERANCE = 1 / 255


def nothing(num_clips: int) -> Draw:
    return draw_parameters(np.arange(num_clips), Augment(), seed=0)


def with_one(name: str, value: float) -> Draw:
    unchanged = nothing(1)
    return replace(unchanged, **{name: np.array([value], dtype=getattr(unchanged, name).dtype)})


def some(drawn: Draw, chosen: NDArray[np.int64]) -> Draw:
    return Draw(**{field.name: getattr(drawn, field.name)[chosen] for field in fields(Draw)})


def run(
    planes: Bytes,
    kinds: Bytes,
    drawn: Draw | None = None,
    *,
    mean: tuple[float, float, float] = ZERO,
    std: tuple[float, float, float] = ONE,
) -> NDArray[np.float32]:
    video, colour = torch.from_numpy(planes), torch.from_numpy(kinds)
    size_px = round((planes.shape[-1] / 1.5) ** 0.5)
    return to_model_input(video, colour, size_px=size_px, mean=mean, std=std, draw=drawn).numpy()


@pytest.mark.parametrize("make", [random_planes, mild_planes])
def test_one_pass_equals_the_steps_one_by_one(make: Callable[[int, int, int], Bytes]) -> None:
    planes = make(12, NUM_FRAMES, SIZE_PX)
    kinds = np.tile(KINDS, 2)
    drawn = draw_parameters(np.arange(12), STRONG, seed=1)
    assert 0 < drawn.flip.sum() < 12 and 0 < (drawn.blur_sigma_px > 0).sum() < 12
    output_clips = run(planes, kinds, drawn, mean=MEAN, std=STD)
    plain = run(planes, kinds, mean=MEAN, std=STD)
    for number, kind in enumerate(kinds):
        expected = reference.augment_clip(planes[number], kind, drawn, number, size_px=SIZE_PX, mean=MEAN, std=STD)
        assert np.abs(output_clips[number] - expected).max() < TOLERANCE / max(STD), number
        unchanged = reference.model_input(planes[number], kind, size_px=SIZE_PX, mean=MEAN, std=STD)
        assert np.abs(plain[number] - unchanged).max() < TOLERANCE / max(STD), number


def test_a_clip_does_not_depend_on_its_neighbours() -> None:
    planes = random_planes(6, NUM_FRAMES, SIZE_PX)
    drawn = draw_parameters(np.arange(6), STRONG, seed=2)
    together = run(planes, KINDS, drawn)
    for number in range(6):
        chosen = np.array([number])
        np.testing.assert_array_equal(run(planes[chosen], KINDS[chosen], some(drawn, chosen))[0], together[number])


def test_a_flip_is_an_exact_mirror() -> None:
    planes = random_planes(6, NUM_FRAMES, SIZE_PX)
    flip = np.array([True, False] * 3)
    plain = run(planes, KINDS)
    flipped = run(planes, KINDS, replace(nothing(6), flip=flip))
    np.testing.assert_array_equal(flipped[flip], plain[flip][..., ::-1])
    np.testing.assert_array_equal(flipped[~flip], plain[~flip])


def test_drawing_nothing_changes_nothing() -> None:
    planes = random_planes(6, NUM_FRAMES, SIZE_PX)
    np.testing.assert_allclose(run(planes, KINDS, nothing(6)), run(planes, KINDS), atol=1e-6)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.2])
def test_jitter_means_what_torchvision_means(name: str, factor: float) -> None:
    planes, kinds = mild_planes(1, NUM_FRAMES, SIZE_PX), KINDS[:1]
    plain, converted = (run(planes, kinds, drawn)[0] for drawn in (None, with_one(name, factor)))
    # The frames are stacked vertically, so the mean grey equals the mean grey of the clip.
    tall = torch.from_numpy(plain).reshape(3, NUM_FRAMES * SIZE_PX, SIZE_PX)
    expected = getattr(torchvision_functional, f"adjust_{name}")(tall, factor).reshape(plain.shape).numpy()
    assert expected.min() > 0 and expected.max() < 1
    assert np.abs(converted - expected).max() < TOLERANCE
    assert factor == 1 or np.abs(converted - plain).max() > 4 * TOLERANCE


def test_blur_means_what_torchvision_means() -> None:
    planes, kinds = random_planes(1, NUM_FRAMES, SIZE_PX), KINDS[:1]
    plain = torch.from_numpy(run(planes, kinds)[0])
    for sigma_px in (0.1, 0.8, 2.0):
        expected = torchvision_functional.gaussian_blur(plain, [13, 13], [sigma_px, sigma_px]).numpy()
        blurred = run(planes, kinds, with_one("blur_sigma_px", sigma_px))[0]
        assert np.abs(blurred - expected).max() < 1e-5


def test_hue_keeps_grey_and_turns_as_torchvision_does() -> None:
    drawn = [with_one("hue", value) for value in (0.0, 0.25, 0.5, 1.0)]
    matrices = [colour_map(kind_draw, mean=ZERO, std=ONE)[0, :, :3] for kind_draw in drawn]
    for matrix in matrices:
        np.testing.assert_allclose(np.array(reference.WEIGHTS) @ matrix, reference.WEIGHTS, atol=1e-5)
    np.testing.assert_allclose(matrices[1] @ matrices[1], matrices[2], atol=1e-5)
    np.testing.assert_allclose(matrices[3], np.eye(3), atol=1e-5)
    # A rotation by a third of a circle turns red to green in both libraries; here, it also keeps the grey value of red.
    third = colour_map(with_one("hue", 1 / 3), mean=ZERO, std=ONE)[0, :, :3] @ np.array([0.6, 0.4, 0.4])
    theirs = torchvision_functional.adjust_hue(torch.tensor([0.6, 0.4, 0.4]).reshape(3, 1, 1), 1 / 3)
    assert int(third.argmax()) == int(theirs.argmax()) == 1


def test_results_stay_between_black_and_white() -> None:
    planes = random_planes(6, NUM_FRAMES, SIZE_PX)
    converted = run(planes, KINDS, draw_parameters(np.arange(6), STRONG, seed=3), mean=MEAN, std=STD)
    for number in range(3):
        low, high = -MEAN[number] / STD[number], (1 - MEAN[number]) / STD[number]
        assert converted[:, number].min() >= low - 1e-6 and converted[:, number].max() <= high + 1e-6


def test_another_type_is_the_rounded_result() -> None:
    video, colour = torch.from_numpy(random_planes(6, NUM_FRAMES, SIZE_PX)), torch.from_numpy(KINDS)
    drawn = draw_parameters(np.arange(6), STRONG, seed=3)
    full, short = (
        to_model_input(video, colour, size_px=SIZE_PX, mean=MEAN, std=STD, draw=drawn, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert short.dtype == torch.bfloat16 and full.shape == (6, 3, NUM_FRAMES, SIZE_PX, SIZE_PX)
    assert torch.equal(short, full.bfloat16())


def test_pictures_of_another_size_are_refused() -> None:
    video, colour = torch.from_numpy(random_planes(1, 1, SIZE_PX)), torch.tensor([0], dtype=torch.uint8)
    with pytest.raises(ValueError, match="not 4:2:0 planes of 16 x 16"):
        to_model_input(video, colour, size_px=16, mean=MEAN, std=STD)
