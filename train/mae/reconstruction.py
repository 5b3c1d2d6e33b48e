"""From predictions of hidden cubes back to pictures.

A model predicts the values of each hidden cube less their mean and divided by their deviation, channel by channel
(train.mae.targets). Mean and deviation of a hidden cube are in nothing that the model sees or says, so a picture needs
them from elsewhere. Here they are those of the clip's visible cubes, averaged with weights 1 / d^4 of the distance d
between cubes, in cubes along time, height and width: what is visible nearby decides. Nothing of what is hidden enters.

Published pictures often borrow the hidden cubes' own mean and deviation; docs/mae.md says what that hides.

Shape suffixes: B batch, C channels, T frames, H and W pixels, N cubes of a clip, V values of a cube in one channel,
M hidden cubes, K all values of a cube (V * C, channels last).
"""

from dataclasses import dataclass

import torch

GREY = 0.5
STD_EPS = 1e-6
_POWER = 4  # docs/mae.md has the errors of others


@dataclass(frozen=True, kw_only=True)
class Cubes:
    """How clips are cut: `frames` x `side` x `side` values to a cube."""

    frames: int
    side: int

    def grid(self, video: torch.Tensor) -> tuple[int, int, int]:
        """Cubes of a clip [..., T, H, W] along time, height and width."""
        num_frames, height, width = video.shape[-3:]
        return num_frames // self.frames, height // self.side, width // self.side

    def cut(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """The values of each cube, [B, N, V, C]: cubes in the order (time, height, width), and so their values."""
        num_clips, num_channels = video_BCTHW.shape[:2]
        steps, rows, columns = self.grid(video_BCTHW)
        parts = video_BCTHW.reshape(
            num_clips, num_channels, steps, self.frames, rows, self.side, columns, self.side
        ).permute(0, 2, 4, 6, 3, 5, 7, 1)
        return parts.reshape(num_clips, steps * rows * columns, -1, num_channels)

    def joined(self, values_BNVC: torch.Tensor, *, grid: tuple[int, int, int]) -> torch.Tensor:
        """Clips [B, C, T, H, W] of their cubes: what `cut` takes apart."""
        (steps, rows, columns), num_channels = grid, values_BNVC.shape[3]
        parts = values_BNVC.reshape(
            len(values_BNVC), steps, rows, columns, self.frames, self.side, self.side, num_channels
        ).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return parts.reshape(len(values_BNVC), num_channels, steps * self.frames, rows * self.side, columns * self.side)


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


def true_statistics(values_BNVC: torch.Tensor) -> Statistics:
    """Those that targets are made with."""
    return Statistics(values_BNVC.mean(2), values_BNVC.std(2))


def visible_statistics(values_BNVC: torch.Tensor, masked_BN: torch.Tensor, *, grid: tuple[int, int, int]) -> Statistics:
    """Those of visible cubes, and for hidden ones the averages of the visible ones' with weights 1 / distance^4.

    Raises:
        ValueError: nothing of a clip is visible.
    """
    if masked_BN.all(dim=1).any():
        raise ValueError("no cube of a clip is visible: there is nothing to take statistics from")
    true = true_statistics(values_BNVC)
    mean_BNC, std_BNC = true.mean_BNC.clone(), true.std_BNC.clone()
    places_N3 = torch.cartesian_prod(*(torch.arange(length, device=masked_BN.device) for length in grid)).float()
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
    cubes: Cubes,
    statistics: Statistics | None = None,
) -> Reconstruction:
    """Clips with their hidden cubes filled in; visible ones stay as they are.

    Args:
        video_BCTHW: values as they are shown: a hidden cube is GREY in `masked`.
        predicted_BMK: standardised values of the hidden cubes, in ascending order, channels last.
        statistics: to undo the standardisation with; `visible_statistics` when left out.
    """
    grid, num_channels = cubes.grid(video_BCTHW), video_BCTHW.shape[1]
    values_BNVC = cubes.cut(video_BCTHW)
    statistics = statistics or visible_statistics(values_BNVC, masked_BN, grid=grid)
    mean_M1C, std_M1C = statistics.mean_BNC[masked_BN][:, None], statistics.std_BNC[masked_BN][:, None]
    predicted_MVC = predicted_BMK.flatten(0, 1).unflatten(1, (-1, num_channels)).to(values_BNVC.dtype)
    filled_BNVC, masked_BNVC = values_BNVC.clone(), values_BNVC.clone()
    filled_BNVC[masked_BN] = predicted_MVC * (std_M1C + STD_EPS) + mean_M1C
    masked_BNVC[masked_BN] = GREY
    return Reconstruction(video_BCTHW, cubes.joined(masked_BNVC, grid=grid), cubes.joined(filled_BNVC, grid=grid))
