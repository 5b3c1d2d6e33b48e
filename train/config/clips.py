"""Settings of clips (pixels or latents), and of the video tower that encodes them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import FRACTION, PROBABILITY, Checked, GoesWith, Range, errors_of, no_effect_error
from clipmill.train.config import fields as groups
from clipmill.train.config.fields import FIRST_RUN
from clipmill.train.config.model import (
    FIXED_FRAME_PX,
    Freeze,
    Init,
    Kind,
    Lora,
    ModelName,
    Tower,
    Towers,
    check_num_frames,
    towers_to_adapt,
    tuning_mistakes,
)
from clipmill.train.config.training import COUNT, Device, TrainingSettings

_RAND_OPS = GoesWith("rand_ops", use="1 or more")
_JITTER = Range(least=0)
MAX_MAGNITUDE = 10.0
# RandAugment operations (clipmill.train.augment.rand_augment).
OPERATIONS = (
    *("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add"),
    *("saturation", "contrast", "brightness", "sharpness"),
    *("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(Checked):
    """Selection of a caption for each clip."""

    prefix = "captions"

    sources: str | None = None
    """Sampling weights of caption sources, such as `human=1,*rephraser*=2`; other sources are omitted. Default: equal
    weights for all sources except models (such as `captioner@1f2e3d4c`), which are omitted."""
    min_relevancy: Annotated[float | None, FRACTION] = None
    """Also pair a clip with captions of other clips if their relevancy, computed from verbs and nouns, exceeds this
    value (0.1 for EK-100). Default: use only the clip's own captions."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error if the weights cannot be parsed."""
        if self.sources is not None:
            yield from errors_of(parse_weights, self.sources)


def parse_weights(text: str) -> dict[str, float]:
    """Parse `name=weight,name=weight`, and return the weights by name, in the same order.

    Raises:
        UserError: The text does not have this form, a name is repeated, a weight is negative or not finite, or all
            weights are 0.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (side.strip() for side in part.rpartition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not (math.isfinite(weight) and weight >= 0):
            raise UserError(
                f"--captions.sources has an invalid entry: {part.strip()!r}",
                hint="write each source once, as name=weight with a weight of 0 or more: human=1,rephraser=2",
                flags=("--captions.sources",),
            )
        weights[name] = weight
    if not any(weights.values()):
        raise UserError(
            f"all weights in --captions.sources {text!r} are 0",
            hint="use a weight above 0 for at least one source",
            flags=("--captions.sources",),
        )
    return weights


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Augmentation of training clips. Parameters are drawn once per clip and apply to all of its frames."""

    prefix = "augment"

    flip: Annotated[float, PROBABILITY] = 0.0
    """Probability of a horizontal flip."""
    brightness: Annotated[float, _JITTER] = 0.0
    """Brightness jitter x: factor from max(0, 1 - x) to 1 + x."""
    contrast: Annotated[float, _JITTER] = 0.0
    """Contrast jitter x: factor from max(0, 1 - x) to 1 + x, around the clip's mean grey."""
    saturation: Annotated[float, _JITTER] = 0.0
    """Saturation jitter x: factor from max(0, 1 - x) to 1 + x, around the grey of each pixel."""
    hue: Annotated[float, Range(0, 0.5)] = 0.0
    """Hue jitter x: shift from -x to x, as a fraction of the colour circle."""
    blur: Annotated[float, PROBABILITY] = 0.0
    """Probability of a Gaussian blur."""
    rand_ops: Annotated[int, Range(0, 15)] = 0
    """Number of RandAugment operations per clip, each applied with probability 1/2 (VideoMAE: 4)."""
    rand_magnitude: Annotated[float, Range(0, MAX_MAGNITUDE), _RAND_OPS] = 7.0
    """Mean magnitude of the RandAugment operations."""
    rand_std: Annotated[float, _JITTER, _RAND_OPS] = 0.5
    """Standard deviation of the RandAugment magnitude."""
    erase: Annotated[float, PROBABILITY] = 0.0
    """Probability of random erasing: a box in all frames is replaced by noise (VideoMAE: 0.25)."""


