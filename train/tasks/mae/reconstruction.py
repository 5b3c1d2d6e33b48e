"""From predictions of hidden cubes back to pictures.

A model predicts the values of each hidden cube less their mean and divided by their deviation, channel by channel
(train.tasks.mae.targets). Mean and deviation of a hidden cube are in nothing that the model sees or says, so a picture needs
them from elsewhere. Here they are those of the clip's visible cubes, averaged with weights 1 / d^4 of the distance d
between cubes, in cubes along time, height and width: what is visible nearby decides. Nothing of what is hidden enters.

Published pictures often borrow the hidden cubes' own mean and deviation; docs/mae.md says what that hides.

Shape suffixes: B batch, C channels, T frames, H and W pixels, N cubes of a clip, V values of a cube in one channel,
M hidden cubes of a clip, R those of all clips, K all values of a cube (V * C, channels last).
"""

from dataclasses import dataclass

import torch

from train.models.cubes import CubeGrid, cubes_of, grid_of

GREY = 0.5
_POWER = 4  # docs/mae.md has the errors of others


@dataclass(frozen=True)
class Statistics:
    """Mean and unbiased deviation of each cube's channels, [B, N, C] each."""

    mean_BNC: torch.Tensor
    std_BNC: torch.Tensor


@dataclass(frozen=True)
class Reconstruction:
    """A clip as it is, as the model sees it and as the model fills it in; each [B, C, T, H, W]."""

    original: torch.Tensor
    masked: torch.Tensor
    filled: torch.Tensor


def values_of(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """The values of all cubes of clips, [B, N, V, C], in the order in which a model predicts them."""
    cubes = cubes_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    return cubes.permute(0, 1, 2, 3, 5, 6, 7, 4).flatten(4, 6).flatten(1, 3)


def clips_of(values_BNVC: torch.Tensor, grid: CubeGrid, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """Clips [B, C, T, H, W] of the values of all their cubes."""
    places = (grid.steps, grid.rows, grid.columns)
    cubes = values_BNVC.unflatten(1, places).unflatten(4, (cube_frames, patch_px, patch_px))
    return cubes.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def true_statistics(values_BNVC: torch.Tensor) -> Statistics:
    """Those that targets are made with."""
    return Statistics(values_BNVC.mean(2), values_BNVC.std(2))


def visible_statistics(values_BNVC: torch.Tensor, masked_BN: torch.Tensor, *, grid: CubeGrid) -> Statistics:
    """Those of visible cubes, and for hidden ones the averages of the visible ones' with weights 1 / distance^4.

    Raises:
        ValueError: nothing of a clip is visible.
    """
    if masked_BN.all(dim=1).any():
        raise ValueError("no cube of a clip is visible: there is nothing to take statistics from")
    true = true_statistics(values_BNVC)
    mean_BNC, std_BNC = true.mean_BNC.clone(), true.std_BNC.clone()
    lengths = (grid.steps, grid.rows, grid.columns)
    places_N3 = torch.cartesian_prod(*(torch.arange(length, device=masked_BN.device) for length in lengths)).float()
    for clip, masked_N in enumerate(masked_BN):
        distance = torch.cdist(places_N3[masked_N], places_N3[~masked_N])
        weights = torch.nn.functional.normalize(distance**-_POWER, p=1.0, dim=1).to(mean_BNC.dtype)
        mean_BNC[clip, masked_N] = weights @ true.mean_BNC[clip, ~masked_N]
        std_BNC[clip, masked_N] = weights @ true.std_BNC[clip, ~masked_N]
    return Statistics(mean_BNC, std_BNC)


def reconstruct(
    video_BCTHW: torch.Tensor,
    predicted_BMK: torch.Tensor,
    masked_BN: torch.Tensor,
    *,
    cube_frames: int,
    patch_px: int,
    statistics: Statistics | None = None,
) -> Reconstruction:
    """Clips with their hidden cubes filled in; visible ones stay as they are.

    Args:
        video_BCTHW: values as they are shown, grey at GREY.
        predicted_BMK: normalised values of the hidden cubes, in the order of their numbers, channels last.
        statistics: to undo the normalisation with; `visible_statistics` when left out.
    """
    size = {"cube_frames": cube_frames, "patch_px": patch_px}
    grid, num_channels = grid_of(video_BCTHW, **size), video_BCTHW.shape[1]
    values_BNVC = values_of(video_BCTHW, **size)
    statistics = statistics or visible_statistics(values_BNVC, masked_BN, grid=grid)
    mean_R1C, std_R1C = statistics.mean_BNC[masked_BN][:, None], statistics.std_BNC[masked_BN][:, None]
    predicted_RVC = predicted_BMK.flatten(0, 1).unflatten(1, (-1, num_channels)).to(values_BNVC.dtype)
    masked_BNVC = values_BNVC.masked_fill(masked_BN[..., None, None], GREY)
    filled_BNVC = values_BNVC.masked_scatter(masked_BN[..., None, None], predicted_RVC * std_R1C + mean_R1C)
    return Reconstruction(video_BCTHW, clips_of(masked_BNVC, grid, **size), clips_of(filled_BNVC, grid, **size))
