"""Settings of the towers, and of the weights that training starts from."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import SHARE, Checked, GoesWith, Range
from clipmill.train.config.fields import FIRST_RUN, TOWER_SIZES, TOWERS_BY_NAME
from clipmill.train.config.towers import TOWERS

ModelName = Literal["tiny", "s16", "b32", "b16", "l16", "l14", "l14-336"]
Activation = Literal["gelu", "quick_gelu"]
Kind = Literal["clip", "videomae", "timesformer", "library"]
FormatChoice = Literal[
    "auto", "open_clip", "openai", "hf", "avion", "lavila", "videomae", "hf_videomae", "hf_timesformer"
]

# Side of a patch, which the side of a picture must be a multiple of.
PATCH_PX: dict[str, int] = {"tiny": 16, "s16": 16, "b32": 32, "b16": 16, "l16": 16, "l14": 14, "l14-336": 14}
# A name that stands for one size of pictures.
PICTURE_PX: dict[str, int] = {"l14-336": 336}
_KINDS = (
    f"Architecture of the video tower (docs/models.md): {', '.join(TOWERS)}. "
    "Default: that of --init.weights, else that of the task."
)
# What a tower of the kind videomae does not have, and the value that says so.
_OF_CLIP_ALONE = {"embedding_width": None, "patch_dropout": 0.0, "attention": None}
# The kind of a tower that a library builds, and what libraries decide by the name of a tower.
LIBRARY = "library"
_REFERENCE = re.compile(r"(open_clip|timm|hf):\S.*")
_OF_OUR_IMAGE = (
    *("tubelet", "width", "depth", "heads", "mlp_ratio", "patch_px", "video_norm_eps", "attention", "patch_dropout"),
    "drop_path",
)
_OF_OUR_TEXT = ("text_width", "text_depth", "text_heads")
_WIDEST = 65_536
SIZE = Range(1, _WIDEST)
# Of values that are set, or read from the configuration of other weights.
EPS_RANGE = Range(above=0, below=1)
PIXEL_MEAN = Range(0, 1, hint="three numbers from 0 to 1, for R, G and B")
PIXEL_STD = Range(1e-3, 1, hint="three numbers from 0.001 to 1, for R, G and B")


@dataclass(frozen=True, kw_only=True)
class Towers(Checked):
    """Architecture of the towers beyond their size, regularisation in training, and activation checkpointing."""

    prefix = "towers"
    parts = {"kind": TOWERS}  # noqa: RUF012 - a ClassVar of the base

    kind: Annotated[str | None, Parameter(help=_KINDS)] = None
    image: Annotated[str | None, TOWERS_BY_NAME] = None
    """Image tower of a library, applied to each frame: open_clip:NAME, timm:NAME or hf:FOLDER (docs/models.md)."""
    pool_frames: Annotated[Literal["mean", "attention"], TOWERS_BY_NAME, GoesWith("image")] = "mean"
    """Embedding of a clip from those of its frames by --towers.image: their mean, or attention pooling."""
    tubelet: Annotated[int | None, Range(least=1)] = None
    """Frames per patch (tubelet). Default: 1 for clip and timesformer, 2 for videomae."""
    width: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Width of the video tower. Default: that of --model."""
    depth: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of blocks of the video tower. Default: that of --model."""
    heads: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of attention heads per block of the video tower. Default: heads as wide as those of --model."""
    mlp_ratio: Annotated[float, Range(1 / 64, 64), TOWER_SIZES] = 4.0
    """Hidden width of the video tower's MLPs, as a multiple of its width."""
    patch_px: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Patch size in pixels. Default: that of --model."""
    temporal: Annotated[Literal["zero", "random"], GoesWith("kind", (None, "clip", "timesformer"), use="clip")] = "zero"
    """Initialisation of the temporal embedding: zero (AVION's code) or random (AVION's paper)."""
    attention: Literal["joint", "divided"] | None = None
    """Attention of a clip tower: over all patches of a clip, or divided over time and space (the TimeSformer of LaViLa
    and Frozen in Time). Default: that of --init.weights, else joint."""
    embedding_width: Annotated[int | None, SIZE] = None
    """Width of the joint embedding space (AVION: 256). Default: that of --init.weights, else CLIP's."""
    activation: Activation | None = None
    """Activation of the MLPs. Default: that of --init.weights, else gelu (OpenAI's CLIP: quick_gelu)."""
    video_norm_eps: Annotated[float | None, EPS_RANGE] = None
    """Epsilon of the video tower's layer norms. Default: that of --init.weights, else 1e-5 for clip (AVION:
    1e-6), 1e-12 for videomae, 1e-6 for timesformer."""
    packed_text: bool = True
    """Pack captions without padding. Otherwise each is padded to the context length of 77 tokens."""
    patch_dropout: Annotated[float, SHARE] = 0.0
    """Share of the patches dropped in training, drawn per clip (AVION: 0.5)."""
    drop_path: Annotated[float, SHARE] = 0.0
    """Stochastic depth: probability that a block of the video tower is skipped for a clip."""
    drop_path_rule: Literal["rising", "constant"] = "rising"
    """Stochastic depth per block. rising: from 0 in the first block to --towers.drop-path in the last; constant: the
    same in all."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, one more forward pass."""

    def rules(self) -> Iterator[UserError]:
        """Yields settings that the tower does not have."""
        if self.kind == "videomae":
            yield from of_clip_alone(self, hint="leave it out, or use --towers.kind clip")
        if self.attention == "divided" and (self.patch_dropout or (self.tubelet or 1) > 1):
            flag = self.flag("patch_dropout" if self.patch_dropout else "tubelet")
            yield UserError(
                f"--towers.attention is divided, which needs every patch of every frame, and {flag} is not for it",
                hint=f"leave {flag} out, or use --towers.attention joint",
                flags=("--towers.attention", flag),
            )
        if self.image is None:
            if self.kind == LIBRARY:
                yield UserError(
                    f"--towers.kind is {LIBRARY}",
                    hint="name the tower instead, with --towers.image",
                    flags=("--towers.kind",),
                )
            return
        yield from self._of_library("image", self.image, unused=_OF_OUR_IMAGE)
        if self.kind not in (None, LIBRARY):
            yield UserError(
                f"--towers.kind is {self.kind}, and --towers.image names a tower of a library",
                hint="leave out one",
                flags=("--towers.kind", "--towers.image"),
            )

    def _of_library(self, name: str, reference: str, *, unused: tuple[str, ...]) -> Iterator[UserError]:
        """Yields a name of another form, and settings that a library's tower decides by its name."""
        flag = self.flag(name)
        if _REFERENCE.fullmatch(reference) is None:
            yield UserError(f"{flag} is {reference}", hint="use open_clip:NAME, timm:NAME or hf:FOLDER", flags=(flag,))
        defaults = {one.name: one.default for one in fields(self)}
        for other in unused:
            if getattr(self, other) != defaults[other]:
                yield UserError(
                    f"{self.flag(other)} is {getattr(self, other)}, and {flag} {reference} has its own architecture",
                    hint=f"leave out {self.flag(other)} or {flag}",
                    flags=(self.flag(other), flag),
                )


