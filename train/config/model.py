"""Settings of the towers: a group of the training settings."""

from dataclasses import dataclass
from typing import Literal

from manifests.errors import UserError

ModelName = Literal["tiny", "s16", "b16", "l16", "l14", "l14-336"]
Activation = Literal["gelu", "quick_gelu"]
Kind = Literal["clip", "videomae", "timesformer"]

# Side of a patch, which the side of a picture must be a multiple of.
PATCH_PX: dict[str, int] = {"tiny": 16, "s16": 16, "b16": 16, "l16": 16, "l14": 14, "l14-336": 14}
# A name that stands for one size of pictures.
PICTURE_PX: dict[str, int] = {"l14-336": 336}
_TUBELETS: dict[Kind, int] = {"clip": 1, "videomae": 2, "timesformer": 1}
# What a tower of the kind videomae does not have, and the value that says so.
_OF_CLIP_ALONE = {"embedding_width": None, "patch_dropout": 0.0}
_WIDEST = 65_536


@dataclass(frozen=True, kw_only=True)
class Towers:
    """What the towers are made of beyond their size, what is left out in training, and what saves memory."""

    kind: Kind | None = None
    """Of the video tower (docs/models.md); when left out what the weights of --init are, else the task's own."""
    tubelet: int | None = None
    """Frames of a cube, which becomes one token; when left out 1 for clip (a patch of one frame), 2 for videomae."""
    temporal: Literal["zero", "random"] = "zero"
    """Temporal embedding at the start: zero (AVION's code) or random (AVION's paper)."""
    embedding_width: int | None = None
    """Width of the space that both towers share (256: AVION); CLIP's own when left out."""
    activation: Activation | None = None
    """Of the MLPs: what the weights of --init were trained with, else gelu (OpenAI's CLIP: quick_gelu)."""
    video_norm_eps: float | None = None
    """Of the video tower's layer norms: that of the weights of --init, else 1e-5 (AVION's: 1e-6)."""
    packed_text: bool = True
    """Captions one behind the other, without padding; off: each fills the context of 77 tokens."""
    patch_dropout: float = 0.0
    """Share of a clip's cubes that training leaves out, drawn anew for each clip (AVION: 0.5)."""
    drop_path: float = 0.0
    """Probability that a video block is skipped for a clip (stochastic depth)."""
    drop_path_rule: Literal["rising", "constant"] = "rising"
    """rising: from 0 in the first block to --towers.drop-path in the last; constant: the same in all."""
    activation_checkpointing: bool = False
    """Compute each block twice rather than keep what its backward pass needs."""

    def __post_init__(self) -> None:
        if self.tubelet is not None and self.tubelet < 1:
            raise UserError(f"--towers.tubelet is {self.tubelet}", hint="it must be at least 1")
        if self.embedding_width is not None and not 1 <= self.embedding_width <= _WIDEST:
            raise UserError(f"--towers.embedding-width is {self.embedding_width}", hint=f"use 1 to {_WIDEST:,}")
        if self.video_norm_eps is not None and not 0 < self.video_norm_eps < 1:
            raise UserError(
                f"--towers.video-norm-eps is {self.video_norm_eps}", hint="it must be more than 0 and less than 1"
            )
        for name in ("patch_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"--towers.{name.replace('_', '-')} is {getattr(self, name)}",
                    hint="it must be 0 or more, and less than 1",
                )
        if self.kind == "videomae":
            refuse_of_clip(self, hint="leave it out, or use --towers.kind clip")


def refuse_of_clip(towers: Towers, *, hint: str) -> None:
    """Raises a UserError where the settings of a videomae tower say what only a tower of the kind clip has."""
    for name, none in _OF_CLIP_ALONE.items():
        value = getattr(towers, name)
        if value != none:
            flag = f"--towers.{name.replace('_', '-')}"
            raise UserError(f"{flag} is {value}, and a videomae tower has none", hint=hint)


def kind_of(towers: Towers) -> Kind:
    """The kind of a video tower, once it is known what weights it starts from."""
    return towers.kind or "clip"


def tubelet_of(towers: Towers) -> int:
    """Frames of a cube of a video tower."""
    return towers.tubelet or _TUBELETS[kind_of(towers)]


def check_picture(model: ModelName, *, size_px: int) -> None:
    """Raises a UserError where pictures of `size_px` do not suit a model."""
    patch_px, only_px = PATCH_PX[model], PICTURE_PX.get(model)
    if only_px is not None and size_px != only_px:
        plain = model.removesuffix(f"-{only_px}")
        raise UserError(
            f"--size-px is {size_px}, and --model {model} is {plain} for pictures of {only_px} px",
            hint=f"use --size-px {only_px}, or --model {plain}",
        )
    if size_px < patch_px or size_px % patch_px:
        raise UserError(f"--size-px is {size_px}", hint=f"it must be a multiple of {patch_px}, the patch of {model}")


def check_frames(towers: Towers, *, num_frames: int) -> None:
    """Raises a UserError where a clip cannot be cut into cubes."""
    tubelet = tubelet_of(towers)
    if num_frames % tubelet:
        raise UserError(
            f"--num-frames {num_frames} cannot be cut into cubes of {tubelet} frames (--towers.tubelet)",
            hint=f"use a multiple of {tubelet} frames, or another --towers.tubelet",
        )


# Settings of the weights that training starts from: a group of the training settings.


FormatChoice = Literal[
    "auto", "open_clip", "openai", "hf", "avion", "lavila", "videomae", "hf_videomae", "hf_timesformer"
]


@dataclass(frozen=True, kw_only=True)
class Init:
    """Weights to start from."""

    weights: str | None = None
    """A file, a folder, a run, or NAME:TAG of open_clip (which downloads it); left out: random weights."""
    format: FormatChoice = "auto"
    """Who wrote the weights; auto: told by the names of the tensors. hf_timesformer: for captioners alone."""
    allow: tuple[str, ...] = ()
    """Patterns of tensors that may be missing, left over or of another shape, such as `video.proj`, `visual.*`."""
    pixel_mean: tuple[float, float, float] | None = None
    """Of R, G and B from 0 to 1, by which pictures are normalised: the weights', else CLIP's (videomae: ImageNet's)."""
    pixel_std: tuple[float, float, float] | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        if self.weights is None and (self.format != "auto" or self.allow):
            raise UserError(
                "--init.format and --init.allow are about weights, and there are none", hint="name them: --init.weights"
            )
        for name, least in (("pixel_mean", 0.0), ("pixel_std", 1e-3)):
            values = getattr(self, name)
            if values is not None and not all(least <= value <= 1 for value in values):
                flag = f"--init.{name.replace('_', '-')}"
                raise UserError(f"{flag} is {values}", hint=f"three numbers from {least:g} to 1, for R, G and B")
