"""Task `train mae`: samples, masks and objective of a masked autoencoder (VideoMAE, Tong et al. 2022).

The task trains on pixels or latents, without captions. A batch contains clips [B, C, T, H, W] and the positions of the
samples in the run. `tube_masks` draws the masked cubes, and `decoded_cubes` draws the predicted cubes among them. The
model embeds only the visible cubes, and returns the values [B, M, V] of the predicted cubes. `normalised_cubes`
computes the targets. The loss is the mean squared error.

Masks are drawn on the device. They depend only on the seed and the position of the sample, and not on ranks, resumption
or microbatches.

Shape suffixes: B clips on this rank, C channels, T frames, H and W pixels, F frames in a segment of latents, S time
steps, P patches per step, N cubes per clip (S * P, ordered by time, row and column), M predicted cubes per clip, t
frames and p pixels (height and width) of a cube, V values of a cube (t * p * p * C, in this order); R rows of a
microbatch, or R and C rows and columns of patches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional

from clipmill.manifests.divided_videos import find_split_videos
from clipmill.shards.columns import LATENTS, VIDEO
from clipmill.train.config.evaluation import EvaluatedData, ProbeEvaluation
from clipmill.train.config.shards import kind_of
from clipmill.train.data.batch import Batch
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import window_frames
from clipmill.train.data.query import LATENT_PATCH, DataQuery, loader_settings, open_samples, picture_size
from clipmill.train.device.random import device_uniform, draw_uniform
from clipmill.train.device.transfer import Scalar, constant_tensor, send
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.task import ClipTask
from clipmill.train.evaluation.probing import LoopProbe
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.models.video_vit import CubeGrid, VideoViTSize, cubes_of, pick_cubes
from clipmill.train.models.videomae import MaskedAutoencoder, predicted_cubes
from clipmill.train.tasks.mae.spec import DecoderMask, MaeSettings, check_mask, flags_without_effect, num_masked_patches
from clipmill.train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD
from clipmill.train.weights.loading import LoadedWeights, fit_to
from clipmill.train.weights.source import Say, Source, effective_clip_settings

# Indices of the patches in a 2 x 2 cell, counted around the cell. Patches with consecutive indices are neighbours.
_CELL = ((0, 1), (3, 2))
_CELL_PATCHES = 4


@dataclass(frozen=True, kw_only=True)
class MaskCounts:
    """Number of masked cubes per clip, and number of predicted cubes among them. Both are the same for all clips."""

    num_masked: int
    num_predicted: int


def mask_counts(
    grid: CubeGrid, *, mask_ratio: float, decoder_mask: DecoderMask, decoder_mask_ratio: float
) -> MaskCounts:
    """Return the numbers of cubes per clip that `tube_masks` and `decoded_cubes` draw."""
    num_masked = grid.steps * num_masked_patches(mask_ratio, num_patches=grid.patches)
    num_skipped = 0 if decoder_mask == "none" else int(decoder_mask_ratio * num_masked)
    return MaskCounts(num_masked=num_masked, num_predicted=num_masked - num_skipped)


def tube_masks(positions_B: torch.Tensor, grid: CubeGrid, *, ratio: float, seed: int) -> torch.Tensor:
    """Draw tube masks, bool [B, N], which mask the same int(ratio * P) patches at every step (VideoMAE, section 3).

    Args:
        positions_B: Positions of the samples in the run, int64, on the device that draws the masks.
    """
    draws_BP = device_uniform(positions_B, grid.patches, seed=seed, purpose="tube mask")
    masked_BP = _lowest_mask(draws_BP, num_masked_patches(ratio, num_patches=grid.patches))
    return masked_BP.repeat(1, grid.steps)


def decoded_cubes(
    masked_BN: torch.Tensor,
    positions_B: torch.Tensor,
    grid: CubeGrid,
    *,
    kind: Literal["random", "running-cell"],
    ratio: float,
    seed: int,
) -> torch.Tensor:
    """Draw the predicted cubes, bool [B, N]: exactly n - int(ratio * n) of the n masked cubes of each clip.

    VideoMAE V2 (section 3.2) draws decoder masks over all cubes, and computes the loss on the intersection of both
    masks. The size of this intersection differs between clips. In clipmill, the predicted cubes are drawn among the
    masked cubes, so their number is the same for all clips, and batches are dense.

    Args:
        kind: random: draw any masked cubes. running-cell: each cell of 2 x 2 patches keeps the fraction 1 - ratio of
            its patches. From step to step, the kept patches move by one around the cell (Qing et al. 2022, "MAR"), with
            a random start per clip. If the number of steps is a multiple of 4, every patch is kept equally often, so
            the number of kept cubes is exact for any tube mask. Otherwise, random cubes are dropped or added.
        ratio: Fraction of the masked cubes that are not predicted.
    """
    device = masked_BN.device
    priority_BN = device_uniform(positions_B, grid.cubes, seed=seed, purpose="decoder mask", device=device)
    if kind == "running-cell":
        starts_B1 = device_uniform(positions_B, 1, seed=seed, purpose="running cell", device=device) * _CELL_PATCHES
        priority_BN += ~running_cells(starts_B1[:, 0].long(), grid, ratio=ratio)
    num_masked_B1 = masked_BN.sum(1, keepdim=True)
    num_predicted_B1 = num_masked_B1 - (ratio * num_masked_B1.double()).long()
    return _lowest_mask(priority_BN.masked_fill(~masked_BN, torch.inf), num_predicted_B1)


def running_cells(starts_B: torch.Tensor, grid: CubeGrid, *, ratio: float) -> torch.Tensor:
    """Return a mask of the cubes that running cells keep, bool [B, N].

    Args:
        starts_B: First kept patch of each cell in the first step (0 to 3, counted around the cell), int64.
        ratio: Fraction of the cell's patches to drop at each step: 0.25, 0.5 or 0.75.
    """
    device = starts_B.device
    cell = constant_tensor(_CELL, device, torch.int64)
    row_R1, column_C = torch.arange(grid.rows, device=device)[:, None], torch.arange(grid.columns, device=device)
    index_P = cell[row_R1 % 2, column_C % 2].flatten()
    step_S1 = torch.arange(grid.steps, device=device)[:, None]
    distance_BSP = (index_P - step_S1 - starts_B[:, None, None]) % _CELL_PATCHES
    return (distance_BSP < round(_CELL_PATCHES * (1 - ratio))).flatten(1)


def _lowest_mask(values_BN: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """Return a mask of the lowest values in each row, bool [B, N].

    Args:
        count: Number of lowest values: one int for all rows, or int64 [B, 1] with a number per row.
    """
    ranks_BN = values_BN.argsort(dim=1).argsort(dim=1)
    return ranks_BN < count


@dataclass(frozen=True)
class Masks:
    """Masks of a batch.

    Attributes:
        masked_BN: True for masked cubes, bool.
        decoded_BN: True for predicted cubes, bool; None if all masked cubes are predicted.
    """

    masked_BN: torch.Tensor
    decoded_BN: torch.Tensor | None


@dataclass(frozen=True)
class Masking:
    """Generator of the masks of a run, for clips with a given grid of cubes."""

    settings: MaeSettings
    grid: CubeGrid

    @cached_property
    def counts(self) -> MaskCounts:
        """Numbers of masked and predicted cubes per clip."""
        settings = self.settings
        return mask_counts(
            self.grid,
            mask_ratio=settings.mask_ratio,
            decoder_mask=settings.decoder_mask,
            decoder_mask_ratio=settings.decoder_mask_ratio,
        )

    def draw(self, positions_B: torch.Tensor, *, device: torch.device, is_training: bool = True) -> Masks:
        """Draw masks for the samples at the given positions, int64 [B]. Evaluations predict all masked cubes."""
        settings, grid, positions_B = self.settings, self.grid, send(positions_B, device)
        masked_BN = tube_masks(positions_B, grid, ratio=settings.mask_ratio, seed=settings.seed)
        if settings.decoder_mask == "none" or not is_training:
            return Masks(masked_BN, None)
        decoded_BN = decoded_cubes(
            masked_BN,
            positions_B,
            grid,
            kind=settings.decoder_mask,
            ratio=settings.decoder_mask_ratio,
            seed=settings.seed,
        )
        return Masks(masked_BN, decoded_BN)


_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MaskedClips:
    """Inputs and targets of the model for batches of clips.

    Attributes:
        inputs: Function that takes a batch and a slice of its rows, and returns normalised clips [R, C, T, H, W].
        masking: Generator of the masks.
        size: Size of the encoder, which defines the cubes.
        std: Standard deviations by which `inputs` divides the channels; None if `inputs` does not divide channels.
    """

    inputs: Callable[[Batch, slice], torch.Tensor]
    masking: Masking
    size: VideoViTSize
    std: Sequence[float] | None

    def targets(self, clips_RCTHW: torch.Tensor, predicted_RM: torch.Tensor) -> torch.Tensor:
        """Return the targets of the predicted cubes (`normalised_cubes`)."""
        return normalised_cubes(
            clips_RCTHW,
            predicted_RM,
            cube_frames=self.size.cube_frames,
            patch_px=self.size.patch_px,
            std=self.std,
        )


class MaskedReconstruction(Objective):
    """Objective of a masked autoencoder: the mean squared error over the predicted cubes (VideoMAE, section 3).

    Every clip has the same number of predicted cubes, so the mean over microbatches and ranks is the mean over the
    global batch.
    """

    def __init__(self, clips: MaskedClips) -> None:
        super().__init__()
        self._clips = clips

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Accumulate this rank's gradients, and return the loss of the global batch."""
        num_samples, masking = len(batch["position"]), self._clips.masking
        counts = masking.counts

        def compute_loss(rows: slice) -> torch.Tensor:
            clips_RCTHW = self._clips.inputs(batch, rows)
            masks = masking.draw(batch["position"][rows], device=clips_RCTHW.device)
            predicted_RM = predicted_cubes(masks.masked_BN, masks.decoded_BN, count=counts.num_predicted)
            targets_RMV = self._clips.targets(clips_RCTHW, predicted_RM)
            with step.autocast():
                values_RMV = model(
                    clips_RCTHW,
                    masks.masked_BN,
                    masks.decoded_BN,
                    num_masked=counts.num_masked,
                    num_predicted=counts.num_predicted,
                )
            # Weight the loss by the microbatch's fraction of the batch, so that the microbatch losses add up to the
            # mean over the batch.
            return reconstruction_loss(values_RMV, targets_RMV) * ((rows.stop - rows.start) / num_samples)

        losses = backward_microbatches(compute_loss, num_samples=num_samples, step=step)
        return {"loss": step.world.sum(torch.stack(losses).sum()).double() / step.world.size}


