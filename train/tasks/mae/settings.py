"""Settings of `train mae`."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.config.evaluation import ProbeEvaluation, number_names
from train.config.model import PATCH_PX, Kind, Towers, check_picture, refuse_of_clip
from train.config.optim import OptimizerSettings
from train.config.training import ClipSettings, check_best

DecoderMask = Literal["none", "random", "running-cell"]
Repeat = Literal["clips", "masks"]

_CLIPS = Parameter(group="Clips")
_TRAINING = Parameter(group="Training")
_OPTIMIZER = Parameter(group="Optimizer")
_TOWERS = Parameter(group="Towers")
_EVALUATION = Parameter(group="Evaluation", negative_iterable=(), consume_multiple=True)
_MASK = Parameter(group="Masks")
_HIDDEN = Parameter(show=False)

_OF_PIXELS = (
    *("sampling", "stride", "size_px", "crop", "min_crop_area", "augment"),
    *("samples_per_chunk", "repeat", "decode"),
)
_OF_LATENTS = ("segment",)
_BETA2 = 0.95
_CELL_RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class MaeOptimizer(OptimizerSettings):
    """VideoMAE's optimizer (Tong et al. 2022, table 8)."""

    beta2: float | None = None
    """Of adamw, lamb, lion; left out: 0.95 for adamw, the optimizer's own for the others."""
    lr_batch: int | None = 256
    """Batch that --lr and --optimizer.end-lr are meant for: they are multiplied by --batch / this."""

    def number(self, name: str) -> float:
        """The value that takes effect."""
        return _BETA2 if (name, self.name, self.beta2) == ("beta2", "adamw", None) else super().number(name)


@dataclass(frozen=True, kw_only=True)
class MaeTowers(Towers):
    """An encoder of the kind videomae. The help leaves out what it does not have; runs have it in their settings."""

    kind: Annotated[Kind | None, _HIDDEN] = "videomae"
    temporal: Annotated[Literal["zero", "random"], _HIDDEN] = "zero"
    embedding_width: Annotated[int | None, _HIDDEN] = None
    packed_text: Annotated[bool, _HIDDEN] = True
    patch_dropout: Annotated[float, _HIDDEN] = 0.0

    def __post_init__(self) -> None:
        if self.kind != "videomae":
            raise UserError(
                f"--towers.kind is {self.kind}, and train mae trains towers of the kind videomae", hint="leave it out"
            )
        hint = "leave it out: train mae has no other kind of tower"
        refuse_of_clip(self, hint=hint)
        if self.temporal != "zero":
            raise UserError(f"--towers.temporal is {self.temporal}, and a videomae tower has none", hint=hint)
        super().__post_init__()


