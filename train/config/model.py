"""Settings of the model: its towers, initial weights, frozen parts and adapters."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import Parts, import_object
from clipmill.manifests.settings import FRACTION, Checked, GoesWith, Range
from clipmill.train.config.fields import FIRST_RUN, MODEL, SEVERAL, TOWER_SIZES, TOWERS_BY_NAME


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """Description of a kind of video tower.

    Attributes:
        name: Value of `--towers.kind`.
        build: Import path of a function or class that builds the tower of a dual encoder from the arguments (size,
            image_px, num_frames, embedding_width, attend, towers). `size` is a `VideoViTSize`, and `towers` are the
            settings `--towers.*`. The tower embeds clips [B, C, T, H, W] as vectors [B, embedding_width], which are
            not scaled to unit length. None if dual encoders do not support the tower.
        tubelet: Default number of frames per tubelet; --towers.tubelet overrides it.
    """

    name: str
    build: str | None
    tubelet: int = 1

    def load(self) -> Callable[..., Any]:
        """Import the function or class at `build`."""
        assert self.build is not None
        build: Callable[..., Any] = import_object(self.build)
        return build


_ROWS = (
    TowerSpec(name="clip", build="clipmill.train.models.video_vit:clip_tower"),
    TowerSpec(name="videomae", build=None, tubelet=2),
    TowerSpec(name="timesformer", build=None),
    # Towers from open_clip, timm and transformers, selected with --towers.image.
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

# Patch size in pixels. The frame size must be a multiple of the patch size.
PATCH_PX: dict[str, int] = {"tiny": 16, "s16": 16, "b32": 32, "b16": 16, "l16": 16, "l14": 14, "l14-336": 14}
# Models whose names imply a frame size, in pixels.
FIXED_FRAME_PX: dict[str, int] = {"l14-336": 336}
_KINDS = (
    f"Architecture of the video tower (docs/models.md): {', '.join(TOWERS)}. "
    "Default: from --init.weights, else the default of the task."
)
# Settings that do not apply to towers of the kind videomae, each with the value that means "not set".
_CLIP_ONLY = {"embedding_width": None, "patch_dropout": 0.0, "attention": None}
LIBRARY = "library"  # kind of all towers from libraries
_REFERENCE = re.compile(r"(open_clip|timm|hf):\S.*")
# Settings that --towers.image and --towers.text determine.
_FIXED_BY_IMAGE = (
    *("tubelet", "width", "depth", "heads", "mlp_ratio", "patch_px", "video_norm_eps", "attention", "patch_dropout"),
    "drop_path",
)
_FIXED_BY_TEXT = ("text_width", "text_depth", "text_heads")
SIZE = Range(1, 65_536)
# Ranges of values that the user sets, or that come from the configuration of pretrained weights.
EPS_RANGE = Range(above=0, below=1)
PIXEL_MEAN = Range(0, 1, hint="use three numbers from 0 to 1, for R, G and B")
PIXEL_STD = Range(1e-3, 1, hint="use three numbers from 0.001 to 1, for R, G and B")


@dataclass(frozen=True, kw_only=True)
class Towers(Checked):
    """Architecture of the towers, regularisation in training, and activation checkpointing."""

    prefix = "towers"
    parts = {"kind": TOWERS}  # noqa: RUF012 - a ClassVar of the base

    kind: Annotated[str | None, Parameter(help=_KINDS)] = None
    image: Annotated[str | None, TOWERS_BY_NAME] = None
    """Image tower from a library, applied to each frame: open_clip:NAME, timm:NAME or hf:FOLDER (docs/models.md)."""
    pool_frames: Annotated[Literal["mean", "attention"], TOWERS_BY_NAME, GoesWith("image")] = "mean"
    """Pooling of the frame embeddings of --towers.image into a clip embedding: mean or attention pooling."""
    tubelet: Annotated[int | None, Range(least=1)] = None
    """Frames per patch (tubelet). Default: from --init.weights, else 1 for clip and timesformer, 2 for videomae."""
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
    """Attention of a clip tower. joint: over all patches of a clip; divided: over time and space separately (the
    TimeSformer of LaViLa and Frozen in Time). Default: from --init.weights, else joint."""
    views: ViewRule = "mean"
    """Combination of the --views of a moment into one embedding. mean: mean of the embeddings of the views; concat: the
    tokens of all views are concatenated and attend to each other."""
    embedding_width: Annotated[int | None, SIZE] = None
    """Width of the joint embedding space (AVION: 256). Default: from --init.weights or the library of a tower, else
    from --model."""
    activation: Activation | None = None
    """Activation of the MLPs. Default: from --init.weights, else gelu (OpenAI's CLIP: quick_gelu)."""
    video_norm_eps: Annotated[float | None, EPS_RANGE] = None
    """Epsilon of the video tower's layer norms. Default: from --init.weights, else 1e-5 for clip (AVION:
    1e-6), 1e-12 for videomae, 1e-6 for timesformer."""
    packed_text: bool = True
    """Pack captions without padding. Otherwise, each caption is padded to the context length."""
    patch_dropout: Annotated[float, FRACTION] = 0.0
    """Fraction of patches to drop in training. The patches are drawn for each clip (AVION: 0.5)."""
    drop_path: Annotated[float, FRACTION] = 0.0
    """Stochastic depth: probability that a residual branch in a block of the video tower is skipped for a clip."""
    drop_path_rule: Literal["rising", "constant"] = "rising"
    """Probability of stochastic depth per block. rising: from 0 in the first block to --towers.drop-path in the last;
    constant: --towers.drop-path in all blocks."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and costs one more forward pass."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error for each setting that does not apply to the tower, and for an invalid --towers.image."""
        if self.kind == "videomae":
            yield from clip_only_mistakes(self, hint="omit it, or use --towers.kind clip")
        if self.attention == "divided" and (self.patch_dropout or (self.tubelet or 1) > 1):
            flag = self.flag("patch_dropout" if self.patch_dropout else "tubelet")
            yield UserError(
                f"--towers.attention divided needs every patch of every frame, but {flag} drops or merges some",
                hint=f"omit {flag}, or use --towers.attention joint",
                flags=("--towers.attention", flag),
            )
        if self.image is None:
            if self.kind == LIBRARY:
                yield UserError(
                    f"--towers.kind {LIBRARY} does not specify a tower",
                    hint="use --towers.image instead",
                    flags=("--towers.kind",),
                )
            return
        yield from self._library_mistakes("image", self.image, unused=_FIXED_BY_IMAGE)
        if self.kind not in (None, LIBRARY):
            yield UserError(
                f"--towers.image names a tower from a library, but --towers.kind is {self.kind}",
                hint="omit one of them",
                flags=("--towers.kind", "--towers.image"),
            )

    def _library_mistakes(self, name: str, reference: str, *, unused: tuple[str, ...]) -> Iterator[UserError]:
        """Yield errors for an invalid name of a tower from a library, and for settings that this name determines."""
        flag = self.flag(name)
        if _REFERENCE.fullmatch(reference) is None:
            yield UserError(
                f"{flag} {reference} does not name a tower from a library",
                hint="use open_clip:NAME, timm:NAME or hf:FOLDER",
                flags=(flag,),
            )
        defaults = {setting.name: setting.default for setting in fields(self)}
        for setting in unused:
            if getattr(self, setting) != defaults[setting]:
                yield UserError(
                    f"{self.flag(setting)} is {getattr(self, setting)}, but {flag} {reference} fixes the architecture",
                    hint=f"omit {self.flag(setting)} or {flag}",
                    flags=(self.flag(setting), flag),
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
    """Text tower from a library, with its own tokenizer: open_clip:NAME or hf:FOLDER (docs/models.md)."""
    text_pooling: Annotated[Literal["own", "mean", "first", "last"], TOWERS_BY_NAME, GoesWith("text")] = "own"
    """Pooling of the token embeddings of --towers.text hf:FOLDER. own: as in the model; mean: their mean; first, last:
    the first or last token."""
    context_length: Annotated[int | None, Range(4, 8192)] = None
    """Maximum number of tokens per text. Default: from the text tower or --init.weights (CLIP: 77). If CLIP weights
    have a smaller maximum, their first 20 positional embeddings are kept, and the others are interpolated (Long-CLIP:
    248)."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error for each setting that does not apply to the towers, and for an invalid --towers.text."""
        yield from super().rules()
        if self.text is not None:
            yield from self._library_mistakes("text", self.text, unused=_FIXED_BY_TEXT)
            if self.text.startswith("timm:"):
                yield UserError(
                    f"--towers.text is {self.text}, but timm has only image towers",
                    hint="use open_clip:NAME or hf:FOLDER",
                    flags=("--towers.text",),
                )


def clip_only_mistakes(towers: Towers, *, hint: str) -> Iterator[UserError]:
    """Yield an error for each setting of a videomae tower that applies only to clip towers."""
    for name, unset_value in _CLIP_ONLY.items():
        value = getattr(towers, name)
        if value != unset_value:
            flag = towers.flag(name)
            yield UserError(f"{flag} {value} does not apply to a videomae tower", hint=hint, flags=(flag,))


def kind_of(towers: Towers) -> str:
    """Return the kind of a video tower. The kind must already have been read from the initial weights, if any."""
    return towers.kind or ("clip" if towers.image is None else LIBRARY)


def tubelet_of(towers: Towers) -> int:
    """Return the number of frames per tubelet of a video tower."""
    spec = TOWERS.find_usable(kind_of(towers))  # a missing tower is reported by the code that needs it
    return towers.tubelet or (1 if spec is None else spec.tubelet)


def patch_px_of(model: ModelName, towers: Towers) -> int:
    """Return the patch size, in pixels, of a model that takes pixels."""
    return towers.patch_px or PATCH_PX[model]


def check_frame_size(model: ModelName, towers: Towers, *, size_px: int) -> None:
    """Raise a UserError if frames of `size_px` do not fit a model. Towers from libraries are checked when built."""
    if towers.image is not None:
        return
    patch_px, fixed_px = patch_px_of(model, towers), None if towers.patch_px else FIXED_FRAME_PX.get(model)
    if fixed_px is not None and size_px != fixed_px:
        any_size = model.removesuffix(f"-{fixed_px}")
        raise UserError(
            f"--size-px is {size_px}, but --model {model} is {any_size} for frames of {fixed_px} px",
            hint=f"use --size-px {fixed_px}, or --model {any_size}",
            flags=("--size-px", "--model"),
        )
    if size_px < patch_px or size_px % patch_px:
        source = "" if towers.patch_px else f" of {model}"
        raise UserError(
            f"--size-px {size_px} is not a multiple of {patch_px}, the patch size{source}",
            hint=f"use a multiple of {patch_px}",
            flags=("--size-px",),
        )


def check_num_frames(towers: Towers, *, num_frames: int) -> None:
    """Raise a UserError if a clip cannot be cut into tubelets."""
    tubelet = tubelet_of(towers)
    if num_frames % tubelet:
        raise UserError(
            f"--num-frames {num_frames} is not a multiple of {tubelet}, the number of frames per tubelet",
            hint=f"use a multiple of {tubelet}, or another --towers.tubelet",
            flags=("--num-frames", "--towers.tubelet"),
        )


@dataclass(frozen=True, kw_only=True)
class Init(Checked):
    """Initial weights."""

    prefix = "init"

    weights: Annotated[str | None, FIRST_RUN] = None
    """Initial weights: file, folder, run, or a name to download: open_clip's NAME:TAG, or hf:NAME on the Hugging Face
    Hub. Default: random."""
    format: FormatChoice = "auto"
    """Format of --init.weights. auto: detected from the tensor names; hf_timesformer: only for train caption."""
    allow: tuple[str, ...] = ()
    """Name patterns of tensors that may be missing, unexpected or of a different shape, such as `video.proj` or
    `visual.*`."""
    pixel_mean: Annotated[tuple[float, float, float] | None, PIXEL_MEAN] = None
    """Mean of R, G and B for normalisation. Default: from --init.weights, else the mean of the kind of tower (clip:
    CLIP's; videomae: ImageNet's; timesformer: 0.45; library: the library's)."""
    pixel_std: Annotated[tuple[float, float, float] | None, PIXEL_STD] = None
    """Standard deviation of R, G and B for normalisation. Default: see --init.pixel-mean."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of all initial weights."""
        return () if self.weights is None else (self.weights,)

    def rules(self) -> Iterator[UserError]:
        """Yield an error for --init.format and --init.allow without initial weights."""
        if self.weights is None and (self.format != "auto" or self.allow):
            yield UserError(
                "--init.format and --init.allow need initial weights",
                hint="add --init.weights",
                flags=("--init.format", "--init.allow"),
            )


@dataclass(frozen=True, kw_only=True)
class DualEncoderInit(Init):
    """Initial weights: one source for both towers, or one source for each tower."""

    text: str | None = None
    """Initial weights of the text tower, in the same form as --init.weights. --init.weights then applies only to
    the video tower. Default: --init.weights for both towers."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of all initial weights."""
        return super().sources + (() if self.text is None else (self.text,))

    def rules(self) -> Iterator[UserError]:
        """Yield an error if only the text tower has weights."""
        yield from super().rules()
        if self.text is not None and self.weights is None:
            yield UserError(
                f"--init.text is {self.text}, but the video tower has no weights",
                hint="add --init.weights",
                flags=("--init.text",),
            )


Target = Literal["attention", "mlp"]
Tower = Literal["video", "text", "decoder"]

Freeze = Annotated[tuple[str, ...], MODEL, SEVERAL]

_PART = re.compile(r"(?P<tower>video|text|decoder)(?:\.blocks:(?P<count>\d{1,4}))?")
# Alternative names for parts of a model.
_ALIASES = {"encoder": "video"}
_EXCEPT_CROSS_ATTENTION = "decoder-except-cross-attention"
_WITH_RANK = GoesWith("rank", use="8")


@dataclass(frozen=True, kw_only=True)
class Lora(Checked):
    """Low-rank adapters for linear layers (LoRA, Hu et al. 2021)."""

    prefix = "lora"

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of LoRA adapters. Towers with adapters keep their initial weights. 0: no adapters."""
    alpha: Annotated[float | None, Range(above=0, most=1e6), _WITH_RANK] = None
    """LoRA scale: the outputs of adapters are multiplied by alpha / rank. Default: the rank, for a factor of 1."""
    targets: Annotated[tuple[Target, ...], _WITH_RANK] = ("attention", "mlp")
    """Layers with adapters: the projections of attention, the layers of MLPs, or both."""
    towers: Annotated[tuple[Tower, ...], _WITH_RANK] = ()
    """Towers with adapters. Default: video and text, if the model has them and they are not frozen."""

    @property
    def scale(self) -> float:
        """Factor for the outputs of adapters."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def rules(self) -> Iterator[UserError]:
        """Yield an error for adapters without layers."""
        if self.rank and not self.targets:
            yield UserError(
                "--lora.targets selects no layers", hint="use attention, mlp, or both", flags=("--lora.targets",)
            )


@dataclass(frozen=True)
class FrozenPart:
    """Part of a model that keeps its initial weights.

    Attributes:
        tower: Name of the module.
        num_blocks: Number of frozen blocks. Everything before the first block is also frozen. None if the complete
            tower is frozen.
        trains_cross_attention: True if the cross-attention of the tower is not frozen.
        value: Value of --freeze.
    """

    tower: str
    num_blocks: int | None = None
    trains_cross_attention: bool = False
    value: str = field(default="", compare=False)

    @property
    def is_complete(self) -> bool:
        """True if no part of the tower is trained."""
        return self.num_blocks is None and not self.trains_cross_attention


def frozen_part(name: str) -> FrozenPart:
    """Parse a value of --freeze, such as `video`, `text.blocks:6` or `blocks:6` (video tower).

    Raises:
        UserError: The value does not name a part of a model.
    """
    if name == _EXCEPT_CROSS_ATTENTION:
        return FrozenPart("decoder", trains_cross_attention=True, value=name)
    match = _PART.fullmatch(_ALIASES.get(name, f"video.{name}" if name.startswith("blocks:") else name))
    if match is None:
        raise UserError(
            f"--freeze {name} does not name a part of the model",
            hint="use a tower (video, text), or the first N blocks of a tower (blocks:N, text.blocks:N)",
            flags=("--freeze",),
        )
    return FrozenPart(match["tower"], None if match["count"] is None else int(match["count"]), value=name)


def random_freeze_warning(freeze: Sequence[str]) -> str:
    """Return a warning about --freeze in a model with random weights; empty if only a decoder is frozen."""
    names = [part.value for part in map(frozen_part, freeze) if part.tower != "decoder"]
    return f"--freeze {' '.join(names)} freezes random weights, because --init.weights is not set" if names else ""


def towers_to_adapt(lora: Lora, freeze: Sequence[str], *, towers: Sequence[Tower]) -> tuple[Tower, ...]:
    """Return the towers of a model that get adapters."""
    if not lora.rank:
        return ()
    frozen_towers = {part.tower for part in map(frozen_part, freeze) if part.is_complete}
    return lora.towers or tuple(tower for tower in towers if tower != "decoder" and tower not in frozen_towers)


def tuning_mistakes(
    freeze: Sequence[str], lora: Lora, *, towers: Sequence[Tower], has_head: bool, has_weights: bool
) -> Iterator[UserError]:
    """Yield errors for values of --freeze and --lora.* that the model does not support.

    Args:
        towers: Towers of the model.
        has_head: True if the model also has trained parameters outside its towers.
        has_weights: True if the towers to adapt have pretrained weights.
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
    frozen_towers = {part.tower for part in parts if part.is_complete}
    if not has_head and frozen_towers >= set(towers):
        hint = "omit one of them" if len(freeze) > 1 else "omit it, or freeze only the first blocks: blocks:N"
        yield UserError(f"--freeze {' '.join(freeze)} leaves nothing to train", hint=hint, flags=("--freeze",))
        return
    if not lora.rank:
        return
    if not has_weights:
        yield UserError(
            f"--lora.rank is {lora.rank}, but there are no pretrained weights to adapt",
            hint="add --init.weights, or omit --lora.rank",
            flags=("--lora.rank",),
        )
    for tower in lora.towers:
        if tower not in towers:
            yield _no_tower(f"--lora.towers {tower}", tower, towers)
        elif tower in frozen_towers:
            yield UserError(
                f"--lora.towers {tower} adapts a tower that --freeze {' '.join(freeze)} freezes",
                hint="omit the tower from one of the flags; the weights of a tower with adapters are always frozen",
                flags=("--lora.towers", "--freeze"),
            )
    if not towers_to_adapt(lora, freeze, towers=towers):
        yield UserError(
            f"--lora.rank is {lora.rank}, but --freeze {' '.join(freeze)} leaves no tower to adapt",
            hint="omit one of them",
            flags=("--lora.rank", "--freeze"),
        )


def _no_tower(flag: str, tower: str, towers: Sequence[str]) -> UserError:
    return UserError(f"{flag}: the model has no {tower} tower", hint=f"use one of: {', '.join(towers)}", flags=(flag,))