@torch.no_grad()
def normalised_cubes(
    video_BCTHW: torch.Tensor,
    predicted_BM: torch.Tensor,
    *,
    cube_frames: int,
    patch_px: int,
    std: Sequence[float] | None = None,
) -> torch.Tensor:
    """Return the targets of the predicted cubes, [B, M, V]: (x - mean) / (sqrt(unbiased variance) + 1e-6).

    The mean and the variance are computed over the t * p * p values of a cube in one channel (VideoMAE, section 3; its
    code and transformers use the same constants). The dtype is at least float32.

    Args:
        video_BCTHW: Clips, as passed to the model.
        predicted_BM: Indices of the predicted cubes, int64.
        std: Standard deviations by which the channels were divided; None for latents. VideoMAE computes targets from
            pixels before this division. The order matters only for the constant 1e-6, which is therefore also divided
            by `std`.
    """
    cubes = cubes_of(video_BCTHW, cube_frames=cube_frames, patch_px=patch_px)
    targets_BMtppC = pick_cubes(cubes.permute(0, 1, 2, 3, 5, 6, 7, 4), predicted_BM)
    x = targets_BMtppC.flatten(2, 4).to(torch.promote_types(video_BCTHW.dtype, torch.float32))
    # Compute in place, because the targets are the largest tensor of a step.
    x.sub_(x.mean(2, keepdim=True))
    deviation = torch.linalg.vector_norm(x, dim=2, keepdim=True).div_((x.shape[2] - 1) ** 0.5)
    eps = _EPS / constant_tensor(tuple(std or (1.0,)), x.device, x.dtype)
    x.div_(deviation.add_(eps))
    return x.flatten(2)