@dataclass(frozen=True, kw_only=True)
class DualEncoderTowers(Towers):
    """Architecture of a video tower and a text tower."""

    text_width: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Width of the text tower. Default: that of --model."""
    text_depth: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of blocks of the text tower. Default: that of --model."""
    text_heads: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of attention heads per block of the text tower. Default: heads as wide as those of --model."""
    text: Annotated[str | None, TOWERS_BY_NAME] = None
    """Text tower of a library with its own tokenizer: open_clip:NAME or hf:FOLDER (docs/models.md)."""
    text_pooling: Annotated[Literal["own", "mean", "first", "last"], TOWERS_BY_NAME, GoesWith("text")] = "own"
    """Embedding of a text from its tokens, of --towers.text hf: the model's own, their mean, the first or the last."""
    context_length: Annotated[int | None, Range(4, 8192)] = None
    """Number of tokens of a text. Default: that of the text tower or --init.weights (CLIP: 77). Longer ones stretch the
    positional embeddings of a CLIP: 20 are kept, the others interpolated (Long-CLIP: 248)."""

    def rules(self) -> Iterator[UserError]:
        """Yields settings that the towers do not have."""
        yield from super().rules()
        if self.text is not None:
            yield from self._of_library("text", self.text, unused=_OF_OUR_TEXT)
            if self.text.startswith("timm:"):
                yield UserError(
                    f"--towers.text is {self.text}, and timm has image towers only",
                    hint="use open_clip",
                    flags=("--towers.text",),
                )


