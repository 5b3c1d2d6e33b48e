"""Towers from open_clip, timm and transformers. Videos are embedded frame by frame.

`LibraryImage` has the interface of a video tower: `forward` embeds clips; `features` and `tokens` return values before
any projection. The library's own module processes the frames, so for T = 1 the result equals the library's result.
Texts are embedded as in the library.

Shape suffixes: B clips or texts, C channels, T frames, H and W pixels, L tokens of a text, N tokens of a frame, W width
of the library's embedding, D token width, E embedding width, h heads, K width of a head.

A tower is identified by LIBRARY:NAME, where NAME is a name in the library: `open_clip:RN50`, `timm:MODEL.TAG`,
`open_clip:local-dir:FOLDER`, `hf:FOLDER` or `hf:ORGANISATION/NAME`. A new tower has random weights; --init.weights
loads pretrained weights.

Each library is an object with these methods:

    image(name)                 build an image tower with random weights
    embed(model, images)        return the library's embeddings [B, W] of images [B, C, H, W]
    tokens(model, images)       return the last tokens [B, N, D]; for a convolutional network, the last feature map
    preprocessing(name)         return the library's preprocessing of images
    text(name, length)          build a text tower with random weights
    embed_text(model, tokens_BL, pooling)    return the library's embeddings [B, W] of texts
    context_length(name)        return the maximum number of tokens of a text
    tokenizer(name, length)     return a function that converts texts to token IDs [B, L]

Methods that take a name raise a UserError if the library does not know the name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.publish import parse_json
from clipmill.train.config.model import DualEncoderTowers, Towers
from clipmill.train.device.transfer import keep_buffers_in_recomputation
from clipmill.train.models.attention import Attend
from clipmill.train.models.hugging_face import HuggingFace, Pooling, Preprocessing, flatten_tokens, hub_files
from clipmill.train.models.text import Tokenize
from clipmill.train.models.transformer import HasBlocks
from clipmill.train.models.video_vit import VideoViTSize

_LOCAL_PREFIX = "local-dir:"  # prefix of names that refer to a folder
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def library_of(reference: str) -> tuple[Any, str]:
    """Return the library of a tower (LIBRARY:NAME), and the name in the library."""
    library, _, name = reference.partition(":")
    return _LIBRARIES[library], name


def unknown_name_error(reference: str, known_names: Iterable[str]) -> UserError:
    """Return the error for a name that a library does not know; the hint lists similar names."""
    similar_names = get_close_matches(reference.partition(":")[2], list(known_names), n=3, cutoff=0.4)
    library = reference.partition(":")[0]
    return UserError(
        f"{library} has no tower {reference}",
        hint=f"use a name that {library} knows"
        + (f"; similar names: {', '.join(similar_names)}" if similar_names else ""),
    )


class _OpenClip:
    """Towers from open_clip, each built from one half of a model's configuration."""

    def image(self, name: str) -> nn.Module:
        from open_clip.model import _build_vision_tower

        config = self.config(name)
        return _build_vision_tower(config["embed_dim"], config["vision_cfg"], bool(config.get("quick_gelu")))

    def embed(self, model: nn.Module, images_BCHW: Tensor) -> Tensor:
        output = model(images_BCHW)
        return output[0] if isinstance(output, tuple) else output

    def tokens(self, model: Any, images_BCHW: Tensor) -> Tensor:
        if (trunk := getattr(model, "trunk", None)) is not None:
            return _Timm().tokens(trunk, images_BCHW)
        options = {"indices": 1, "intermediates_only": True, "normalize_intermediates": True}
        if hasattr(model, "attnpool"):  # a ResNet
            return flatten_tokens(model.forward_intermediates(images_BCHW, **options)["image_intermediates"][-1])
        output = model.forward_intermediates(images_BCHW, **options, output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([output["image_intermediates_prefix"][-1], output["image_intermediates"][-1]], dim=1)

    def preprocessing(self, name: str) -> Preprocessing:
        from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

        size = self.config(name)["vision_cfg"]["image_size"]
        # A folder specifies how pixels are normalised. A name does not, but its published weights may all agree. If
        # they do not, use CLIP's values.
        entries = [get_pretrained_cfg(name, tag) for tag in list_pretrained_tags_by_model(name)]
        if name.startswith(_LOCAL_PREFIX):
            file = Path(name.removeprefix(_LOCAL_PREFIX)) / "open_clip_config.json"
            entries = [parse_json(file.read_text(encoding="utf-8")).get("preprocess_cfg") or {}]
        mean, std = (
            values.pop() if len(values := {tuple(entry.get(key) or default) for entry in entries}) == 1 else default
            for key, default in (("mean", _CLIP_MEAN), ("std", _CLIP_STD))
        )
        kinds = {entry.get("interpolation") or "bicubic" for entry in entries}
        interpolation = kinds.pop() if len(kinds) == 1 else "bicubic"
        return Preprocessing(
            size_px=size if isinstance(size, int) else size[0], mean=mean, std=std, interpolation=interpolation
        )

    def text(self, name: str, context_length: int | None) -> nn.Module:
        from open_clip.model import _build_text_tower

        config = self.config(name)
        text = {**config["text_cfg"], **({} if context_length is None else {"context_length": context_length})}
        if encoder := text.get("hf_model_name"):
            text["hf_model_pretrained"] = False
            with hub_files(encoder, "configuration"):
                # An encoder from transformers has the dtype of its configuration. Convert it to float32.
                return _build_text_tower(config["embed_dim"], text).float()
        return _build_text_tower(config["embed_dim"], text, bool(config.get("quick_gelu")))

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        output = model(tokens_BL)
        return output[0] if isinstance(output, tuple) else output

    def context_length(self, name: str) -> int:
        return int(self.config(name)["text_cfg"].get("context_length", 77))

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        import open_clip

        hub = self.config(name)["text_cfg"].get("hf_tokenizer_name")
        with hub_files(f"hf:{hub or name}", "tokenizer"):
            return open_clip.get_tokenizer(name, context_length=context_length)

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration of a model; raise a UserError if no model has this name."""
        import open_clip

        config = None
        if not name.startswith("hf-hub:"):
            try:
                config = open_clip.get_model_config(name)
            except (OSError, ValueError):
                config = None
        if not config and name.startswith(_LOCAL_PREFIX):
            raise UserError(
                f"open_clip:{name}: the folder has no readable open_clip_config.json",
                hint="use a folder that open_clip or train export --format open_clip wrote",
            )
        if not config:
            raise unknown_name_error(f"open_clip:{name}", open_clip.list_models())
        return config


class _Timm:
    """Towers from timm.

    The last layer of an ImageNet classifier is removed. The last layer of a CLIP image tower is kept, because it is the
    projection.
    """

    def image(self, name: str) -> nn.Module:
        import timm
        from timm.data import infer_imagenet_subset

        if not name.startswith(_LOCAL_PREFIX) and not timm.is_model(name):
            raise unknown_name_error(f"timm:{name}", timm.list_models())
        try:
            with torch.device("meta"):
                classes = infer_imagenet_subset(timm.create_model(name).pretrained_cfg)
            return timm.create_model(name, **({} if classes is None else {"num_classes": 0}))
        except (RuntimeError, OSError, ValueError) as error:
            tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
            hint = f"use one of these tags: {', '.join(tags)}" if tags else "use a name without a tag"
            if name.startswith(_LOCAL_PREFIX):
                hint = "use a folder with timm's config.json, such as a folder that train export --format timm wrote"
            raise UserError(f"timm:{name}: {first_line(error)}", hint=hint) from error

    def embed(self, model: nn.Module, images_BCHW: Tensor) -> Tensor:
        return model(images_BCHW)

    def tokens(self, model: nn.Module, images_BCHW: Tensor) -> Tensor:
        features: Any = model.forward_features  # type: ignore[union-attr]
        return flatten_tokens(features(images_BCHW), channels_last=getattr(model, "output_fmt", "") == "NHWC")

    def preprocessing(self, name: str) -> Preprocessing:
        from timm.data import resolve_model_data_config

        with torch.device("meta"):
            config = resolve_model_data_config(self.image(name))
        return Preprocessing(
            size_px=config["input_size"][-1],
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation=config["interpolation"],
        )

    def text(self, name: str, context_length: int | None) -> nn.Module:
        raise NotImplementedError  # text towers from timm are rejected when flags are checked

    embed_text = context_length = tokenizer = text


_LIBRARIES: dict[str, Any] = {"open_clip": _OpenClip(), "timm": _Timm(), "hf": HuggingFace()}


@cache
def preprocessing_of(reference: str) -> Preprocessing:
    """Return the preprocessing of images that a library specifies for an image tower."""
    library, name = library_of(reference)
    return library.preprocessing(name)


@cache
def context_length_of(reference: str) -> int:
    """Return the context length of a text tower, in tokens."""
    library, name = library_of(reference)
    return library.context_length(name)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Properties of a tower that do not depend on its weights.

    Attributes:
        width: Width W of the library's embedding.
        names: Names of the tower's tensors.
        num_tokens: Number N of tokens per frame; 0 for text towers.
        token_width: Width D of a frame's tokens; 0 for text towers.
    """

    width: int
    names: frozenset[str]
    num_tokens: int = 0
    token_width: int = 0


@cache
def image_outline(reference: str, size_px: int) -> Outline:
    """Return the outline of an image tower for square frames, from a forward pass on the meta device.

    Args:
        reference: Tower, as LIBRARY:NAME.
        size_px: Side length of the frames, in pixels.

    Raises:
        UserError: The tower does not exist, is not an image tower, or takes images at a different resolution.
    """
    library, name = library_of(reference)
    with torch.device("meta"):
        model = library.image(name).eval()
        images = torch.zeros(1, 3, size_px, size_px)
        try:
            embedding, tokens = library.embed(model, images), library.tokens(model, images)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            native_px = preprocessing_of(reference).size_px
            if native_px in (None, size_px):
                raise _tower_error(reference, "an image", error) from error
            raise UserError(
                f"--size-px is {size_px}, but {reference} takes images of {native_px} px",
                hint=f"use --size-px {native_px}",
                flags=("--size-px",),
            ) from error
    num_tokens, token_width = tokens.shape[1:]
    names = frozenset(model.state_dict())
    return Outline(width=embedding.shape[-1], names=names, num_tokens=num_tokens, token_width=token_width)


@cache
def text_outline(reference: str, pooling: Pooling) -> Outline:
    """Return the outline of a text tower; raise a UserError if it does not exist or is not a text tower."""
    library, name = library_of(reference)
    with torch.device("meta"):
        model = library.text(name, None).eval()
        # Only open_clip's towers need texts of a fixed length. For other towers, looking up the length may
        # require a tokenizer.
        length = library.context_length(name) if isinstance(library, _OpenClip) else 4
        try:
            embedding = library.embed_text(model, torch.zeros(1, length, dtype=torch.int64), pooling)
        except (TypeError, AttributeError, ValueError) as error:
            raise _tower_error(reference, "a text", error) from error
    return Outline(width=embedding.shape[-1], names=frozenset(model.state_dict()))


def _tower_error(reference: str, kind: str, error: Exception) -> UserError:
    return UserError(f"{reference} is not {kind} tower: {first_line(error)}", hint="use a different tower")


@cache
def tokenizer_of(reference: str, context_length: int) -> Tokenize:
    """Return the tokenizer of a text tower, a function that converts a text to int64 IDs [context_length]."""
    library, name = library_of(reference)
    tokenize, lock = library.tokenizer(name, context_length), Lock()

    def encode(text: str) -> NDArray[np.int64]:
        with lock:  # loader threads share the tokenizer, and fast tokenizers reject concurrent calls
            return tokenize([text])[0].numpy().astype(np.int64)

    return encode


_HEAD_WIDTH = 64
# Names that the libraries give to lists of blocks.
_BLOCK_LISTS = ("resblocks", "blocks", "layers", "layer", "stages", "block", "h")


class LibraryTower(HasBlocks):
    """Base class of towers from libraries.

    Args:
        reference: Tower, as LIBRARY:NAME.
        model: Module that the library built.
    """

    def __init__(self, reference: str, model: nn.Module) -> None:
        super().__init__()
        self.reference, self.library = reference, library_of(reference)[0]
        self.model = model

    def blocks(self) -> list[nn.Module]:
        """Return the outermost numbered blocks of the module; for a ResNet, `layer1` to `layer4`."""
        return list(_numbered_modules(self.model))

    def checkpoint(self) -> None:
        """Enable the library's activation checkpointing; raise a UserError if the module does not support it."""
        keep_buffers_in_recomputation(self.model)
        enable: Any = getattr(self.model, "set_grad_checkpointing", None)
        if enable is not None:
            enable(True)
            return
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        enable = enable if getattr(self.model, "supports_gradient_checkpointing", False) else None
        if enable is None:
            raise UserError(
                f"{self.reference} does not support --towers.activation-checkpointing",
                hint="omit the flag, and use a smaller --microbatch",
                flags=("--towers.activation-checkpointing",),
            )
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _numbered_modules(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name in _BLOCK_LISTS and isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        elif name.startswith("layer") and name.removeprefix("layer").isdigit():
            yield child
        else:
            yield from _numbered_modules(child)


def num_heads_of(width: int) -> int:
    """Return the number of attention heads: heads of width 64, or one head if 64 does not divide the width.

    No published model prescribes this choice.
    """
    return width // _HEAD_WIDTH if width % _HEAD_WIDTH == 0 else 1


class FramePooling(nn.Module):
    """Attention pooling of frame embeddings. Initially, it computes their mean.

    Each head weights the frames, and its part of the clip embedding is the weighted mean of the frame embeddings. For a
    single frame, the result equals the embedding of the frame. The query is initially zero, so all frames start with
    the same weight.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads_of(width)
        self.norm = nn.LayerNorm(width)
        self.key = nn.Linear(width, width)
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTW: Tensor, times_TW: Tensor) -> Tensor:
        """Return embeddings of clips, [B, W]. `times_TW` is added to the frames before the key projection."""
        key_BThK = self.key(self.norm(x_BTW) + times_TW).unflatten(2, (self.num_heads, -1))
        query_hK = self.query.unflatten(0, (self.num_heads, -1))
        scores_BTh = (key_BThK * query_hK).sum(-1) * key_BThK.shape[-1] ** -0.5
        weights_BTh1 = scores_BTh.softmax(dim=1)[..., None]
        return (x_BTW.unflatten(2, (self.num_heads, -1)) * weights_BTh1).sum(1).flatten(1)


class LibraryImage(LibraryTower):
    """Image tower that embeds each frame of a clip.

    Args:
        reference: Tower, as LIBRARY:NAME.
        model: Module that the library built.
        outline: Outline of the tower.
        num_frames: Number of frames per clip; only attention pooling uses it.
        embedding_width: Width E of the embedding; None or W to omit the projection.
        pools: True to pool frames by attention instead of averaging them.
        temporal_std: Standard deviation of the initial temporal embedding, which only attention pooling has.

    Attributes:
        feature_width: Width W of the library's embedding.
        token_width: Width D of the tokens.
        frame_tokens: Number N of tokens per frame.
    """

    def __init__(
        self,
        reference: str,
        model: nn.Module,
        *,
        outline: Outline,
        num_frames: int,
        embedding_width: int | None,
        pools: bool,
        temporal_std: float = 0.0,
    ) -> None:
        super().__init__(reference, model)
        width = self.feature_width = outline.width
        self.token_width, self.frame_tokens = outline.token_width, outline.num_tokens
        self.pool: FramePooling | None = None
        if pools:
            self.temporal_embedding = nn.Parameter(temporal_std * torch.randn(num_frames, width))
            self.pool = FramePooling(width)
        self.proj: nn.Parameter | None
        self.register_parameter("proj", None)
        if embedding_width not in (None, width):
            self.proj = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, video_BCTHW: Tensor) -> Tensor:
        """Embed normalised clips [B, C, T, H, W] as [B, E] (not unit-length), or [B, W] without a projection."""
        features_BW = self.features(video_BCTHW)
        return features_BW if self.proj is None else features_BW @ self.proj

    def features(self, video_BCTHW: Tensor) -> Tensor:
        """Return the library's embeddings of the frames, pooled over time, [B, W]."""
        num_clips = len(video_BCTHW)
        x_BTW = self.library.embed(self.model, _frames(video_BCTHW)).unflatten(0, (num_clips, -1))
        return x_BTW.mean(1) if self.pool is None else self.pool(x_BTW, self.temporal_embedding)

    def tokens(self, video_BCTHW: Tensor) -> Tensor:
        """Return the last tokens of all frames, frame by frame, [B, T * N, D]."""
        x_BTND = self.library.tokens(self.model, _frames(video_BCTHW)).unflatten(0, (len(video_BCTHW), -1))
        return x_BTND.flatten(1, 2)


def _frames(video_BCTHW: Tensor) -> Tensor:
    return video_BCTHW.transpose(1, 2).flatten(0, 1)


class LibraryText(LibraryTower):
    """Text tower from a library.

    Args:
        reference: Tower, as LIBRARY:NAME.
        model: Module that the library built.
        width: Width W of the library's embedding.
        embedding_width: Width E of the embedding; W to omit the projection.
        pooling: Pooling of the tokens, as in --towers.text-pooling.
    """

    def __init__(self, reference: str, model: nn.Module, *, width: int, embedding_width: int, pooling: str) -> None:
        super().__init__(reference, model)
        self.pooling = pooling
        self.text_projection: nn.Parameter | None
        self.register_parameter("text_projection", None)
        if embedding_width != width:
            self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))

    def forward(self, tokens_BL: Tensor, lengths_B: NDArray[np.int64] | None = None) -> Tensor:
        """Embed int64 token IDs [B, L] as [B, E] (not unit-length). The lengths are ignored."""
        x_BW = self.library.embed_text(self.model, tokens_BL, self.pooling)
        return x_BW if self.text_projection is None else x_BW @ self.text_projection


def image_tower(
    size: VideoViTSize, *, image_px: int, num_frames: int, embedding_width: int | None, attend: Attend, towers: Towers
) -> LibraryImage:
    """Build the tower that `--towers.image` specifies, for square frames with sides of `image_px`.

    Raises:
        UserError: The library has no tower with this name, or the tower takes images at a different resolution.
    """
    assert towers.image is not None
    outline = image_outline(towers.image, image_px)
    library, name = library_of(towers.image)
    return LibraryImage(
        towers.image,
        library.image(name),
        outline=outline,
        num_frames=num_frames,
        embedding_width=embedding_width,
        pools=towers.pool_frames == "attention",
        temporal_std=outline.width**-0.5 if towers.temporal == "random" else 0.0,
    )


def text_tower(towers: DualEncoderTowers, *, embedding_width: int) -> LibraryText:
    """Build the tower that `--towers.text` specifies.

    Raises:
        UserError: The library has no tower with this name.
    """
    assert towers.text is not None
    library, name = library_of(towers.text)
    width = text_outline(towers.text, towers.text_pooling).width
    return LibraryText(
        towers.text,
        library.text(name, towers.context_length),
        width=width,
        embedding_width=embedding_width,
        pooling=towers.text_pooling,
    )
