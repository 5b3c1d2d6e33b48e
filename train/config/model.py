"""Settings of the model: its towers, initial weights, frozen parts and adapters."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import Parts, import_object
from clipmill.manifests.settings import SHARE, Checked, GoesWith, Range
from clipmill.train.config.fields import FIRST_RUN, MODEL, SEVERAL, TOWER_SIZES, TOWERS_BY_NAME


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """A video tower, with the facts about it that the settings need.

    Attributes:
        name: Value of `--towers.kind`.
        build: Import path of a function or class that builds the tower of a dual encoder from the arguments (size,
            image_px, num_frames, embedding_width, attend, towers). The tower embeds clips [B, C, T, H, W] as vectors
            [B, embedding_width], which are not normalised. `size` is a `VideoViTSize`, and `towers` are the settings
            `--towers.*`. None if dual encoders do not support the tower.
        tubelet: Frames per cube; --towers.tubelet replaces it.
    """

    name: str
    build: str | None
    tubelet: int = 1

    def load(self) -> Callable[..., Any]:
        """Return the function or class that `build` names."""
        assert self.build is not None
        build: Callable[..., Any] = import_object(self.build)
        return build


_ROWS = (
    TowerSpec(name="clip", build="clipmill.train.models.video_vit:clip_tower"),
    TowerSpec(name="videomae", build=None, tubelet=2),
    TowerSpec(name="timesformer", build=None),
    # Towers from open_clip, timm and transformers, named by --towers.image.
    TowerSpec(name="library", build="clipmill.train.models.library_towers:image_tower"),
)
TOWERS = Parts("tower", group="towers", kind=TowerSpec, builtin={row.name: row for row in _ROWS})


ModelName = Literal["tiny", "s16", "b32", "b16", "l16", "l14", "l14-336"]
Activation = Literal["gelu", "quick_gelu"]
Kind = Literal["clip", "videomae", "timesformer", "library"]
ViewRule = Literal["mean", "concat"]
FormatChoice = Literal[
    "auto", "open_clip", "openai", "hf", "avion", "lavila", "videomae", "hf_videomae", "hf_timesformer"
]

# Side of a patch in pixels. The side of a picture must be a multiple of it.
PATCH_PX: dict[str, int] = {"tiny": 16, "s16": 16, "b32": 32, "b16": 16, "l16": 16, "l14": 14, "l14-336": 14}
# Names that imply a picture size, in pixels.
PICTURE_PX: dict[str, int] = {"l14-336": 336}
_KINDS = (
    f"Architecture of the video tower (docs/models.md): {', '.join(TOWERS)}. "
    "Default: from --init.weights, else the task's."
)
# Settings that towers of the kind videomae lack, with the values that mean "none".
_OF_CLIP_ALONE = {"embedding_width": None, "patch_dropout": 0.0, "attention": None}
# The kind of all towers from libraries. The name of such a tower determines some settings.
LIBRARY = "library"
_REFERENCE = re.compile(r"(open_clip|timm|hf):\S.*")
_OF_OUR_IMAGE = (
    *("tubelet", "width", "depth", "heads", "mlp_ratio", "patch_px", "video_norm_eps", "attention", "patch_dropout"),
    "drop_path",
)
_OF_OUR_TEXT = ("text_width", "text_depth", "text_heads")
_WIDEST = 65_536
SIZE = Range(1, _WIDEST)
# Ranges of values that the user sets, or that are read from the configuration of other weights.
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
    """Embedding of a clip from the embeddings of its frames by --towers.image: their mean, or attention pooling."""
    tubelet: Annotated[int | None, Range(least=1)] = None
    """Frames per patch (tubelet). Default: 1 for clip and timesformer, 2 for videomae."""
    width: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Width of the video tower. Default: from --model."""
    depth: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of blocks of the video tower. Default: from --model."""
    heads: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of attention heads per block of the video tower. Default: heads as wide as in --model."""
    mlp_ratio: Annotated[float, Range(1 / 64, 64), TOWER_SIZES] = 4.0
    """Hidden width of the video tower's MLPs, as a multiple of its width."""
    patch_px: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Patch size in pixels. Default: from --model."""
    temporal: Annotated[Literal["zero", "random"], GoesWith("kind", (None, "clip", "timesformer"), use="clip")] = "zero"
    """Initialisation of the temporal embedding: zero (AVION's code) or random (AVION's paper)."""
    attention: Literal["joint", "divided"] | None = None
    """Attention of a clip tower: over all patches of a clip, or divided over time and space (the TimeSformer of LaViLa
    and Frozen in Time). Default: from --init.weights, else joint."""
    views: ViewRule = "mean"
    """Embedding of the --views of a moment. mean: the mean of their embeddings; concat: their tokens are concatenated
    and attend to each other."""
    embedding_width: Annotated[int | None, SIZE] = None
    """Width of the joint embedding space (AVION: 256). Default: from --init.weights, else CLIP's."""
    activation: Activation | None = None
    """Activation of the MLPs. Default: from --init.weights, else gelu (OpenAI's CLIP: quick_gelu)."""
    video_norm_eps: Annotated[float | None, EPS_RANGE] = None
    """Epsilon of the video tower's layer norms. Default: from --init.weights, else 1e-5 for clip (AVION:
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
        """Yield errors for settings that the tower lacks."""
        if self.kind == "videomae":
            yield from of_clip_alone(self, hint="omit it, or use --towers.kind clip")
        if self.attention == "divided" and (self.patch_dropout or (self.tubelet or 1) > 1):
            flag = self.flag("patch_dropout" if self.patch_dropout else "tubelet")
            yield UserError(
                f"--towers.attention is divided, which needs every patch of every frame; {flag} removes some",
                hint=f"omit {flag}, or use --towers.attention joint",
                flags=("--towers.attention", flag),
            )
        if self.image is None:
            if self.kind == LIBRARY:
                yield UserError(
                    f"--towers.kind is {LIBRARY}",
                    hint="name the tower with --towers.image instead",
                    flags=("--towers.kind",),
                )
            return
        yield from self._of_library("image", self.image, unused=_OF_OUR_IMAGE)
        if self.kind not in (None, LIBRARY):
            yield UserError(
                f"--towers.kind is {self.kind}, and --towers.image names a tower of a library",
                hint="omit one of them",
                flags=("--towers.kind", "--towers.image"),
            )

    def _of_library(self, name: str, reference: str, *, unused: tuple[str, ...]) -> Iterator[UserError]:
        """Yield errors for an invalid name, and for settings that the name of a library's tower determines."""
        flag = self.flag(name)
        if _REFERENCE.fullmatch(reference) is None:
            yield UserError(f"{flag} is {reference}", hint="use open_clip:NAME, timm:NAME or hf:FOLDER", flags=(flag,))
        defaults = {setting.name: setting.default for setting in fields(self)}
        for other in unused:
            if getattr(self, other) != defaults[other]:
                yield UserError(
                    f"{self.flag(other)} is {getattr(self, other)}, and {flag} {reference} has its own architecture",
                    hint=f"omit {self.flag(other)} or {flag}",
                    flags=(self.flag(other), flag),
                )


