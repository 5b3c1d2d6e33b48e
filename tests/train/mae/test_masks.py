"""Masks: which cubes are hidden and which are predicted, how many, and from which random numbers."""

import numpy as np
import pytest
import torch

from clipmill.train.device.random import draw_uniform as uniform_of_numpy
from clipmill.train.models.video_vit import CubeGrid
from clipmill.train.tasks.mae.task import decoded_cubes, mask_counts, running_cells, tube_masks

OF_224_PX = CubeGrid(8, 14, 14)
POSITIONS = torch.tensor([0, 1, 2, 10**9, 2**62])


@pytest.mark.parametrize(
    "grid, ratio, masked_patches",
    [(OF_224_PX, 0.9, 176), (OF_224_PX, 0.75, 147), (CubeGrid(8, 4, 4), 0.9, 14), (CubeGrid(10, 16, 16), 0.9, 230)],
)
def test_tubes_hide_as_many_patches_of_every_step_and_the_same_ones(
    grid: CubeGrid, ratio: float, masked_patches: int
) -> None:
    masked_BN = tube_masks(POSITIONS, grid, ratio=ratio, seed=0)
    assert (masked_BN.shape, masked_BN.dtype) == ((5, grid.cubes), torch.bool)
    masked_BSP = masked_BN.view(5, grid.steps, grid.patches)
    assert (masked_BSP.sum(2) == masked_patches).all()
    assert (masked_BSP == masked_BSP[:, :1]).all()
    counts = mask_counts(grid, mask_ratio=ratio, decoder_mask="none", decoder_mask_ratio=0.5)
    assert counts.num_masked == counts.num_predicted == grid.steps * masked_patches


def test_of_1568_cubes_1408_are_masked_and_160_visible() -> None:
    masked_BN = tube_masks(POSITIONS, OF_224_PX, ratio=0.9, seed=0)
    assert masked_BN.shape[1] == 1568 and masked_BN.sum(1).tolist() == [1408] * 5


def test_a_mask_is_of_seed_and_position_alone() -> None:
    together = tube_masks(POSITIONS, OF_224_PX, ratio=0.9, seed=7)
    for row in range(5):
        assert torch.equal(tube_masks(POSITIONS[[row]], OF_224_PX, ratio=0.9, seed=7)[0], together[row])
    assert len({tuple(row.tolist()) for row in together}) == 5
    assert not torch.equal(tube_masks(POSITIONS, OF_224_PX, ratio=0.9, seed=8), together)


def test_a_tube_hides_the_patches_with_the_lowest_numbers() -> None:
    drawn_BP = uniform_of_numpy(POSITIONS.numpy(), 196, seed=7, purpose="tube mask")
    expected_BP = drawn_BP <= np.sort(drawn_BP, axis=1)[:, 175:176]
    masked_BN = tube_masks(POSITIONS, OF_224_PX, ratio=0.9, seed=7)
    np.testing.assert_array_equal(masked_BN[:, :196].numpy(), expected_BP)


def test_all_patches_are_hidden_equally_often() -> None:
    masked_BN = tube_masks(torch.arange(4000), CubeGrid(1, 4, 4), ratio=0.75, seed=0)
    assert ((masked_BN.sum(0) - 3000).abs() < 5 * (4000 * 0.75 * 0.25) ** 0.5).all()


@pytest.mark.parametrize("kind", ["random", "running-cell"])
@pytest.mark.parametrize("grid", [OF_224_PX, CubeGrid(3, 7, 7), CubeGrid(10, 16, 16)])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_equally_many_masked_cubes_of_each_clip_are_decoded(kind: str, grid: CubeGrid, ratio: float) -> None:
    masked_BN = tube_masks(POSITIONS, grid, ratio=0.9, seed=0)
    decoded_BN = decoded_cubes(masked_BN, POSITIONS, grid, kind=kind, ratio=ratio, seed=0)  # type: ignore[arg-type]
    counts = mask_counts(grid, mask_ratio=0.9, decoder_mask=kind, decoder_mask_ratio=ratio)  # type: ignore[arg-type]
    assert decoded_BN.sum(1).tolist() == [counts.num_predicted] * 5
    assert counts.num_predicted == counts.num_masked - int(ratio * counts.num_masked)
    assert not (decoded_BN & ~masked_BN).any()
    alone = decoded_cubes(masked_BN[3:4], POSITIONS[3:4], grid, kind=kind, ratio=ratio, seed=0)  # type: ignore[arg-type]
    assert torch.equal(alone[0], decoded_BN[3])


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_in_whole_turns_a_running_cell_decodes_what_it_keeps(ratio: float) -> None:
    masked_BN = tube_masks(POSITIONS, OF_224_PX, ratio=0.9, seed=0)
    decoded_BN = decoded_cubes(masked_BN, POSITIONS, OF_224_PX, kind="running-cell", ratio=ratio, seed=0)
    by_start = torch.stack([running_cells(torch.tensor([start]), OF_224_PX, ratio=ratio)[0] for start in range(4)])
    equal_B4 = ((by_start & masked_BN[:, None]) == decoded_BN[:, None]).all(2)
    assert (equal_B4.sum(1) == 1).all()
    many = decoded_cubes(
        masked_BN[:1].expand(40, -1), torch.arange(40), OF_224_PX, kind="running-cell", ratio=0.5, seed=0
    )
    assert len({tuple(row.tolist()) for row in many}) == 4


def test_where_turns_are_not_whole_most_of_what_is_decoded_is_what_cells_keep() -> None:
    grid = CubeGrid(10, 16, 16)
    masked_BN = tube_masks(POSITIONS, grid, ratio=0.9, seed=0)
    decoded_BN = decoded_cubes(masked_BN, POSITIONS, grid, kind="running-cell", ratio=0.5, seed=0)
    kept_BN = torch.stack([running_cells(torch.tensor([start]), grid, ratio=0.5)[0] for start in range(4)])
    shared_B = (kept_BN[None] & decoded_BN[:, None]).sum(2).amax(1)
    assert (shared_B > 0.97 * decoded_BN.sum(1)).all()


def test_what_a_running_cell_keeps_moves_round_the_cell_with_time() -> None:
    kept = running_cells(torch.tensor([0, 1]), CubeGrid(5, 4, 2), ratio=0.5).view(2, 5, 4, 2).int()
    turn = [[[1, 1], [0, 0]], [[0, 1], [0, 1]], [[0, 0], [1, 1]], [[1, 0], [1, 0]], [[1, 1], [0, 0]]]
    assert kept[0, :, :2].tolist() == kept[0, :, 2:].tolist() == turn
    assert kept[1, :4, :2].tolist() == turn[1:]
    assert running_cells(torch.tensor([0]), CubeGrid(4, 2, 2), ratio=0.75).view(4, 4).sum(1).tolist() == [1] * 4
    assert running_cells(torch.tensor([0]), CubeGrid(4, 2, 2), ratio=0.25).view(4, 4).sum(0).tolist() == [3] * 4
