"""Evaluation of the reconstruction of masked cubes: the loss on the clips of a split, and images for the results page.

The model predicts the values of each masked cube, normalised per channel by their mean and standard deviation
(clipmill.train.tasks.mae.task). To show an image, these statistics must be estimated. The estimates are averages over
the clip's visible cubes with weights 1 / d^4, where d is the distance between two cubes, counted in cubes along time,
height and width. Therefore the images do not depend on the values of the masked cubes. Published images often use the
statistics of the masked cubes; docs/mae.md discusses the consequences.

Shape suffixes: B clips, C channels, T frames, H and W pixels, N cubes per clip, M masked cubes per clip, R masked
cubes of all clips, V values of a cube in one channel, K values of a cube in all channels (V * C, channels last), G
displayed frames.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.shards.pages.figures import evenly_spaced_items, jpeg_uri, middle_items, png_uri
from clipmill.train.data.batch import to_device
from clipmill.train.data.latents.segments import FALSE_COLOUR_STDS
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, evaluate, sample_stride
from clipmill.train.models.video_vit import CubeGrid, VideoViTSize, cubes_of, grid_of
from clipmill.train.models.videomae import predicted_cubes
from clipmill.train.run.folder import RunFolder
from clipmill.train.run.tracking import count_batches
from clipmill.train.tasks.mae.spec import RECONSTRUCTION, TASK, MaeSettings, ReconstructionFlags, num_masked_patches
from clipmill.train.tasks.mae.task import MaskedClips
from clipmill.train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD
from clipmill.train.weights.source import Say

_CLIPS_PER_PASS = 32  # number of clips per forward pass; a training batch may be too large for one GPU
_POWER = 4  # exponent of the distance; docs/mae.md compares it with other exponents
GREY = 0.5
ToDisplay = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ReconstructedClip:
    """Displayed frames of one clip: original, masked, and with the masked cubes filled in; uint8 RGB [G, H, W, 3] each.

    Attributes:
        sample: Index of the sample.
        key: Key of the chunk.
        loss: Mean squared error of the clip.
    """

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
        loss: Mean squared error of the normalised values of all masked cubes.
        flat_loss: Loss if each prediction is the mean of its cube.
        num_samples: Number of evaluated clips.
        failed: Samples that could not be decoded.
        clips: Clips to display.
    """

    loss: float
    flat_loss: float
    num_samples: int
    failed: tuple[FailedSample, ...]
    clips: tuple[ReconstructedClip, ...]


@dataclass(frozen=True)
class Display:
    """Selection of the clips and frames to display.

    Attributes:
        samples: Indices of the clips.
        frames: Indices of the displayed frames in a clip.
        to_display: Function that maps the model's input [B, C, T, H, W] to displayable values from 0 to 1.
    """

    samples: Collection[int]
    frames: Sequence[int]
    to_display: ToDisplay