@dataclass(frozen=True, kw_only=True)
class DualEncoderTowers(Towers):
    """Architecture of a video tower and a text tower."""

    text_width: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Width of the text tower. Default: from --model."""
    text_depth: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of blocks of the text tower. Default: from --model."""
    text_heads: Annotated[int | None, SIZE, TOWER_SIZES] = None
    """Number of attention heads per block of the text tower. Default: heads as wide as in --model."""
    text: Annotated[str | None, TOWERS_BY_NAME] = None
    """Text tower of a library with its own tokenizer: open_clip:NAME or hf:FOLDER (docs/models.md)."""
    text_pooling: Annotated[Literal["own", "mean", "first", "last"], TOWERS_BY_NAME, GoesWith("text")] = "own"
    """Embedding of a text from its tokens, of --towers.text hf: the model's own, their mean, the first or the last."""
    context_length: Annotated[int | None, Range(4, 8192)] = None
    """Number of tokens of a text. Default: from the text tower or --init.weights (CLIP: 77). Longer texts stretch the
    positional embeddings of a CLIP: 20 are kept, the others interpolated (Long-CLIP: 248)."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors for settings that the towers lack."""
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
    """Yield errors for settings that only towers of the kind clip have, if the tower is of the kind videomae."""
    for name, none in _OF_CLIP_ALONE.items():
        value = getattr(towers, name)
        if value != none:
            yield UserError(
                f"{towers.flag(name)} is {value}, and a videomae tower has none", hint=hint, flags=(towers.flag(name),)
            )


