"""Clips cut into cubes, and some cubes of each clip picked out, without a copy of all of them.

Shape suffixes: B batch, C channels, T frames, H and W pixels, S steps of time (T / t), h and w rows and columns of
cubes, t frames and p side of a cube, N cubes of a clip (S * h * w, in the order of their numbers), M picked ones.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CubeGrid:
    """How many cubes a clip has along time, height and width; they are numbered in that order."""

    steps: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        """Cubes of one step."""
        return self.rows * self.columns

    @property
    def cubes(self) -> int:
        """Cubes of a clip."""
        return self.steps * self.patches


def grid_of(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> CubeGrid:
    """The grid of clips.

    Raises:
        ValueError: they cannot be cut into such cubes.
    """
    num_frames, height, width = video_BCTHW.shape[2:]
    if num_frames % cube_frames or height % patch_px or width % patch_px:
        raise ValueError(
            f"{num_frames} x {height} x {width} cannot be cut into cubes of {cube_frames} x {patch_px} x {patch_px}"
        )
    return CubeGrid(num_frames // cube_frames, height // patch_px, width // patch_px)


def cubes_of(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """The cubes of clips, a view [B, S, h, w, C, t, p, p]."""
    grid = grid_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    b, c = video_BCTHW.shape[:2]
    cubes = video_BCTHW.reshape(b, c, grid.steps, cube_frames, grid.rows, patch_px, grid.columns, patch_px)
    return cubes.permute(0, 2, 4, 6, 1, 3, 5, 7)


def picked(cubes_BShw: torch.Tensor, numbers_BM: torch.Tensor) -> torch.Tensor:
    """Cubes by their numbers: [B, M, ...] of a view [B, S, h, w, ...]; only what is picked is copied.

    Args:
        numbers_BM: int64, from 0 to below N.
    """
    rows, columns = cubes_BShw.shape[2:4]
    batch_B1 = torch.arange(len(cubes_BShw), device=cubes_BShw.device)[:, None]
    step_BM, place_BM = numbers_BM // (rows * columns), numbers_BM % (rows * columns)
    return cubes_BShw[batch_B1, step_BM, place_BM // columns, place_BM % columns]
