"""A masked autoencoder over clips of a split: how well it fills in what is hidden, and some clips to look at.

Shape suffixes: B clips at once, C channels, T frames, H and W pixels, N cubes of a clip, M hidden ones, V values of a
cube, G frames that are shown, S shown clips.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manifests.errors import FailedWork
from train.data.batch import Batch, to_device
from train.data.failures import FailedSample
from train.data.outcomes import LoadedBatch
from train.models.masked_autoencoder import predicted_cubes
from train.models.video_vit import VideoViTSize
from train.tasks.mae.masking import Masking
from train.tasks.mae.reconstruction import reconstruct
from train.tasks.mae.targets import normalised_cubes

_AT_ONCE = 32  # clips that a model takes: batches of training may be those of many GPUs
Look = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ShownClip:
    """Frames of one clip, uint8 RGB [G, H, W, 3] each: as they are, what of them is visible, and filled in."""

    sample: int
    key: str
    loss: float
    original: NDArray[np.uint8]
    masked: NDArray[np.uint8]
    filled: NDArray[np.uint8]


@dataclass(frozen=True)
class ReconstructionResult:
    """What an evaluation found.

    Attributes:
        loss: mean squared error of the normalised values of hidden cubes, over all of them.
        flat_loss: the same of a prediction that knows the mean of each cube and nothing else.
    """

    loss: float
    flat_loss: float
    num_samples: int
    failed: tuple[FailedSample, ...]
    shown: tuple[ShownClip, ...]


@dataclass(frozen=True)
class Pictures:
    """Which clips are shown, and how.

    Attributes:
        samples: their numbers.
        frames: of a clip, by number.
        look: from clips as the model takes them [B, C, T, H, W] to values that are shown from 0 to 1.
    """

    samples: Collection[int]
    frames: Sequence[int]
    look: Look


@torch.no_grad()
def evaluate_reconstruction(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch, slice], torch.Tensor],
    masking: Masking,
    size: VideoViTSize,
    std: Sequence[float] | None,
    pictures: Pictures,
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> ReconstructionResult:
    """Runs a model, which is in evaluation mode, over samples; a sample's mask is that of its number.

    Args:
        inputs: clips [B, C, T, H, W] of some rows of a batch, as in an evaluation.
        size, std: as for `normalised_cubes`.

    Raises:
        FailedWork: nothing could be decoded, or predictions are no numbers.
    """
    losses: list[torch.Tensor] = []
    failed: list[FailedSample] = []
    shown: list[ShownClip] = []
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        for begin in range(0, len(batch["position"]), _AT_ONCE):
            rows = slice(begin, begin + _AT_ONCE)
            clips_BCTHW, numbers_B = inputs(batch, rows), batch["position"][rows]
            masked_BN = masking.draw(numbers_B, device=device, is_training=False).masked_BN
            num_masked = masking.counts.num_masked
            targets_BMV = normalised_cubes(
                clips_BCTHW,
                predicted_cubes(masked_BN, count=num_masked),
                cube_frames=size.cube_frames,
                patch_px=size.patch_px,
                std=std,
            )
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
                    frames = _frames(clips_BCTHW[one], values_BMV[one], masked_BN[one], size=size, pictures=pictures)
                    key = batch["key"][begin + row]
                    shown.append(ShownClip(number, key, losses_B2[row, 0].item(), *frames))
    if not losses:
        raise FailedWork(f"none of the {len(failed)} clips could be decoded")
    loss, flat_loss = torch.cat(losses).mean(0).tolist()
    if not np.isfinite(loss):
        raise FailedWork("predictions are not finite: the weights have diverged")
    return ReconstructionResult(loss, flat_loss, sum(map(len, losses)), tuple(failed), tuple(shown))


def _frames(
    clip_1CTHW: torch.Tensor,
    values_1MV: torch.Tensor,
    masked_1N: torch.Tensor,
    *,
    size: VideoViTSize,
    pictures: Pictures,
) -> list[NDArray[np.uint8]]:
    """The shown frames of one clip: original, masked, filled in."""
    # To normalise a cube undoes what `look` does to its channels, so what is predicted suits both.
    found = reconstruct(
        pictures.look(clip_1CTHW), values_1MV, masked_1N, cube_frames=size.cube_frames, patch_px=size.patch_px
    )
    return [as_pictures(one[0][:, list(pictures.frames)]) for one in (found.original, found.masked, found.filled)]


def as_pictures(video_CGHW: torch.Tensor) -> NDArray[np.uint8]:
    """Values from 0 to 1 as uint8 RGB [G, H, W, 3]: the first three channels, over again where there are fewer."""
    colours = video_CGHW[torch.arange(3) % len(video_CGHW)].permute(1, 2, 3, 0)
    found: NDArray[np.uint8] = (colours.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return found