def kind_of(towers: Towers) -> str:
    """Return the kind of a video tower. Call it once the initial weights are known."""
    return towers.kind or ("clip" if towers.image is None else LIBRARY)


def tubelet_of(towers: Towers) -> int:
    """Return the number of frames per cube of a video tower."""
    spec = TOWERS.find_usable(kind_of(towers))  # a missing tower is reported where it is needed
    return towers.tubelet or (1 if spec is None else spec.tubelet)


def patch_px_of(model: ModelName, towers: Towers) -> int:
    """Return the side of the patches of a model for pixels."""
    return towers.patch_px or PATCH_PX[model]


def check_picture(model: ModelName, towers: Towers, *, size_px: int) -> None:
    """Raise a UserError if a model cannot take frames of `size_px`. A library's tower is checked when it is built."""
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
    """Raise a UserError if a clip cannot be cut into cubes."""
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
    """Mean of R, G and B for normalisation. Default: from --init.weights, else CLIP's (videomae:
    ImageNet's)."""
    pixel_std: Annotated[tuple[float, float, float] | None, PIXEL_STD] = None
    """Standard deviation of R, G and B for normalisation. Default: see --init.pixel-mean."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Named weights."""
        return () if self.weights is None else (self.weights,)

    def rules(self) -> Iterator[UserError]:
        """Yield errors for flags of initial weights if there are no weights."""
        if self.weights is None and (self.format != "auto" or self.allow):
            yield UserError(
                "--init.format and --init.allow need initial weights",
                hint="name the weights with --init.weights",
                flags=("--init.format", "--init.allow"),
            )


@dataclass(frozen=True, kw_only=True)
class DualEncoderInit(Init):
    """Weights to start from: one source, or one source for each tower."""

    text: str | None = None
    """Initial weights of the text tower, named like --init.weights, which then has only the weights of the video
    tower. Default: --init.weights has both."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Named weights."""
        return super().sources + (() if self.text is None else (self.text,))

    def rules(self) -> Iterator[UserError]:
        """Yield an error if only the text tower has weights."""
        yield from super().rules()
        if self.text is not None and self.weights is None:
            yield UserError(
                f"--init.text is {self.text}, and the video tower has no weights",
                hint="name weights with --init.weights",
                flags=("--init.text",),
            )


Target = Literal["attention", "mlp"]
Tower = Literal["video", "text", "decoder"]

Freeze = Annotated[tuple[str, ...], MODEL, SEVERAL]

_PART = re.compile(r"(?P<tower>video|text|decoder)(?:\.blocks:(?P<count>\d{1,4}))?")
# Alternative names of parts.
_ALIASES = {"encoder": "video"}
_WITH_CROSS_ATTENTION_TRAINED = "decoder-except-cross-attention"
_OF_ADAPTERS = GoesWith("rank", use="8")


@dataclass(frozen=True, kw_only=True)
class Lora(Checked):
    """Low-rank adapters of linear layers (Hu et al. 2021)."""

    prefix = "lora"

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of LoRA adapters. The towers that have them keep their initial weights. 0: no adapters."""
    alpha: Annotated[float | None, Range(above=0, most=1e6), _OF_ADAPTERS] = None
    """LoRA scale: outputs of adapters are multiplied by alpha / rank. Default: the rank, which is a factor of 1."""
    targets: Annotated[tuple[Target, ...], _OF_ADAPTERS] = ("attention", "mlp")
    """Layers with adapters: the projections of attention, the layers of MLPs, or both."""
    towers: Annotated[tuple[Tower, ...], _OF_ADAPTERS] = ()
    """Towers with adapters. Default: video and text, if the model has them and they are not frozen."""

    @property
    def scale(self) -> float:
        """Factor for the output of adapters."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def rules(self) -> Iterator[UserError]:
        """Yield an error for adapters without layers."""
        if self.rank and not self.targets:
            yield UserError(
                "--lora.targets names no layers", hint="use attention, mlp, or both", flags=("--lora.targets",)
            )