_NO_PROBE = ProbeEvaluation()
_ADAMW = MaeOptimizer()
_VIDEOMAE = MaeTowers()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MaeSettings(ClipSettings):
    """Settings of `train mae`; the defaults are VideoMAE's (Tong et al. 2022, table 8)."""

    command = "mae"
    only_kind = "videomae"

    input: Annotated[Literal["pixels", "latents"], _CLIPS] = "pixels"
    """pixels: chunks, decoded; latents: segments of the column that prep latents made."""
    segment: Annotated[str, _CLIPS] = "5s"
    """Length of a segment of latents; --num-frames of its frames in a row are shown."""
    num_frames: Annotated[int, _CLIPS] = 16
    """Pictures, or frames of latents, of a clip."""
    sampling: Annotated[Literal["uniform", "stride", "lavila"], _CLIPS] = "stride"
    """stride: every --stride-th frame; uniform: one picture from each of equal parts; lavila: LaViLa's rule."""
    crop: Annotated[Literal["random", "multi-scale", "centre"], _CLIPS] = "multi-scale"
    """Crop of training: multi-scale (VideoMAE's), random (torchvision's RandomResizedCrop) or the centre square."""
    samples_per_chunk: Annotated[int, _CLIPS] = 1
    """Samples of each chunk in an epoch; they are visited in a row, and the chunk is decoded once for all of them."""
    repeat: Annotated[Repeat, _CLIPS] = "clips"
    """How samples of a chunk differ: clips: in window, crop and mask; masks: in crop and mask, frames are the same."""

    lr: Annotated[float, _TRAINING] = 1.5e-4
    """Highest learning rate for a batch of --optimizer.lr-batch, reached after the warm-up."""
    weight_decay: Annotated[float, _TRAINING] = 0.05
    """Decay of matrices (gains, biases and embeddings have none)."""
    optimizer: Annotated[MaeOptimizer, _OPTIMIZER] = _ADAMW
    """How weights follow gradients."""
    towers: Annotated[MaeTowers, _TOWERS] = _VIDEOMAE
    """What the encoder is made of beyond its size."""

    mask_ratio: Annotated[float, _MASK] = 0.9
    """Share of the cubes of each moment that are masked: the same places at all moments (tubes), drawn for a clip."""
    decoder_mask: Annotated[DecoderMask, _MASK] = "none"
    """Which masked cubes are left out of the loss to save work: none, random ones, or running cells (VideoMAE V2)."""
    decoder_mask_ratio: Annotated[float, _MASK] = 0.5
    """Share of the cubes that --decoder-mask leaves out."""
    decoder_depth: Annotated[int, _MASK] = 4
    """Blocks of the decoder."""
    evaluate: Annotated[ProbeEvaluation, _EVALUATION] = _NO_PROBE
    """Probes of frozen features while the model is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mask_ratio", "decoder_mask_ratio"):
            if not 0 < getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{flag} is {getattr(self, name)}",
                    hint="it must be more than 0, and less than 1: something is masked, and something is left",
                )
        if self.augment.erase:
            raise UserError(
                f"--augment.erase is {self.augment.erase}, and noise is nothing to reconstruct", hint="leave it out"
            )
        if not 1 <= self.decoder_depth <= 1000:
            raise UserError(f"--decoder-depth is {self.decoder_depth}", hint="it must be from 1 to 1,000")
        if self.decoder_mask == "running-cell" and self.decoder_mask_ratio not in _CELL_RATIOS:
            raise UserError(
                f"--decoder-mask-ratio is {self.decoder_mask_ratio}, and a running cell has four places",
                hint="use 0.25, 0.5 or 0.75, or --decoder-mask random",
            )
        if self.repeat == "masks" and self.samples_per_chunk == 1:
            raise UserError(
                "--repeat masks is about several samples of a chunk, and --samples-per-chunk is 1",
                hint="use --samples-per-chunk 2 or more, or leave --repeat out",
            )
        check_best(self.best, split=self.evaluate.split, names=number_names(self.evaluate))
        if self.input == "pixels":
            check_picture(self.model, size_px=self.size_px)
            check_mask(self.mask_ratio, num_places=(self.size_px // PATCH_PX[self.model]) ** 2)


def without_effect(settings: MaeSettings) -> list[str]:
    """Flags that are set, and that the input which is chosen has no use for."""
    defaults, unused = MaeSettings(), _OF_PIXELS if settings.input == "latents" else _OF_LATENTS
    flags = [name.replace("_", "-") for name in unused if getattr(settings, name) != getattr(defaults, name)]
    if settings.input == "latents" and (settings.init.pixel_mean, settings.init.pixel_std) != (None, None):
        flags.append("init.pixel-*")
    return [f"--{flag}" for flag in flags]


def check_mask(ratio: float, *, num_places: int) -> None:
    """Raises a UserError where a mask leaves nothing to see, or nothing to reconstruct, of a moment's cubes."""
    num_masked = num_masked_places(ratio, num_places=num_places)
    if 0 < num_masked < num_places:
        return
    # Rounded up, so that it suffices.
    least = math.ceil(1e4 / num_places) / 1e4
    raise UserError(
        f"--mask-ratio is {ratio}, and of the {num_places} cubes of a moment {num_masked} are masked",
        hint=f"use {least} or more, less than 1"
        if num_places > 1
        else "use larger pictures: one cube must be left to see",
    )


def num_masked_places(ratio: float, *, num_places: int) -> int:
    """Cubes of a moment that are masked: rounded down, as VideoMAE does (176 of 196)."""
    return int(ratio * num_places)
