"""`TaskSpec` of `train mae`, its settings, and the flags and the table of its evaluation.

This module imports no heavy library, so that help and the checks of flags are fast.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, percent
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import FRACTION, Checked, GoesWith, Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import Crop, LatentSettings, NumFrames, Sampling
from clipmill.train.config.evaluation import ProbeEvaluation
from clipmill.train.config.fields import FIRST_RUN, help_group
from clipmill.train.config.model import Kind, Tower, Towers, check_frame_size, clip_only_mistakes, patch_px_of
from clipmill.train.config.training import COUNT, LearningRate, OptimizerSettings, WeightDecay
from clipmill.train.evaluation.probe import PROBE
from clipmill.train.evaluation.tables import Cell, Row, Table, protocol_of
from clipmill.train.spec import EvaluationSpec, Features, FirstRun, TaskSpec

DecoderMask = Literal["none", "random", "running-cell"]
Repeat = Literal["clips", "masks"]

MASKS = help_group("Masks", 6)
_RATIO = Range(
    above=0, below=1, hint="use a number above 0 and below 1, so that some cubes are masked and some are visible"
)
_PIXEL_SETTINGS = (
    *("sampling", "stride", "size_px", "crop", "min_crop_area", "short_side_px", "augment"),
    *("samples_per_chunk", "repeat", "decode"),
)
_LATENT_SETTINGS = ("segment", "max_segments")
_BETA2 = 0.95
_CELL_RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class MaeOptimizer(OptimizerSettings):
    """VideoMAE's optimizer (Tong et al. 2022, table 8)."""

    beta2: Annotated[float | None, FRACTION] = None
    """Second beta. Default: 0.95 for adamw, 0.999 for lamb, 0.99 for lion."""
    lr_batch: Annotated[int | None, COUNT] = 256
    """Reference batch size. Learning rates are multiplied by --batch divided by this value (linear scaling)."""

    def number(self, name: str) -> float:
        """Return the effective value of a setting."""
        return _BETA2 if (name, self.name, self.beta2) == ("beta2", "adamw", None) else super().number(name)