@dataclass(frozen=True)
class FrozenPart:
    """A part of a model that keeps its initial weights.

    Attributes:
        tower: Name of the module.
        num_blocks: Number of frozen blocks; everything before the first block is also frozen. None for the complete
            tower.
        trains_cross_attention: True if the cross-attention of the tower is nevertheless trained.
        given: Value of --freeze.
    """

    tower: str
    num_blocks: int | None = None
    trains_cross_attention: bool = False
    given: str = field(default="", compare=False)

    @property
    def is_whole(self) -> bool:
        """True if no part of the tower is trained."""
        return self.num_blocks is None and not self.trains_cross_attention


def frozen_part(name: str) -> FrozenPart:
    """Return the part that a value of --freeze names: `video`, `text.blocks:6`, `blocks:6` (of the video tower).

    Raises:
        UserError: The value names no part.
    """
    if name == _WITH_CROSS_ATTENTION_TRAINED:
        return FrozenPart("decoder", trains_cross_attention=True, given=name)
    match = _PART.fullmatch(_ALIASES.get(name, f"video.{name}" if name.startswith("blocks:") else name))
    if match is None:
        raise UserError(
            f"--freeze is {name}",
            hint="name a tower (video, text), or the first N blocks of one (blocks:N, text.blocks:N)",
            flags=("--freeze",),
        )
    return FrozenPart(match["tower"], None if match["count"] is None else int(match["count"]), given=name)


def random_freeze_warning(freeze: Sequence[str]) -> str:
    """Return a warning about --freeze for a model with random weights; empty if only a decoder is frozen."""
    names = [part.given for part in map(frozen_part, freeze) if part.tower != "decoder"]
    return f"--freeze {' '.join(names)} keeps random weights: there are no --init.weights" if names else ""


def towers_to_adapt(lora: Lora, freeze: Sequence[str], *, towers: Sequence[Tower]) -> tuple[Tower, ...]:
    """Return the towers of a model that get adapters."""
    if not lora.rank:
        return ()
    whole = {part.tower for part in map(frozen_part, freeze) if part.is_whole}
    return lora.towers or tuple(tower for tower in towers if tower != "decoder" and tower not in whole)


def tuning_mistakes(
    freeze: Sequence[str], lora: Lora, *, towers: Sequence[Tower], has_head: bool, has_weights: bool
) -> Iterator[UserError]:
    """Yield errors for --freeze and --lora.* with a given model.

    Args:
        towers: Towers of the model.
        has_head: True if the model also has other trained parameters.
        has_weights: True if --init.weights names initial weights.
    """
    parts = []
    for name in freeze:
        try:
            parts.append(frozen_part(name))
        except UserError as error:
            yield error
            return
        if parts[-1].tower not in towers:
            yield _no_tower(f"--freeze {name}", parts[-1].tower, towers)
            return
    whole = {part.tower for part in parts if part.is_whole}
    if not has_head and whole >= set(towers):
        hint = "omit one of them" if len(freeze) > 1 else "omit it, or freeze the first blocks: blocks:N"
        yield UserError(f"--freeze {' '.join(freeze)} leaves nothing to train", hint=hint, flags=("--freeze",))
        return
    if not lora.rank:
        return
    if not has_weights:
        yield UserError(
            f"--lora.rank is {lora.rank}, and adapters are for pretrained weights",
            hint="name the weights to adapt with --init.weights, or train without --lora.rank",
            flags=("--lora.rank",),
        )
    for tower in lora.towers:
        if tower not in towers:
            yield _no_tower(f"--lora.towers {tower}", tower, towers)
        elif tower in whole:
            yield UserError(
                f"--lora.towers {tower} adapts a tower that --freeze {' '.join(freeze)} freezes",
                hint="leave the tower out of one of them: the weights of a tower with adapters are always frozen",
                flags=("--lora.towers", "--freeze"),
            )
    if not towers_to_adapt(lora, freeze, towers=towers):
        yield UserError(
            f"--lora.rank is {lora.rank}, and --freeze {' '.join(freeze)} leaves no tower to adapt",
            hint="omit one of them",
            flags=("--lora.rank", "--freeze"),
        )


def _no_tower(flag: str, tower: str, towers: Sequence[str]) -> UserError:
    return UserError(f"{flag}: the model has no {tower} tower", hint=f"it has: {', '.join(towers)}", flags=(flag,))