@torch.no_grad()
def evaluate_reconstruction(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    masked_clips: MaskedClips,
    *,
    display: Display,
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> ReconstructionResult:
    """Evaluate a model in evaluation mode. The mask of a sample depends only on the seed and the index of the sample.

    Args:
        masked_clips: Functions that compute the model's inputs, masks and targets for a batch.
        display: Selection of the clips and frames to display.
        autocast: Function that returns the autocast context for the model's precision.

    Raises:
        FailedWork: No clip could be decoded, or predictions are not finite.
    """
    losses: list[torch.Tensor] = []
    failed: list[FailedSample] = []
    clips: list[ReconstructedClip] = []
    masking = masked_clips.masking
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        for start in range(0, len(batch["position"]), _CLIPS_PER_PASS):
            rows = slice(start, start + _CLIPS_PER_PASS)
            clips_BCTHW, sample_B = masked_clips.inputs(batch, rows), batch["position"][rows]
            masked_BN = masking.draw(sample_B, device=device, is_training=False).masked_BN
            num_masked = masking.counts.num_masked
            targets_BMV = masked_clips.targets(clips_BCTHW, predicted_cubes(masked_BN, count=num_masked))
            with autocast():
                values_BMV = model(clips_BCTHW, masked_BN, num_masked=num_masked)
            values_BMV = values_BMV.to(targets_BMV.dtype)
            losses_B2 = torch.stack(
                [(values_BMV - targets_BMV).square().mean((1, 2)), targets_BMV.square().mean((1, 2))], dim=1
            ).double()
            losses.append(losses_B2.cpu())
            for row, sample in enumerate(sample_B.tolist()):
                if sample in display.samples:
                    clip = slice(row, row + 1)
                    tensors = clips_BCTHW[clip], values_BMV[clip], masked_BN[clip]
                    frames = _render_frames(*tensors, size=masked_clips.size, display=display)
                    key = batch["key"][start + row]
                    clips.append(ReconstructedClip(sample, key, losses_B2[row, 0].item(), *frames))
    if not losses:
        raise FailedWork(f"no clip could be decoded ({len(failed):,} failed)")
    loss, flat_loss = torch.cat(losses).mean(0).tolist()
    if not np.isfinite(loss):
        raise FailedWork("predictions are not finite: the weights have diverged")
    return ReconstructionResult(loss, flat_loss, sum(map(len, losses)), tuple(failed), tuple(clips))


def _render_frames(
    clip_1CTHW: torch.Tensor,
    values_1MV: torch.Tensor,
    masked_1N: torch.Tensor,
    *,
    size: VideoViTSize,
    display: Display,
) -> list[NDArray[np.uint8]]:
    """Return the displayed frames of one clip: original, masked, and with the masked cubes filled in."""
    # `to_display` is an affine map per channel. The map does not affect predictions, because predictions are
    # normalised per cube and channel.
    clips = reconstruct(
        display.to_display(clip_1CTHW), values_1MV, masked_1N, cube_frames=size.cube_frames, patch_px=size.patch_px
    )
    frames = []
    for clip in (clips.original, clips.masked, clips.filled):
        video_CGHW = clip[0][:, list(display.frames)]
        # Show the first three channels as RGB, and repeat channels if there are fewer.
        rgb_GHW3 = video_CGHW[torch.arange(3) % len(video_CGHW)].permute(1, 2, 3, 0)
        frames.append((rgb_GHW3.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy())
    return frames


@dataclass(frozen=True)
class Statistics:
    """Mean and unbiased standard deviation of each cube and channel, [B, N, C] each."""

    mean_BNC: torch.Tensor
    std_BNC: torch.Tensor


@dataclass(frozen=True)
class Reconstruction:
    """Clips: original, masked, and with the masked cubes filled in; [B, C, T, H, W] each."""

    original: torch.Tensor
    masked: torch.Tensor
    filled: torch.Tensor


def cube_values(video_BCTHW: torch.Tensor, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """Split clips into cubes, and return their values, [B, N, V, C], in the order in which the model predicts them."""
    cubes = cubes_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    return cubes.permute(0, 1, 2, 3, 5, 6, 7, 4).flatten(4, 6).flatten(1, 3)


def assemble_clips(values_BNVC: torch.Tensor, grid: CubeGrid, *, cube_frames: int, patch_px: int) -> torch.Tensor:
    """Assemble clips [B, C, T, H, W] from the values of their cubes (the inverse of `cube_values`)."""
    shape = (grid.steps, grid.rows, grid.columns)
    cubes = values_BNVC.unflatten(1, shape).unflatten(4, (cube_frames, patch_px, patch_px))
    return cubes.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def true_statistics(values_BNVC: torch.Tensor) -> Statistics:
    """Return the statistics of the cubes' values, as used to normalise targets."""
    return Statistics(values_BNVC.mean(2), values_BNVC.std(2))


def visible_statistics(values_BNVC: torch.Tensor, masked_BN: torch.Tensor, *, grid: CubeGrid) -> Statistics:
    """Return the statistics of visible cubes, and estimates for masked cubes.

    An estimate is the average over the clip's visible cubes with weights 1 / distance^4.

    Raises:
        ValueError: A clip has no visible cube.
    """
    if masked_BN.all(dim=1).any():
        raise ValueError("a clip has no visible cube to compute statistics from")
    statistics = true_statistics(values_BNVC)
    mean_BNC, std_BNC = statistics.mean_BNC.clone(), statistics.std_BNC.clone()
    lengths = (grid.steps, grid.rows, grid.columns)
    position_N3 = torch.cartesian_prod(*(torch.arange(length, device=masked_BN.device) for length in lengths)).float()
    for clip, masked_N in enumerate(masked_BN):
        distance = torch.cdist(position_N3[masked_N], position_N3[~masked_N])
        weights = torch.nn.functional.normalize(distance**-_POWER, p=1.0, dim=1).to(mean_BNC.dtype)
        mean_BNC[clip, masked_N] = weights @ statistics.mean_BNC[clip, ~masked_N]
        std_BNC[clip, masked_N] = weights @ statistics.std_BNC[clip, ~masked_N]
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
    """Fill in the masked cubes of clips with predicted values. Visible cubes do not change.

    Args:
        video_BCTHW: Values to display, from 0 to 1.
        predicted_BMK: Normalised values of the masked cubes, in the order of their indices, channels last.
        masked_BN: True for masked cubes.
        statistics: Statistics for undoing the normalisation. Default: `visible_statistics`.
    """
    size = {"cube_frames": cube_frames, "patch_px": patch_px}
    grid, num_channels = grid_of(video_BCTHW, **size), video_BCTHW.shape[1]
    values_BNVC = cube_values(video_BCTHW, **size)
    statistics = statistics or visible_statistics(values_BNVC, masked_BN, grid=grid)
    mean_R1C, std_R1C = statistics.mean_BNC[masked_BN][:, None], statistics.std_BNC[masked_BN][:, None]
    predicted_RVC = predicted_BMK.flatten(0, 1).unflatten(1, (-1, num_channels)).to(values_BNVC.dtype)
    masked_BNVC = values_BNVC.masked_fill(masked_BN[..., None, None], GREY)
    filled_BNVC = values_BNVC.masked_scatter(masked_BN[..., None, None], predicted_RVC * std_R1C + mean_R1C)
    return Reconstruction(
        video_BCTHW, assemble_clips(masked_BNVC, grid, **size), assemble_clips(filled_BNVC, grid, **size)
    )


_NUM_CLIPS = 4
_MAX_FRAMES = 4
_SMALL_PX = 96  # smaller frames are enlarged without interpolation, and stored losslessly
_PROTOCOL = (
    "mean squared error of the normalised values of masked cubes (per cube and channel); baseline: the error of "
    "predicting the mean of each cube; explained: 1 - loss / baseline"
)
_PICTURE_RULES = {
    "pixels": "The model sees the cubes that are not grey. Its targets do not contain the mean and the standard "
    "deviation of a cube. For the pictures, both are estimated from visible cubes, weighted by distance. If a complete "
    "cube is too bright or too dark, this estimate is the cause. Patterns within a cube come from the model.",
    "latents": "False colours: the first three channels of the latents. The model sees the cubes that are not grey. "
    "Its targets do not contain the mean and the standard deviation of a cube's channels. For the pictures, both are "
    "estimated from visible cubes, weighted by distance. If a complete cube has the wrong colour, this estimate is "
    "the cause.",
}


def score_run(opened: OpenedRun, flags: ReconstructionFlags, *, split_remark: str = "") -> Score:
    """Reconstruct the masked cubes of a split's clips with the latest checkpoint of a run.

    Args:
        split_remark: Name of the split and the reason for its choice; "" if the user chose the split.

    Raises:
        UserError: The split has no clips.
        FailedWork: No clip could be decoded, or predictions are not finite.
    """
    opened.require_complete()
    settings, trained, task = opened.settings, opened.trained, opened.task
    samples = task.samples(flags.split, World())
    model = trained.fill(task.build_model(samples))
    stride = sample_stride(len(samples), at_most=flags.max_samples)
    clips: MaskedClips = task.masked_clips(samples)
    grid = clips.masking.grid
    num_masked = num_masked_patches(settings.mask_ratio, num_patches=grid.patches)
    result = evaluate_reconstruction(
        model,
        count_batches(samples.evaluation_batches(stride=stride), "reconstructing", total=-(-len(samples) // stride)),
        clips,
        display=Display(
            samples=frozenset(evenly_spaced_items(range(0, len(samples), stride), at_most=_NUM_CLIPS)),
            frames=middle_items(range(settings.num_frames), at_most=_MAX_FRAMES),
            to_display=_to_display(settings),
        ),
        autocast=trained.precision.autocast,
        device=trained.device,
    )
    return Score(
        name=f"reconstruction-{flags.split}",
        samples=samples,
        clip=describe_clip(settings, samples, is_consecutive=True),
        values={
            "split_chosen": split_remark,
            "mask": f"the same {num_masked:,} of {grid.patches:,} patches at all {grid.steps} time steps, "
            f"seed {settings.seed}",
            "share_hidden": clips.masking.counts.num_masked / grid.cubes,
            "protocol": _PROTOCOL,
            "num_samples": result.num_samples,
            "loss": result.loss,
            "flat_loss": result.flat_loss,
            "picture_rule": _PICTURE_RULES[settings.input],
            "has_few_pixels": any(clip.original.shape[2] < _SMALL_PX for clip in result.clips),
            "shown": _figures(result.clips, samples, num_frames=settings.num_frames),
        },
        failed=result.failed,
    )


def reconstruct_at_end(run: RunFolder, settings: MaeSettings, *, say: Say) -> None:
    """Reconstruct clips at the end of a run, from the training split if the evaluation split cannot be used.

    Errors are printed, but do not make the run fail.
    """
    for folder in settings.folders:
        # In a mixture, each folder has a separate result. A single folder needs no `shards`: it is the run's default.
        _reconstruct(run, settings, shards=folder if len(settings.folders) > 1 else None, say=say)


def _reconstruct(run: RunFolder, settings: MaeSettings, *, shards: str | None, say: Say) -> None:
    split, suffix = settings.evaluate.split, "" if shards is None else f" of {shards}"
    try:
        try:
            evaluate(TASK, RECONSTRUCTION, run, ReconstructionFlags(split=split), shards=shards)
        except UserError as error:
            remark = f"{settings.split} (the training split), because {split} cannot be used: {error}"
            say(f"reconstruction{suffix}: split {remark}")
            spec = replace(RECONSTRUCTION, score=partial(score_run, split_remark=remark))
            evaluate(TASK, spec, run, ReconstructionFlags(split=settings.split), shards=shards)
    except (UserError, FailedWork) as error:
        say(f"reconstruction{suffix}: no images: {error}")


def _to_display(settings: MaeSettings) -> ToDisplay:
    """Return a function that maps the model's input to values in [0, 1].

    The function undoes the normalisation of pixels, and scales latents to false colours.
    """
    if settings.reads_latents:
        return lambda latents: latents / (2 * FALSE_COLOUR_STDS) + 0.5
    mean_C111, std_C111 = (
        torch.tensor(values)[:, None, None, None]
        for values in (settings.init.pixel_mean or IMAGENET_MEAN, settings.init.pixel_std or IMAGENET_STD)
    )
    return lambda pixels: pixels * std_C111.to(pixels.device) + mean_C111.to(pixels.device)


def _figures(clips: Sequence[ReconstructedClip], samples: Samples[Any], *, num_frames: int) -> list[dict[str, Any]]:
    """Return the displayed clips as JSON-serialisable values, in the order of the split."""
    figures = []
    for clip in sorted(clips, key=lambda clip: clip.sample):
        begin_s, end_s = samples.shown_span_s(clip.sample, num_frames=num_frames)
        images = {
            name: [image_uri(frame) for frame in getattr(clip, name)] for name in ("original", "masked", "filled")
        }
        figures.append({"key": clip.key, "begin_s": begin_s, "end_s": end_s, "loss": clip.loss, **images})
    return figures


def image_uri(frame: NDArray[np.uint8]) -> str:
    """Return an image, uint8 RGB [H, W, 3], as a data URI: PNG if a side has fewer than 96 pixels, otherwise JPEG."""
    return png_uri(frame) if min(frame.shape[:2]) < _SMALL_PX else jpeg_uri(frame)