def of_clip_alone(towers: Towers, *, hint: str) -> Iterator[UserError]:
    """Yields the settings of a videomae tower that only towers of the kind clip have."""
    for name, none in _OF_CLIP_ALONE.items():
        value = getattr(towers, name)
        if value != none:
            yield UserError(
                f"{towers.flag(name)} is {value}, and a videomae tower has none", hint=hint, flags=(towers.flag(name),)
            )


def kind_of(towers: Towers) -> str:
    """The kind of a video tower, once it is known what weights it starts from."""
    return towers.kind or ("clip" if towers.image is None else LIBRARY)


def tubelet_of(towers: Towers) -> int:
    """Frames of a cube of a video tower."""
    spec = TOWERS.find_usable(kind_of(towers))  # whose absence is reported where the tower is needed
    return towers.tubelet or (1 if spec is None else spec.tubelet)


def patch_px_of(model: ModelName, towers: Towers) -> int:
    """Side of the patches of a model of pixels."""
    return towers.patch_px or PATCH_PX[model]


def check_picture(model: ModelName, towers: Towers, *, size_px: int) -> None:
    """Raises a UserError if a model cannot take frames of `size_px`; a library's tower is asked when it is built."""
    if towers.image is not None:
        return
    patch_px, only_px = patch_px_of(model, towers), None if towers.patch_px else PICTURE_PX.get(model)
    if only_px is not None and size_px != only_px:
        plain = model.removesuffix(f"-{only_px}")
        raise UserError(
            f"--size-px is {size_px}, and --model {model} is {plain} for pictures of {only_px} px",
            hint=f"use --size-px {only_px}, or --model {plain}",
            flags=("--size-px", "--model"),
        )
    if size_px < patch_px or size_px % patch_px:
        whose = "" if towers.patch_px else f" of {model}"
        raise UserError(
            f"--size-px is {size_px}",
            hint=f"it must be a multiple of {patch_px}, the patch{whose}",
            flags=("--size-px",),
        )


def check_frames(towers: Towers, *, num_frames: int) -> None:
    """Raises a UserError if a clip cannot be cut into cubes."""
    tubelet = tubelet_of(towers)
    if num_frames % tubelet:
        raise UserError(
            f"--num-frames {num_frames} cannot be cut into cubes of {tubelet} frames (--towers.tubelet)",
            hint=f"use a multiple of {tubelet} frames, or another --towers.tubelet",
            flags=("--num-frames", "--towers.tubelet"),
        )


@dataclass(frozen=True, kw_only=True)
class Init(Checked):
    """Weights to start from."""

    prefix = "init"

    weights: Annotated[str | None, FIRST_RUN] = None
    """Initial weights: file, folder, run or NAME:TAG. NAME:TAG is of open_clip, which downloads it. Default: random."""
    format: FormatChoice = "auto"
    """Format of --init.weights. auto: detected from the tensor names; hf_timesformer: for train caption only."""
    allow: tuple[str, ...] = ()
    """Patterns of tensors that may be missing, unexpected or of another shape, such as `video.proj` or `visual.*`."""
    pixel_mean: Annotated[tuple[float, float, float] | None, PIXEL_MEAN] = None
    """Mean of R, G and B for normalisation. Default: that of --init.weights, else CLIP's (videomae:
    ImageNet's)."""
    pixel_std: Annotated[tuple[float, float, float] | None, PIXEL_STD] = None
    """Standard deviation of R, G and B for normalisation. Default: see --init.pixel-mean."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All weights that are named."""
        return () if self.weights is None else (self.weights,)

    def rules(self) -> Iterator[UserError]:
        """Yields flags about initial weights if there are none."""
        if self.weights is None and (self.format != "auto" or self.allow):
            yield UserError(
                "--init.format and --init.allow are about weights, and there are none",
                hint="name them: --init.weights",
                flags=("--init.format", "--init.allow"),
            )


@dataclass(frozen=True, kw_only=True)
class DualEncoderInit(Init):
    """Weights to start from, of one source or of one for each tower."""

    text: str | None = None
    """Initial weights of the text tower, named like --init.weights, which then has those of the video tower alone.
    Default: --init.weights has both."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All weights that are named."""
        return super().sources + (() if self.text is None else (self.text,))

    def rules(self) -> Iterator[UserError]:
        """Yields weights of the text tower alone."""
        yield from super().rules()
        if self.text is not None and self.weights is None:
            yield UserError(
                f"--init.text is {self.text}, and the video tower has no weights",
                hint="name them: --init.weights",
                flags=("--init.text",),
            )