def reconstruction_loss(predicted_BMV: torch.Tensor, targets_BMV: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error over the predicted cubes (scalar), in the dtype of the targets."""
    return functional.mse_loss(predicted_BMV.to(targets_BMV.dtype), targets_BMV)


if TYPE_CHECKING:
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples

    AnySamples = Samples[Any] | MixedSamples


class MaeTask(ClipTask[MaeSettings, "AnySamples", MaskedAutoencoder]):
    """The task of `train mae`."""

    name = "mae"

    def __init__(self, settings: MaeSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._probes: list[LoopProbe] = []
        self.columns: tuple[str, ...] = (LATENTS,) if settings.reads_latents else (VIDEO,)

    def training_set(self, world: World) -> "AnySamples":
        """Open this rank's part of the chunks, or segments of latents, in the training split.

        Raises:
            UserError: The split is empty, its clips cannot be cropped and masked as the settings require, or the data
                or settings of an evaluation are unsuitable.
        """
        settings = self._settings
        per_chunk = settings.samples_per_chunk
        samples = self.open_mixture(lambda task: task.samples(settings.split, world, per_chunk=per_chunk))
        if settings.evaluate.split != ProbeEvaluation.split:
            # At the end of the run, clips of this split are reconstructed. Only the default split may be missing.
            for folder in settings.folders:
                if not kind_of(folder).has_manifest:
                    continue
                with EvaluatedData(name="", shards=None, split=settings.evaluate.split).explain_errors():
                    path = open_data_folder(folder, cache=settings.cache, column=None).path
                    find_split_videos(path, settings.evaluate.split)
        if settings.evaluate.every:
            # Open the probes now, so that errors in their settings are reported before training starts.
            self._probes = [self._open_probe(data, world) for data in settings.evaluated_data()]
        return samples

    def _open_probe(self, data: EvaluatedData, world: World) -> LoopProbe:
        settings = self.with_data(data.shards)._settings
        evaluation = replace(self._settings.evaluate, shards=(), split=data.split)
        with data.explain_errors():
            probe = LoopProbe(
                settings, evaluation, name=data.name, inputs=self.inputs, world=world, device=self._device
            )
        self.record_evaluation(data, probe.queries)
        return probe

    def samples(self, split: str, world: World, *, per_chunk: int = 1) -> "Samples[Any]":
        """Open this rank's part of the samples of a split.

        Args:
            per_chunk: Number of samples per chunk.

        Raises:
            UserError: The split is empty, or does not fit the settings.
        """
        settings = self._settings
        query = DataQuery(
            settings=settings,
            content="frames",
            split=split,
            loading=replace(loader_settings(settings, world, device=self._device), group=per_chunk),
            repeats=per_chunk,
            same_frames=settings.repeat == "masks",
        )
        samples: Samples[Any] = open_samples(query)
        if (shape := samples.frame_shape) is not None:
            check_mask(settings.mask_ratio, num_patches=(shape.height // LATENT_PATCH) ** 2)
        return samples

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Build the objective: the reconstruction error of the predicted cubes."""
        return MaskedReconstruction(self.masked_clips(samples, is_training=True))

    def masked_clips(self, samples: "AnySamples", *, is_training: bool = False) -> MaskedClips:
        """Return the functions that compute inputs, masks and targets for the clips of `samples`."""
        settings = self._settings
        return MaskedClips(
            inputs=partial(self.inputs, is_training=is_training),
            masking=self.masking(samples),
            size=self.size(samples),
            # Latents are not divided by a standard deviation.
            std=None if settings.reads_latents else settings.init.pixel_std or IMAGENET_STD,
        )

    def size(self, samples: "AnySamples") -> VideoViTSize:
        """Return the size of the encoder, which may depend on the clips of `samples`."""
        return self._shape.size.video if self._shape is not None else picture_size(samples, self._settings)[0]

    def masking(self, samples: "AnySamples") -> Masking:
        """Return the generator of masks for the clips of `samples`."""
        settings, size = self._settings, self.size(samples)
        num_rows = self._frame_px(samples) // size.patch_px
        return Masking(settings, CubeGrid(settings.num_frames // size.cube_frames, num_rows, num_rows))

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Return the model's input, normalised clips [B, C, T, H, W], for the given rows of a batch."""
        settings = self._settings
        if batch["input"] == "latents":
            window_offset_B = None
            if is_training:
                window_offset_B = draw_uniform(
                    batch["position"][rows].numpy(), 1, seed=settings.seed, purpose="window"
                )[:, 0]
            latents_BTCHW = window_frames(
                batch["latents"][rows], num_frames=settings.num_frames, offset_B=window_offset_B
            )
            return latents_BTCHW.float().transpose(1, 2)
        return self.pixels(batch, rows, mean=IMAGENET_MEAN, std=IMAGENET_STD, is_training=is_training)

    def fit_all_parameters(self, model: MaskedAutoencoder, source: Source, *, say: Say) -> LoadedWeights:
        """Fit weights to the encoder and the decoder, or only to the encoder if the weights contain no decoder.

        The encoder's last norm is removed if the weights lack this norm, as with transformers' `use_mean_pooling`.
        """
        names = source.converted.tensors
        if "video.ln_post.weight" not in names:
            model.video.ln_post = None
        parts: nn.Module = model
        if not any(name.startswith("decoder.") for name in names):
            parts = nn.Module()
            parts.video = model.video
        return fit_to(parts, source, say=say)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Run the probes on all evaluation data, and return their metrics as `<name>/<metric>`."""
        return {name: value for probe in self._probes for name, value in probe(model, world).items()}

    def new_model(self, samples: "AnySamples") -> MaskedAutoencoder:
        """Build the encoder and the decoder for the clips of `samples`."""
        settings = self._settings
        return MaskedAutoencoder(
            self.size(samples),
            decoder_depth=settings.decoder_depth,
            image_px=self._frame_px(samples),
            num_frames=settings.num_frames,
            attend=self._attention.attend,
            towers=settings.towers,
        )

    def _frame_px(self, samples: "AnySamples") -> int:
        return self._shape.image_px if self._shape is not None else picture_size(samples, self._settings)[1]


def effective_settings(settings: MaeSettings, source: Source | None, *, say: Say) -> MaeSettings:
    """Return the settings that apply with the weights of `source` (`effective_clip_settings`)."""
    if flags := flags_without_effect(settings):
        say(f"--input {settings.input} ignores these settings from flags or a preset: {', '.join(flags)}")
    return effective_clip_settings(settings, source, say=say)