@dataclass(frozen=True, kw_only=True)
class MaeTowers(Towers):
    """Settings of the encoder, which is a videomae tower.

    Settings that the encoder does not use are hidden from the help, but are included in the settings of a run.
    """

    kind: Annotated[Kind | None, groups.HIDDEN] = "videomae"
    temporal: Annotated[Literal["zero", "random"], groups.HIDDEN] = "zero"
    embedding_width: Annotated[int | None, groups.HIDDEN] = None
    image: Annotated[str | None, groups.HIDDEN] = None
    pool_frames: Annotated[Literal["mean", "attention"], groups.HIDDEN] = "mean"
    attention: Annotated[Literal["joint", "divided"] | None, groups.HIDDEN] = None
    packed_text: Annotated[bool, groups.HIDDEN] = True
    patch_dropout: Annotated[float, groups.HIDDEN] = 0.0

    def rules(self) -> Iterator[UserError]:
        """Yield errors for hidden settings whose values are not the defaults."""
        hint = "omit it: train mae supports only the kind videomae"
        if self.image is not None:
            yield UserError(
                f"--towers.image is {self.image}, but train mae does not support towers from libraries",
                hint=hint,
                flags=("--towers.image",),
            )
            return
        if self.kind != "videomae":
            yield UserError(
                f"--towers.kind is {self.kind}, but train mae supports only the kind videomae",
                hint="omit it",
                flags=("--towers.kind",),
            )
        yield from clip_only_mistakes(self, hint=hint)
        if self.temporal != "zero":
            yield UserError(
                f"--towers.temporal {self.temporal} does not apply to a videomae tower",
                hint=hint,
                flags=("--towers.temporal",),
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MaeSettings(LatentSettings):
    """Settings of `train mae`, with the defaults of VideoMAE (Tong et al. 2022, table 8)."""

    command = "mae"
    only_kind = "videomae"

    segment: Annotated[str | None, groups.CLIPS] = None
    """Length of a segment of latents, such as 5s. A clip consists of --num-frames consecutive frames of a segment.
    Default: the stored segments of a video VAE, and 5s for other latents."""
    max_segments: Annotated[int | None, groups.CLIPS, Range(1, 10**9)] = None
    """Maximum number of segments per training video, spread evenly over the video. Default: all segments."""
    num_frames: NumFrames = 16
    sampling: Sampling = "stride"
    crop: Crop = "multi-scale"
    samples_per_chunk: Annotated[int, groups.CLIPS, COUNT] = 1
    """Number of samples drawn from each chunk per epoch. The samples are consecutive, so the chunk is decoded once."""
    repeat: Annotated[Repeat, groups.CLIPS] = "clips"
    """Difference between the samples of a chunk. clips: different frames, crops and masks; masks: the same frames with
    different crops and masks."""

    lr: LearningRate = 1.5e-4
    """Peak learning rate for a batch of --optimizer.lr-batch samples, reached at the end of the warmup."""
    weight_decay: WeightDecay = 0.05
    optimizer: Annotated[MaeOptimizer, groups.OPTIMIZER] = field(default_factory=MaeOptimizer)
    towers: Annotated[MaeTowers, groups.TOWERS] = field(default_factory=MaeTowers)

    mask_ratio: Annotated[float, MASKS, FIRST_RUN, _RATIO] = 0.9
    """Fraction of patches to mask. The same patches are masked in all frames of a clip (tube masking)."""
    decoder_mask: Annotated[DecoderMask, MASKS] = "none"
    """Masked patches that the decoder does not predict, to save work: none, random patches, or running cells (VideoMAE
    V2)."""
    decoder_mask_ratio: Annotated[float, MASKS, _RATIO, GoesWith("decoder_mask", ("random", "running-cell"))] = 0.5
    """Fraction of the masked patches that --decoder-mask omits."""
    decoder_depth: Annotated[int, MASKS, FIRST_RUN, Range(1, 1000)] = 4
    """Number of decoder blocks."""
    evaluate: Annotated[ProbeEvaluation, groups.EVALUATION, groups.SEVERAL] = field(default_factory=ProbeEvaluation)

    def tower_names(self) -> tuple[Tower, ...]:
        """Return the towers of the model."""
        return ("video", "decoder")

    def rules(self) -> Iterator[UserError]:
        """Yield errors for masks without a visible or a masked patch, and for settings that contradict each other."""
        yield from super().rules()
        if self.views is not None:
            yield UserError(
                f"--views is {self.views}, but each clip of train mae is from a single camera",
                hint="omit it: the chunks of all cameras are used",
                flags=("--views",),
            )
        if self.augment.erase:
            yield UserError(
                f"--augment.erase is {self.augment.erase}, but noise in erased boxes cannot be reconstructed",
                hint="omit it",
                flags=("--augment.erase",),
            )
        if self.decoder_mask == "running-cell" and self.decoder_mask_ratio not in _CELL_RATIOS:
            yield UserError(
                f"--decoder-mask-ratio is {self.decoder_mask_ratio}, but a running cell omits one, two or three of its "
                "four patches",
                hint="use 0.25, 0.5 or 0.75, or --decoder-mask random",
                flags=("--decoder-mask-ratio",),
            )
        if self.repeat == "masks" and self.samples_per_chunk == 1:
            yield UserError(
                "--repeat masks needs several samples per chunk, but --samples-per-chunk is 1",
                hint="use --samples-per-chunk 2 or more, or omit --repeat",
                flags=("--repeat", "--samples-per-chunk"),
            )
        if not self.reads_latents:
            misfits = list(errors_of(check_frame_size, self.model, self.towers, size_px=self.size_px))
            yield from misfits
            if not misfits:
                num_patches = (self.size_px // patch_px_of(self.model, self.towers)) ** 2
                yield from errors_of(check_mask, self.mask_ratio, num_patches=num_patches)


def flags_without_effect(settings: MaeSettings) -> list[str]:
    """Return the flags that were changed but have no effect with the selected input."""
    defaults, names = MaeSettings(), _PIXEL_SETTINGS if settings.reads_latents else _LATENT_SETTINGS
    flags = [name.replace("_", "-") for name in names if getattr(settings, name) != getattr(defaults, name)]
    if settings.reads_latents and (settings.init.pixel_mean, settings.init.pixel_std) != (None, None):
        flags.append("init.pixel-*")
    return [f"--{flag}" for flag in flags]


def check_mask(ratio: float, *, num_patches: int) -> None:
    """Raise a UserError if a mask leaves no cube of a time step visible, or no cube to reconstruct."""
    num_masked = num_masked_patches(ratio, num_patches=num_patches)
    if 0 < num_masked < num_patches:
        return
    # Round up, so that the suggested ratio masks at least one cube.
    lowest = math.ceil(1e4 / num_patches) / 1e4
    raise UserError(
        f"--mask-ratio {ratio} masks {num_masked} of the {count_noun(num_patches, 'cube')} in a time step",
        hint=f"use {lowest} or more, but less than 1"
        if num_patches > 1
        else "use larger frames, so that a visible cube remains",
        flags=("--mask-ratio",),
    )


def num_masked_patches(ratio: float, *, num_patches: int) -> int:
    """Return the number of masked cubes in a time step, rounded down as in VideoMAE (176 of 196)."""
    return int(ratio * num_patches)


@dataclass(frozen=True, kw_only=True)
class ReconstructionFlags(Checked):
    """Flags of `train eval reconstruction`."""

    split: str = "val"
    """Split to evaluate on."""
    max_samples: Annotated[int, Range(least=1)] = 1000
    """Maximum number of clips. Every k-th clip of the split is used, and k is as small as possible (at most 12 of 52
    clips: every 5th clip, 11 in total)."""


def reconstruction_table(result: dict[str, Any]) -> Table:
    """Return a table with the loss, the loss of predicting the mean of each cube, and the explained fraction."""
    loss, flat_loss = result["loss"], result["flat_loss"]
    explained = 1 - loss / flat_loss if flat_loss else None
    cells = (
        Cell(f"{loss:.4f}", baseline=f"mean of each cube {flat_loss:.4f}"),
        Cell(f"{flat_loss:.4f}"),
        Cell(percent(explained), share=None if explained is None else min(max(explained, 0.0), 1.0)),
    )
    clips = count_noun(result["num_samples"], "clip")
    detail = f"{clips}, {percent(result['share_hidden'])} masked"
    protocol = protocol_of(result, clips, mask=result["mask"], split=result["split_chosen"])
    columns = ("loss", "baseline", "explained")
    return Table(
        "Reconstruction of masked cubes", columns, (Row(f"clips of {result['split']}", detail, cells),), protocol
    )


def _strips(result: dict[str, Any]) -> list[dict[str, Any]]:
    clip = result["shown"][0]
    rows = (("original", clip["original"]), ("masked", clip["masked"]), ("reconstruction", clip["filled"]))
    return [{"words": name, "frames": frames, "is_right": None} for name, frames in rows]


RECONSTRUCTION = EvaluationSpec(
    name="reconstruction",
    help="Evaluate the reconstruction of masked patches: the loss on a split, and examples on the results page.",
    example="train eval reconstruction runs/mae --shards data",
    run_help="Run folder of train mae.",
    settings=ReconstructionFlags,
    score=import_late("clipmill.train.tasks.mae.evaluation:score_run"),
    table=reconstruction_table,
    pictures="shown",
    section=Path(__file__).with_name("reconstructions.html.j2"),
    strips=_strips,
)
TASK = TaskSpec(
    name="mae",
    help="Pre-train a video tower as a masked autoencoder (VideoMAE); needs no captions.",
    example="train mae --shards data --preset tiny --out runs/masked",
    settings=MaeSettings,
    make=import_late("clipmill.train.tasks.mae.task:MaeTask"),
    effective_settings=import_late("clipmill.train.tasks.mae.task:effective_settings"),
    evaluations=(PROBE, RECONSTRUCTION),
    finish_run=import_late("clipmill.train.tasks.mae.evaluation:reconstruct_at_end"),
    formats={"hf": "VideoMAEForPreTraining.from_pretrained('OUT')", "videomae": "VideoMAE's code, as a checkpoint"},
    export=import_late("clipmill.train.tasks.mae.export:exported_autoencoder"),
    adopt=import_late("clipmill.train.tasks.mae.export:adopted_autoencoder"),
    adoptable="a VideoMAE",
    features=Features(
        description="mean of the encoder's tokens over all cubes, without masking",
        inputs=lambda task: task.inputs,
        is_consecutive=lambda settings: True,
    ),
    first_run=FirstRun(
        cpu_preset="tiny", gpu_preset="mae-b16-k400", latents_flags="--preset mae-latents", needs_captions=False
    ),
    pipeline="feature-extraction",
)
