"""Settings of clips, and of the video tower that encodes them: as pixels, or as latents."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import GoesWith, Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.data import Augment
from clipmill.train.config.fields import FIRST_RUN
from clipmill.train.config.model import Init, Kind, ModelName, Towers, check_frames
from clipmill.train.config.training import COUNT, TrainingSettings
from clipmill.train.config.tuning import Freeze, Lora, Tower, towers_to_adapt, tuning_mistakes

NumFrames = Annotated[int, groups.CLIPS, FIRST_RUN, Range(1, 1024)]
Sampling = Annotated[Literal["uniform", "stride", "lavila"], groups.CLIPS, FIRST_RUN]
Crop = Annotated[Literal["random", "simple", "multi-scale", "centre"], groups.CLIPS]
_OF_LATENTS = GoesWith("input", ("latents",))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClipSettings(TrainingSettings):
    """Clips, and the video tower that encodes them."""

    least_batch: ClassVar[int] = 1
    """The smallest batch that the objective makes sense of."""
    only_kind: ClassVar[Kind | None] = None
    """The kind of tower, for tasks that support a single one."""
    has_head: ClassVar[bool] = False
    """Whether the model has trained parameters besides those of its towers."""

    num_frames: NumFrames = 4
    """Number of frames per clip."""
    sampling: Sampling = "uniform"
    """Frame sampling. uniform: one frame from each of equal segments; stride: every --stride-th frame; lavila: LaViLa's
    rule."""
    stride: Annotated[int, groups.CLIPS, FIRST_RUN, COUNT, GoesWith("sampling", ("stride",))] = 4
    """Step of --sampling stride, in frames. It is reduced for clips that are too short."""
    size_px: Annotated[int, groups.CLIPS, FIRST_RUN, Range(2, 4096)] = 224
    """Frame size in pixels. Frames are resized to squares; latents have their own size."""
    crop: Crop = "random"
    """Crop in training. random: torchvision's RandomResizedCrop; simple: a square at a random position, of one scale
    (SimpleRandomCrop); multi-scale: VideoMAE's; centre: the centre square."""
    min_crop_area: Annotated[float, groups.CLIPS, Range(above=0, most=1), GoesWith("crop", ("random",))] = 0.5
    """Minimum area of a random crop, as a share of the frame's."""
    short_side_px: Annotated[int | None, groups.CLIPS, Range(2, 8192), GoesWith("crop", ("simple",))] = None
    """Length that a simple crop scales the short side of a frame to before it takes --size-px of it. Default: 8/7 of
    --size-px (256 for 224)."""
    samples_per_chunk: Annotated[int, groups.CLIPS, COUNT] = 1
    """Number of consecutive samples drawn from the same chunk, so that it is decoded only once."""
    augment: Annotated[Augment, groups.AUGMENTATION] = field(default_factory=Augment)
    """Augmentation in training."""
    model: Annotated[ModelName, groups.MODEL, FIRST_RUN] = "b16"
    """Model size."""
    towers: Annotated[Towers, groups.TOWERS] = field(default_factory=Towers)
    """Architecture of the towers beyond their size."""
    init: Annotated[Init, groups.MODEL, groups.SEVERAL] = field(default_factory=Init)
    """Weights to start from."""
    freeze: Freeze = ()
    """Parts to freeze: a tower (video, text), or its embeddings and first N blocks (blocks:N of the video tower,
    text.blocks:N)."""
    lora: Annotated[Lora, groups.ADAPTERS, groups.SEVERAL] = field(default_factory=Lora)
    """Low-rank adapters."""

    def tower_names(self) -> tuple[Tower, ...]:
        """The towers that the model has."""
        return ("video",)

    def trains_besides_towers(self) -> bool:
        """Whether the model has trained parameters besides those of its towers."""
        return self.has_head

    def adapts_pretrained(self) -> bool:
        """Whether the towers with adapters have pretrained weights."""
        return self.init.weights is not None

    def rules(self) -> Iterator[UserError]:
        """Yields clips that tubelets do not divide, crops larger than the frame, and settings that train nothing."""
        yield from super().rules()
        if self.short_side_px is not None and self.short_side_px < self.size_px:
            yield UserError(
                f"--short-side-px is {self.short_side_px}, less than --size-px {self.size_px}",
                hint="use a larger --short-side-px, or a smaller --size-px",
                flags=("--short-side-px", "--size-px"),
            )
        yield from errors_of(check_frames, self.towers, num_frames=self.num_frames)
        yield from tuning_mistakes(
            self.freeze,
            self.lora,
            towers=self.tower_names(),
            has_head=self.trains_besides_towers(),
            has_weights=self.adapts_pretrained(),
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LatentSettings(ClipSettings):
    """Clips that are decoded, or segments of the latents that prep made of them."""

    input: Annotated[Literal["pixels", "latents"], groups.CLIPS, FIRST_RUN] = "pixels"
    """Input of the model. pixels: decoded clips; latents: segments of the column made by prep latents."""
    segment: Annotated[str | None, groups.CLIPS, _OF_LATENTS] = None
    """Length of a segment of latents, such as 5s. Default: the stored segments of a VAE of videos; 5s of other
    latents."""
    max_segments: Annotated[int | None, groups.CLIPS, Range(1, 10**9), _OF_LATENTS] = None
    """Maximum number of segments of a training video, spread evenly over it. Default: all of them."""

    @property
    def reads_latents(self) -> bool:
        """Whether the model takes latents."""
        return self.input == "latents"

    def rules(self) -> Iterator[UserError]:
        """Yields patches of pixels for latents, which have their own."""
        yield from super().rules()
        if self.reads_latents and self.towers.image is not None:
            yield UserError(
                f"--towers.image is {self.towers.image}, which takes pixels",
                hint="use --input pixels",
                flags=("--towers.image",),
            )
        if self.reads_latents and self.towers.patch_px is not None:
            yield UserError(
                f"--towers.patch-px is {self.towers.patch_px}, and latents have patches of their own",
                hint="leave it out, or use --input pixels",
                flags=("--towers.patch-px",),
            )


def adapted_towers(settings: ClipSettings) -> tuple[Tower, ...]:
    """The towers that get adapters."""
    return towers_to_adapt(settings.lora, settings.freeze, towers=settings.tower_names())