# Weights that a command uses, from a run or another source. --run is the former name of the flag.
Weights = Annotated[str, Parameter(name=("--weights", "--run"))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Overrides(Checked):
    """Number, sampling and size of the frames of a clip, if they differ from the values used in training."""

    num_frames: Annotated[int | None, Range(1, 1024)] = None
    """Number of frames per clip; temporal embeddings are interpolated. Default: as in training."""
    sampling: Literal["uniform", "stride", "lavila"] | None = None
    """Frame sampling. Default: as in training."""
    size_px: Annotated[int | None, Range(2, 4096)] = None
    """Frame size in pixels; positional embeddings are interpolated. Default: as in training."""

    def given_values(self) -> dict[str, Any]:
        """Return the overrides that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def differences_from(self, settings: Any) -> "Overrides":
        """Return the overrides that differ from the settings of a run (`ClipSettings`).

        Raises:
            UserError: An override applies to pixels, but the model takes latents.
        """
        values = {name: value for name, value in self.given_values().items() if value != getattr(settings, name)}
        pixel_names = [name for name in values if name != "num_frames"]
        if pixel_names and settings.reads_latents:
            flag = f"--{pixel_names[0].replace('_', '-')}"
            raise UserError(
                f"{flag} {values[pixel_names[0]]} applies to pixels, but the model takes latents",
                hint="omit the flag; only --num-frames may differ from its value in training",
            )
        return Overrides(**values)


AS_TRAINED = Overrides()


NumFrames = Annotated[int, groups.CLIPS, FIRST_RUN, Range(1, 1024)]
Sampling = Annotated[Literal["uniform", "stride", "lavila"], groups.CLIPS, FIRST_RUN]
Crop = Annotated[Literal["random", "simple", "multi-scale", "centre"], groups.CLIPS]
_WITH_LATENTS = GoesWith("input", ("latents",))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClipSettings(TrainingSettings):
    """Training settings of the tasks whose samples are clips, with the video tower that encodes the clips."""

    min_batch: ClassVar[int] = 1
    """Minimum batch size that the objective supports."""
    only_kind: ClassVar[Kind | None] = None
    """Only kind of tower that the task supports; None if the task supports several kinds."""
    has_head: ClassVar[bool] = False
    """True if the model has trained parameters besides its towers."""

    views: Annotated[str | None, groups.CLIPS] = None
    """Cameras that recorded the same moments, such as top,wrist. A sample then contains a clip of the same moment from
    every camera. The caption columns `group` and `view` identify the moment and the camera (docs/python.md). Default:
    each caption is a separate sample."""
    num_frames: NumFrames = 4
    """Number of frames per clip."""
    sampling: Sampling = "uniform"
    """Frame sampling. uniform: one frame from each of --num-frames equal segments; stride: every --stride-th frame;
    lavila: like uniform, with segment boundaries rounded to frames as in LaViLa's code."""
    stride: Annotated[int, groups.CLIPS, FIRST_RUN, COUNT, GoesWith("sampling", ("stride",))] = 4
    """Step of --sampling stride, in frames. Clips that are too short use a smaller step."""
    size_px: Annotated[int, groups.CLIPS, FIRST_RUN, Range(2, 4096)] = 224
    """Frame size in pixels. Frames are resized to squares of this size. The flag does not apply to latents."""
    crop: Crop = "random"
    """Crop in training. random: torchvision's RandomResizedCrop; simple: a square of fixed scale at a random position
    (SimpleRandomCrop); multi-scale: as in VideoMAE; centre: the centre square."""
    min_crop_area: Annotated[float, groups.CLIPS, Range(above=0, most=1), GoesWith("crop", ("random",))] = 0.5
    """Minimum area of a random crop, as a fraction of the frame's area."""
    short_side_px: Annotated[int | None, groups.CLIPS, Range(2, 8192), GoesWith("crop", ("simple",))] = None
    """Length of a frame's short side, in pixels, after scaling and before a simple crop cuts out a square of
    --size-px. Default: 8/7 of --size-px (256 for 224)."""
    samples_per_chunk: Annotated[int, groups.CLIPS, COUNT] = 1
    """Number of consecutive samples drawn from the same chunk (stored part of a video), which is decoded once for all
    of them."""
    augment: Annotated[Augment, groups.AUGMENTATION] = field(default_factory=Augment)
    """Augmentation in training."""
    model: Annotated[ModelName, groups.MODEL, FIRST_RUN] = "b16"
    """Model size."""
    towers: Annotated[Towers, groups.TOWERS] = field(default_factory=Towers)
    """Architecture of the towers beyond their size."""
    init: Annotated[Init, groups.MODEL, groups.SEVERAL] = field(default_factory=Init)
    """Initial weights."""
    freeze: Freeze = ()
    """Parts to freeze: a tower (video, text), or the embeddings and the first N blocks of a tower (blocks:N for the
    video tower, text.blocks:N for the text tower)."""
    lora: Annotated[Lora, groups.ADAPTERS, groups.SEVERAL] = field(default_factory=Lora)
    """Low-rank adapters."""

    @property
    def view_names(self) -> tuple[str, ...]:
        """Camera names in --views; empty without views."""
        return () if self.views is None else tuple(name.strip() for name in self.views.split(","))

    @property
    def num_views(self) -> int:
        """Number of cameras per clip."""
        return max(1, len(self.view_names))

    def tower_names(self) -> tuple[Tower, ...]:
        """Return the names of the model's towers."""
        return ("video",)

    def trains_besides_towers(self) -> bool:
        """Return True if the model has trained parameters besides its towers."""
        return self.has_head

    def adapts_pretrained(self) -> bool:
        """Return True if the towers that get adapters have pretrained weights."""
        return self.init.weights is not None

    def rules(self) -> Iterator[UserError]:
        """Yield errors for an unsuitable crop, tubelet or --views, and for a model without trained parts."""
        yield from super().rules()
        if self.short_side_px is not None and self.short_side_px < self.size_px:
            yield UserError(
                f"--short-side-px {self.short_side_px} is smaller than --size-px {self.size_px}",
                hint="use a larger --short-side-px, or a smaller --size-px",
                flags=("--short-side-px", "--size-px"),
            )
        yield from self._view_mistakes() if self.views is not None else ()
        yield from errors_of(check_num_frames, self.towers, num_frames=self.num_frames)
        yield from tuning_mistakes(
            self.freeze,
            self.lora,
            towers=self.tower_names(),
            has_head=self.trains_besides_towers(),
            has_weights=self.adapts_pretrained(),
        )

    def _view_mistakes(self) -> Iterator[UserError]:
        names = self.view_names
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            yield UserError(
                f"--views {self.views} is not a list of different cameras",
                hint="use two or more different cameras, such as top,wrist",
                flags=("--views",),
            )
        if self.reads_latents:
            yield UserError(
                "--views needs decoded clips, but --input is latents", hint="use --input pixels", flags=("--views",)
            )
        if self.parallel.stages > 1:
            yield UserError(
                f"--views needs the complete tower, but --parallel.stages is {self.parallel.stages}",
                hint="omit --parallel.stages",
                flags=("--views", "--parallel.stages"),
            )

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield an error for --towers.views without --views, and the errors of the base class."""
        yield from super().check_effects(typed)
        if "--towers.views" in typed and self.views is None:
            yield no_effect_error("--towers.views", typed, "clips are from one camera", use="--views top,wrist")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LatentSettings(ClipSettings):
    """Training settings of the tasks whose clips are decoded pixels or segments of the latents made by prep."""

    input: Annotated[Literal["pixels", "latents"], groups.CLIPS, FIRST_RUN] = "pixels"
    """Input of the model. pixels: decoded clips; latents: segments of the column made by prep latents."""
    segment: Annotated[str | None, groups.CLIPS, _WITH_LATENTS] = None
    """Length of a segment of latents, such as 5s. Default: the stored segment length for a video VAE, 5s for
    other latents."""
    max_segments: Annotated[int | None, groups.CLIPS, Range(1, 10**9), _WITH_LATENTS] = None
    """Maximum number of segments per training video; the segments are spread evenly over the video. Default: all
    segments."""

    @property
    def reads_latents(self) -> bool:
        """True if the model's input is latents."""
        return self.input == "latents"

    def rules(self) -> Iterator[UserError]:
        """Yield errors for settings that apply only to pixels, if the input is latents."""
        yield from super().rules()
        if self.reads_latents and self.towers.image is not None:
            yield UserError(
                f"--towers.image {self.towers.image} takes pixels, but --input is latents",
                hint="use --input pixels",
                flags=("--towers.image",),
            )
        if self.reads_latents and self.towers.patch_px is not None:
            yield UserError(
                f"--towers.patch-px {self.towers.patch_px} applies to pixels, but --input is latents",
                hint="omit it, or use --input pixels",
                flags=("--towers.patch-px",),
            )


def adapted_towers(settings: ClipSettings) -> tuple[Tower, ...]:
    """Return the towers that get adapters."""
    return towers_to_adapt(settings.lora, settings.freeze, towers=settings.tower_names())


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Options for opening trained weights. By default, data and settings are as in training.

    Attributes:
        shards: Data to use instead of the data of the run; None to use the data of the run.
        variant: Names of the data variants to read. Columns without a named variant use the variant used in training
            or, for data other than the run's, the current variant.
        where: Condition that selects samples. The condition used in training never applies.
        device: Device to use instead of the device of the run: auto, cpu or cuda.
        overrides: Different number, sampling or size of frames. Temporal and positional embeddings are interpolated.
        is_without_data: True to build models from the shapes of the weights, without samples.
        checkpoint: Checkpoint of the run; None for the latest one.
    """

    shards: str | None = None
    variant: tuple[str, ...] = ()
    where: str | None = None
    device: Device | None = None
    overrides: Overrides = AS_TRAINED
    is_without_data: bool = False
    checkpoint: Path | None = None

    def apply_to(self, settings: ClipSettings) -> tuple[ClipSettings, Overrides]:
        """Apply the options to the settings of weights. Return the new settings, and the overrides that change a value.

        Raises:
            UserError: An override applies to pixels, but the model takes latents.
        """
        settings = replace(settings, device=self.device or settings.device)
        settings = replace(
            settings if self.shards is None else settings.with_data(self.shards), where=self.where, share=1.0
        )
        overrides = self.overrides.differences_from(settings)
        changes, model = overrides.given_values(), getattr(settings, "model", "")
        if overrides.size_px is not None and model in FIXED_FRAME_PX:
            changes["model"] = model.removesuffix(f"-{FIXED_FRAME_PX[model]}")  # the same model for any frame size
        return replace(settings, **changes), overrides


AS_IN_TRAINING = OpenOptions()
