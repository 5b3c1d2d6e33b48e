"""Reconstruct masked cubes of the clips of a split: the loss, and pictures of some clips.

A model predicts the values of each masked cube minus their mean and divided by their standard deviation, per channel
(clipmill.train.tasks.mae.objective). A picture needs that mean and deviation from elsewhere: here they are those of the
clip's visible cubes, averaged with weights 1 / d^4, where d is the distance between cubes in cubes along time, height
and width. Nothing of the masked cubes enters a picture. Published pictures often use the masked cubes' own statistics;
docs/mae.md discusses what that hides.

Shape suffixes: B clips, C channels, T frames, H and W pixels, N cubes of a clip, M masked cubes of a clip, R masked
cubes of all clips, V values of a cube in one channel, K all values of a cube (V * C, channels last), G displayed
frames.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.batch import to_device
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.models.masked_autoencoder import predicted_cubes
from clipmill.train.models.video_vit import CubeGrid, VideoViTSize, cubes_of, grid_of
from clipmill.train.tasks.mae.objective import MaskedClips

_AT_ONCE = 32  # clips: batches of training may be larger than one GPU can hold
_POWER = 4  # docs/mae.md compares it with others
GREY = 0.5
ToDisplay = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ReconstructedClip:
    """Frames of one clip, uint8 RGB [G, H, W, 3] each: original, masked, and with masked cubes filled in."""

    sample: int
    key: str
    loss: float
    original: NDArray[np.uint8]
    masked: NDArray[np.uint8]
    filled: NDArray[np.uint8]


@dataclass(frozen=True)
class ReconstructionResult:
    """Result of an evaluation.

    Attributes:
        loss: mean squared error of the normalised values of all masked cubes.
        flat_loss: the same for predicting the mean of each cube.
        clips: those to display.
    """

    loss: float
    flat_loss: float
    num_samples: int
    failed: tuple[FailedSample, ...]
    clips: tuple[ReconstructedClip, ...]


@dataclass(frozen=True)
class Pictures:
    """Which clips are displayed, and how.

    Attributes:
        samples: their indices.
        frames: indices of frames of a clip.
        to_display: from clips as the model takes them [B, C, T, H, W] to values from 0 to 1.
    """

    samples: Collection[int]
    frames: Sequence[int]
    to_display: ToDisplay


@torch.no_grad()
def evaluate_reconstruction(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    masked: MaskedClips,
    *,
    pictures: Pictures,
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> ReconstructionResult:
    """Evaluate a model in evaluation mode; the mask of a sample depends on its index and the seed alone.

    Raises:
        FailedWork: nothing could be decoded, or predictions are not finite.
    """
    losses: list[torch.Tensor] = []
    failed: list[FailedSample] = []
    clips: list[ReconstructedClip] = []
    masking = masked.masking
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        for begin in range(0, len(batch["position"]), _AT_ONCE):
            rows = slice(begin, begin + _AT_ONCE)
            clips_BCTHW, numbers_B = masked.inputs(batch, rows), batch["position"][rows]
            masked_BN = masking.draw(numbers_B, device=device, is_training=False).masked_BN
            num_masked = masking.counts.num_masked
            targets_BMV = masked.targets(clips_BCTHW, predicted_cubes(masked_BN, count=num_masked))
            with autocast():
                values_BMV = model(clips_BCTHW, masked_BN, num_masked=num_masked)
            values_BMV = values_BMV.to(targets_BMV.dtype)
            losses_B2 = torch.stack(
                [(values_BMV - targets_BMV).square().mean((1, 2)), targets_BMV.square().mean((1, 2))], dim=1
            ).double()
            losses.append(losses_B2.cpu())
            for row, number in enumerate(numbers_B.tolist()):
                if number in pictures.samples:
                    one = slice(row, row + 1)
                    shown = clips_BCTHW[one], values_BMV[one], masked_BN[one]
                    frames = _frames(*shown, size=masked.size, pictures=pictures)
                    key = batch["key"][begin + row]
                    clips.append(ReconstructedClip(number, key, losses_B2[row, 0].item(), *frames))
    if not losses:
        raise FailedWork(f"none of {count_noun(len(failed), 'clip')} could be decoded")
    loss, flat_loss = torch.cat(losses).mean(0).tolist()
    if not np.isfinite(loss):
        raise FailedWork("predictions are not finite: the weights have diverged")
    return ReconstructionResult(loss, flat_loss, sum(map(len, losses)), tuple(failed), tuple(clips))


def _frames(
    clip_1CTHW: torch.Tensor,
    values_1MV: torch.Tensor,
    masked_1N: torch.Tensor,
    *,
    size: VideoViTSize,
    pictures: Pictures,
) -> list[NDArray[np.uint8]]:
    """The displayed frames of one clip: original, masked, filled in."""
    # Predictions are normalised per cube and channel, so an affine `to_display` of the channels does not change them.
    found = reconstruct(
        pictures.to_display(clip_1CTHW), values_1MV, masked_1N, cube_frames=size.cube_frames, patch_px=size.patch_px
    )
    return [as_pictures(one[0][:, list(pictures.frames)]) for one in (found.original, found.masked, found.filled)]


def as_pictures(video_CGHW: torch.Tensor) -> NDArray[np.uint8]:
    """Values from 0 to 1 as uint8 RGB [G, H, W, 3]: the first three channels, repeated if there are fewer."""
    colours = video_CGHW[torch.arange(3) % len(video_CGHW)].permute(1, 2, 3, 0)
    found: NDArray[np.uint8] = (colours.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return found


@dataclass(frozen=True)
class Statistics:
    """Mean and unbiased standard deviation of each cube and channel, [B, N, C] each."""

    mean_BNC: torch.Tensor
    std_BNC: torch.Tensor


@dataclass(frozen=True)
class Reconstruction:
    """Clips: original, masked, and with masked cubes filled in; each [B, C, T, H, W]."""

    original: torch.Tensor
    masked: torch.Tensor
    filled: torch.Tensor


def values_of(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """Values of all cubes of clips, [B, N, V, C], in the order in which a model predicts them."""
    cubes = cubes_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    return cubes.permute(0, 1, 2, 3, 5, 6, 7, 4).flatten(4, 6).flatten(1, 3)


def clips_of(values_BNVC: torch.Tensor, grid: CubeGrid, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """The inverse of `values_of`: clips [B, C, T, H, W]."""
    places = (grid.steps, grid.rows, grid.columns)
    cubes = values_BNVC.unflatten(1, places).unflatten(4, (cube_frames, patch_px, patch_px))
    return cubes.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def true_statistics(values_BNVC: torch.Tensor) -> Statistics:
    """The statistics that targets are normalised by."""
    return Statistics(values_BNVC.mean(2), values_BNVC.std(2))


def visible_statistics(values_BNVC: torch.Tensor, masked_BN: torch.Tensor, *, grid: CubeGrid) -> Statistics:
    """Statistics of visible cubes; for masked ones, averages of the visible ones with weights 1 / distance^4.

    Raises:
        ValueError: a clip has no visible cube.
    """
    if masked_BN.all(dim=1).any():
        raise ValueError("a clip has no visible cube to take statistics from")
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
    """Fill in the masked cubes of clips; visible ones stay unchanged.

    Args:
        video_BCTHW: values as they are displayed, from 0 to 1.
        predicted_BMK: normalised values of the masked cubes, in the order of their indices, channels last.
        statistics: to undo the normalisation; `visible_statistics` by default.
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
