"""Targets of prediction, compared with a loop over cubes, channels and values."""

import pytest
import torch

from clipmill.train.models.video_vit import CubeGrid, cubes_of, grid_of, pick_cubes
from clipmill.train.tasks.mae.task import normalised_cubes, reconstruction_loss

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def slowly(pixels_CTHW: torch.Tensor, number: int, *, t: int, p: int) -> torch.Tensor:
    """Return the target of one cube, [t * p * p * C], computed from pixels in a loop."""
    num_channels, _, height, width = pixels_CTHW.shape
    columns = width // p
    step, place = divmod(number, height // p * columns)
    row, column = divmod(place, columns)
    target = torch.zeros(t, p, p, num_channels, dtype=torch.float64)
    for channel in range(num_channels):
        values = [
            pixels_CTHW[channel, step * t + k, row * p + y, column * p + x].item()
            for k in range(t)
            for y in range(p)
            for x in range(p)
        ]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        for index, value in enumerate(values):
            k, rest = divmod(index, p * p)
            target[k, rest // p, rest % p, channel] = (value - mean) / (variance**0.5 + 1e-6)
    return target.flatten()


def test_targets_of_pixels_are_normalised_within_cube_and_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, 4, 8, 12, generator=generator, dtype=torch.float64)
    pixels[0, 1, :2, :4, :4] = 0.3  # the standard deviation is 0
    pixels[0, 2, :2, :4, :4] *= 1e-6  # the standard deviation is as small as the added 1e-6
    mean, std = (torch.tensor(three, dtype=torch.float64).view(3, 1, 1, 1) for three in (MEAN, STD))
    numbers = torch.tensor([[0, 5, 11], [2, 3, 7]])
    before = pixels.clone()
    cubes = normalised_cubes((pixels - mean) / std, numbers, cube_frames=2, patch_px=4, std=STD)
    expected = torch.stack(
        [
            torch.stack([slowly(clip, number, t=2, p=4) for number in row.tolist()])
            for clip, row in zip(pixels, numbers, strict=True)
        ]
    )
    torch.testing.assert_close(cubes, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(pixels, before)
    values = cubes.view(2, 3, 32, 3)
    assert (values[0, 0, :, 1].abs() < 1e-9).all() and 0.1 < values[0, 0, :, 2].std() < 0.9


def test_targets_of_latents_are_of_unit_variance() -> None:
    latents = 3 + 2 * torch.randn(2, 4, 20, 32, 32, generator=torch.Generator().manual_seed(0)).half()
    numbers = torch.arange(100, 200).expand(2, -1)
    cubes = normalised_cubes(latents, numbers, cube_frames=2, patch_px=2)
    assert (cubes.shape, cubes.dtype) == ((2, 100, 32), torch.float32)
    values = cubes.view(2, 100, 8, 4)
    torch.testing.assert_close(values.std(2), torch.ones(2, 100, 4), rtol=1e-3, atol=0)
    assert values.mean(2).abs().max() < 1e-5
    torch.testing.assert_close(cubes[0, 7].double(), slowly(latents[0].double(), 107, t=2, p=2), rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_mean_over_all_values() -> None:
    predicted, targets = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 8)
    loss = reconstruction_loss(predicted, targets)
    torch.testing.assert_close(loss, ((predicted.float() - targets) ** 2).sum() / 48)


def test_cubes_are_numbered_by_time_row_and_column() -> None:
    video = torch.arange(2 * 3 * 4 * 6 * 4).view(2, 3, 4, 6, 4)
    assert grid_of(video, cube_frames=2, patch_px=2) == CubeGrid(2, 3, 2)
    cubes = pick_cubes(cubes_of(video, cube_frames=2, patch_px=2), torch.tensor([[11, 0], [1, 6]]))
    assert torch.equal(cubes[0, 0], video[0, :, 2:, 4:, 2:]) and torch.equal(cubes[1, 1], video[1, :, 2:, :2, :2])
    assert torch.equal(cubes[0, 1], video[0, :, :2, :2, :2]) and torch.equal(cubes[1, 0], video[1, :, :2, :2, 2:])
    with pytest.raises(ValueError, match="4 x 6 x 4 cannot be cut into cubes of 3 x 2 x 2"):
        grid_of(video, cube_frames=3, patch_px=2)
