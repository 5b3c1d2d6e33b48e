from typing import Any

import pytest
import torch

from clipmill.train.models.video_vit import CubeGrid
from clipmill.train.models.videomae import predicted_cubes
from clipmill.train.tasks.mae.evaluation import (
    GREY,
    assemble_clips,
    cube_values,
    reconstruct,
    true_statistics,
    visible_statistics,
)
from clipmill.train.tasks.mae.task import normalised_cubes

CUBES: Any = {"cube_frames": 2, "patch_px": 4}
GRID = CubeGrid(2, 3, 4)  # for clips of 4 frames at 12 x 16
NUM_CUBES = 24


@pytest.fixture
def video() -> torch.Tensor:
    return torch.rand(2, 3, 4, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def masked_places() -> torch.Tensor:
    """Mask that hides seven of twelve places at both time steps, different places in each clip."""
    generator = torch.Generator().manual_seed(1)
    places = torch.stack([torch.randperm(12, generator=generator) for _ in range(2)]) < 7
    return places.repeat(1, 2)


def standardise(video: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Return the predictions of a perfect model, computed cube by cube from the formula."""
    rows = []
    for clip, hidden in zip(video, masked, strict=True):
        cubes = []
        for number in hidden.nonzero()[:, 0].tolist():
            step, row, column = number // 12, number % 12 // 4, number % 4
            cube = clip[:, 2 * step : 2 * step + 2, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            mean, std = cube.mean((1, 2, 3), keepdim=True), cube.std((1, 2, 3), keepdim=True)
            cubes.append(((cube - mean) / std).permute(1, 2, 3, 0).flatten())
        rows.append(torch.stack(cubes))
    return torch.stack(rows)


def test_true_predictions_with_true_statistics_give_the_picture_back(
    video: torch.Tensor, masked_places: torch.Tensor
) -> None:
    statistics = true_statistics(cube_values(video, **CUBES))
    pictures = reconstruct(video, standardise(video, masked_places), masked_places, **CUBES, statistics=statistics)
    torch.testing.assert_close(pictures.filled, video, rtol=0, atol=1e-12)


def test_true_targets_with_true_statistics_give_the_picture_back_where_it_is_flat_too(
    video: torch.Tensor, masked_places: torch.Tensor
) -> None:
    video[:, :, :2] = 0.25
    targets = normalised_cubes(video, predicted_cubes(masked_places), **CUBES)
    statistics = true_statistics(cube_values(video, **CUBES))
    pictures = reconstruct(video, targets, masked_places, **CUBES, statistics=statistics)
    torch.testing.assert_close(pictures.filled, video, rtol=0, atol=1e-5)  # targets are divided by std + 1e-6
    assert torch.equal(pictures.filled[:, :, :2], video[:, :, :2])


def test_visible_cubes_stay_as_they_are_and_hidden_ones_are_grey(
    video: torch.Tensor, masked_places: torch.Tensor
) -> None:
    predicted = torch.randn(2, 14, 96)
    pictures = reconstruct(video, predicted, masked_places, **CUBES)
    hidden = masked_places.view(2, 1, 2, 3, 4).repeat_interleave(2, 2).repeat_interleave(4, 3).repeat_interleave(4, 4)
    hidden = hidden.expand_as(video)
    assert torch.equal(pictures.original, video)
    assert torch.equal(pictures.filled[~hidden], video[~hidden]) and torch.equal(
        pictures.masked[~hidden], video[~hidden]
    )
    assert (pictures.masked[hidden] == GREY).all() and (pictures.filled[hidden] != video[hidden]).all()


def test_statistics_of_hidden_cubes_come_from_visible_ones_by_distance(
    video: torch.Tensor, masked_places: torch.Tensor
) -> None:
    values = cube_values(video, **CUBES)
    statistics, true = visible_statistics(values, masked_places, grid=GRID), true_statistics(values)
    places = [(number // 12, number % 12 // 4, number % 4) for number in range(NUM_CUBES)]
    for clip in range(2):
        visible = [number for number in range(NUM_CUBES) if not masked_places[clip, number]]
        for number in range(NUM_CUBES):
            if not masked_places[clip, number]:
                assert torch.equal(statistics.mean_BNC[clip, number], true.mean_BNC[clip, number])
                continue
            weights = [
                sum((a - b) ** 2 for a, b in zip(places[number], places[other], strict=True)) ** -2.0
                for other in visible
            ]
            for ours, theirs in ((statistics.mean_BNC, true.mean_BNC), (statistics.std_BNC, true.std_BNC)):
                expected = sum(w * theirs[clip, other] for w, other in zip(weights, visible, strict=True)) / sum(
                    weights
                )
                torch.testing.assert_close(ours[clip, number], expected, rtol=1e-5, atol=0)


def test_nothing_of_what_is_hidden_is_in_a_picture(video: torch.Tensor, masked_places: torch.Tensor) -> None:
    predicted = torch.randn(2, 14, 96)
    values = cube_values(video, **CUBES)
    values[masked_places] = torch.rand_like(values[masked_places])
    other = assemble_clips(values, GRID, **CUBES)
    first, second = (reconstruct(clip, predicted, masked_places, **CUBES) for clip in (video, other))
    assert torch.equal(first.filled, second.filled) and torch.equal(first.masked, second.masked)


def test_a_clip_of_which_nothing_is_visible_is_refused(video: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a clip has no visible cube"):
        visible_statistics(cube_values(video, **CUBES), torch.ones(2, NUM_CUBES, dtype=torch.bool), grid=GRID)
