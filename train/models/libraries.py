"""Image and text towers of open_clip, timm and transformers by name: modules, outputs, preprocessing, tokenizers.

A tower is named LIBRARY:NAME, where NAME is what the library itself takes: `open_clip:RN50`, `timm:MODEL.TAG`,
`open_clip:local-dir:FOLDER`, `hf:FOLDER` or `hf:ORGANISATION/NAME`. Its weights are new; --init.weights fills them.

Shape suffixes: B pictures or texts, C channels, H and W pixels, L tokens of a text, N tokens of a picture, W width of
the library's embedding, D width of tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.hub import hub_if_reachable

Mean = tuple[float, float, float]
Tokenize = Callable[[str], NDArray[np.int64]]
Pooling = str  # of --towers.text-pooling

_CLIPS_MEAN, _CLIPS_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_LONGEST = 512  # of the default context of text encoders without a limit of their own


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How a library prepares pictures for a tower; None where it does not say.

    Attributes:
        size_px: side of the square pictures.
        mean, std: of R, G and B, from 0 to 1.
        interpolation: name of the filter of its resize.
    """

    size_px: int | None
    mean: Mean | None
    std: Mean | None
    interpolation: str | None


class Library(Protocol):
    """The towers of one library. All functions raise a UserError for a name that it does not know."""

    def image(self, name: str) -> nn.Module:
        """A new image tower."""

    def embed(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        """The library's embeddings of pictures, [B, W]."""

    def tokens(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        """Their last tokens, [B, N, D]; cells of the last feature map of a convolutional network."""

    def preprocessing(self, name: str) -> Preprocessing:
        """How it prepares pictures."""

    def text(self, name: str, context_length: int | None) -> nn.Module:
        """A new text tower."""

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        """Embeddings of texts, [B, W]."""

    def context_length(self, name: str) -> int:
        """Number of tokens of a text."""

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        """Texts to ids [B, L]."""


def library_of(reference: str) -> tuple[Library, str]:
    """The library of a tower, and the tower's name there."""
    library, _, name = reference.partition(":")
    return _LIBRARIES[library], name


def unknown(reference: str, known: Iterable[str]) -> UserError:
    """The error for a name that a library does not know, with the nearest ones."""
    near = get_close_matches(reference.partition(":")[2], list(known), n=3, cutoff=0.4)
    library = reference.partition(":")[0]
    return UserError(f"{library} has no tower {reference}", hint=f"nearest: {', '.join(near) or 'none'}")


@contextmanager
def _files(reference: str, what: str) -> Iterator[None]:
    """Files that the Hub may have; a UserError that says what to download where they are not at hand."""
    try:
        with hub_if_reachable():
            yield
    except (OSError, ValueError, ImportError) as error:
        name = reference.removeprefix("hf:")
        raise UserError(
            f"the {what} of {reference} is not here: {first_line(error)}",
            hint=f"on a machine with a network: hf download {name}; then name that folder, or copy the cache",
        ) from error


def _flat(tokens: Tensor, *, channels_last: bool = False) -> Tensor:
    """Tokens [B, N, D] of tokens, or of a feature map [B, D, H, W] or [B, H, W, D]."""
    if tokens.ndim == 4:
        return tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
    return tokens


class _OpenClip:
    """open_clip: a tower is one half of a model's configuration."""

    def image(self, name: str) -> nn.Module:
        from open_clip.model import _build_vision_tower

        config = self.config(name)
        return _build_vision_tower(config["embed_dim"], config["vision_cfg"], bool(config.get("quick_gelu")))

    def embed(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        found = model(pictures_BCHW)
        return found[0] if isinstance(found, tuple) else found

    def tokens(self, model: Any, pictures_BCHW: Tensor) -> Tensor:
        if (trunk := getattr(model, "trunk", None)) is not None:
            return _Timm().tokens(trunk, pictures_BCHW)
        options = {"indices": 1, "intermediates_only": True, "normalize_intermediates": True}
        if hasattr(model, "attnpool"):  # a ResNet
            return _flat(model.forward_intermediates(pictures_BCHW, **options)["image_intermediates"][-1])
        found = model.forward_intermediates(pictures_BCHW, **options, output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([found["image_intermediates_prefix"][-1], found["image_intermediates"][-1]], dim=1)

    def preprocessing(self, name: str) -> Preprocessing:
        from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

        size = self.config(name)["vision_cfg"]["image_size"]
        # No configuration names the normalisation: it is that of the published weights, where they agree.
        entries = [get_pretrained_cfg(name, tag) for tag in list_pretrained_tags_by_model(name)]
        mean, std = (
            found.pop() if len(found := {tuple(one.get(key) or clips) for one in entries}) == 1 else clips
            for key, clips in (("mean", _CLIPS_MEAN), ("std", _CLIPS_STD))
        )
        kinds = {one.get("interpolation") or "bicubic" for one in entries}
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
            with _files(encoder, "configuration"):
                return _build_text_tower(config["embed_dim"], text)
        return _build_text_tower(config["embed_dim"], text, bool(config.get("quick_gelu")))

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        found = model(tokens_BL)
        return found[0] if isinstance(found, tuple) else found

    def context_length(self, name: str) -> int:
        return int(self.config(name)["text_cfg"].get("context_length", 77))

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        import open_clip

        hub = self.config(name)["text_cfg"].get("hf_tokenizer_name")
        with _files(f"hf:{hub or name}", "tokenizer"):
            return open_clip.get_tokenizer(name, context_length=context_length)

    def config(self, name: str) -> dict[str, Any]:
        """The configuration of a model; raises a UserError if there is none of that name."""
        import open_clip

        found = None
        if not name.startswith("hf-hub:"):
            try:
                found = open_clip.get_model_config(name)
            except (OSError, ValueError):
                found = None
        if not found:
            raise unknown(f"open_clip:{name}", open_clip.list_models())
        return found


class _Timm:
    """timm: classifiers of ImageNet lose their last layer; that of a CLIP's tower is its projection."""

    def image(self, name: str) -> nn.Module:
        import timm
        from timm.data import infer_imagenet_subset

        if not name.startswith("local-dir:") and not timm.is_model(name):
            raise unknown(f"timm:{name}", timm.list_models())
        try:
            with torch.device("meta"):
                classes = infer_imagenet_subset(timm.create_model(name).pretrained_cfg)
            return timm.create_model(name, **({} if classes is None else {"num_classes": 0}))
        except (RuntimeError, OSError, ValueError) as error:
            tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
            raise UserError(f"timm:{name}: {first_line(error)}", hint=f"tags: {', '.join(tags) or 'none'}") from error

    def embed(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        return model(pictures_BCHW)

    def tokens(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        features: Any = model.forward_features  # type: ignore[union-attr]
        return _flat(features(pictures_BCHW), channels_last=getattr(model, "output_fmt", "") == "NHWC")

    def preprocessing(self, name: str) -> Preprocessing:
        from timm.data import resolve_model_data_config

        with torch.device("meta"):
            found = resolve_model_data_config(self.image(name))
        return Preprocessing(
            size_px=found["input_size"][-1],
            mean=tuple(found["mean"]),
            std=tuple(found["std"]),
            interpolation=found["interpolation"],
        )

    def text(self, name: str, context_length: int | None) -> nn.Module:
        raise NotImplementedError  # refused with the flags

    embed_text = context_length = tokenizer = text


class _HuggingFace:
    """transformers: a model of its own, or one half of a CLIP or SigLIP."""

    def image(self, name: str) -> nn.Module:
        return _half(self.config(name), "vision_config")

    def embed(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        found = model(**_pictures(model, pictures_BCHW))
        if (embeds := getattr(found, "image_embeds", None)) is not None:
            return embeds
        pooled = getattr(found, "pooler_output", None)
        return _flat(found.last_hidden_state).mean(1) if pooled is None else pooled.flatten(1)

    def tokens(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        return _flat(model(**_pictures(model, pictures_BCHW)).last_hidden_state)

    def preprocessing(self, name: str) -> Preprocessing:
        from transformers import ImageProcessingMixin

        config = self.config(name)
        size = getattr(getattr(config, "vision_config", config), "image_size", None)
        try:
            with hub_if_reachable():
                found, _ = ImageProcessingMixin.get_image_processor_dict(name)
        except OSError:
            found = {}
        mean, std = found.get("image_mean"), found.get("image_std")
        return Preprocessing(
            size_px=size,
            mean=None if mean is None else tuple(mean),
            std=None if std is None else tuple(std),
            interpolation=None if found.get("resample") is None else _FILTERS.get(found["resample"]),
        )

    def text(self, name: str, context_length: int | None) -> nn.Module:
        config = self.config(name)
        own = getattr(config, "text_config", config)
        if context_length is not None and own.model_type == "clip_text_model":
            own.max_position_embeddings = context_length
        return _half(config, "text_config")

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        config: Any = model.config
        mask = None if tokens_BL.is_meta else _not_padding(tokens_BL, config)  # its values are read
        found = model(input_ids=tokens_BL, **({} if mask is None else {"attention_mask": mask}))
        pooled = getattr(found, "text_embeds", None)
        pooled = getattr(found, "pooler_output", None) if pooled is None else pooled
        if pooling == "own" and pooled is not None:
            return pooled
        x_BLD = found.last_hidden_state
        mask = torch.ones_like(tokens_BL) if mask is None else mask
        if pooling == "first":
            return x_BLD[:, 0]
        if pooling == "last":
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), mask.sum(1) - 1]
        weights_BL1 = mask[..., None].to(x_BLD.dtype)
        return (x_BLD * weights_BL1).sum(1) / weights_BL1.sum(1)

    def context_length(self, name: str) -> int:
        config = self.config(name)
        limits = [getattr(getattr(config, "text_config", config), "max_position_embeddings", None) or _LONGEST]
        limits.append(self.hub_tokenizer(name).model_max_length)
        return int(min(limits))

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        found = self.hub_tokenizer(name)
        options = {"padding": "max_length", "truncation": True, "max_length": context_length, "return_tensors": "pt"}
        return lambda texts: found(texts, **options)["input_ids"]

    def hub_tokenizer(self, name: str) -> Any:
        """transformers' tokenizer of a model."""
        from transformers import AutoTokenizer

        with _files(f"hf:{name}", "tokenizer"):
            if (folder := Path(name)).is_dir() and not any(folder.glob("tokenizer*")):
                # transformers would make one up, without a vocabulary.
                raise FileNotFoundError(f"{name} has no tokenizer.json")
            return AutoTokenizer.from_pretrained(name)

    def config(self, name: str) -> Any:
        """The configuration of a model."""
        from transformers import AutoConfig

        with _files(f"hf:{name}", "configuration"):
            return AutoConfig.from_pretrained(name)


_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _half(config: Any, part: str) -> nn.Module:
    """A new model: of the configuration itself, or of its vision_config or text_config."""
    import transformers

    own = getattr(config, part, config)
    name = type(own).__name__.removesuffix("Config")
    if name.endswith(("Vision", "Text")):  # half of a CLIP or SigLIP
        kinds = (getattr(transformers, f"{name}{end}", None) for end in ("ModelWithProjection", "Model"))
        if (kind := next(filter(None, kinds), None)) is not None:
            return kind(own)
    auto = transformers.AutoModelForTextEncoding if part == "text_config" else transformers.AutoModel
    return (auto if type(own) in auto._model_mapping else transformers.AutoModel).from_config(own)


def read_hf(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder of transformers by the names of its modules, as its own loader converts them.

    Tensors that its model has no place for are there too, empty.

    Raises:
        UserError: transformers cannot load them.
    """
    import transformers

    config, kind = _HuggingFace().config(str(folder)), transformers.AutoModel
    if not hasattr(config, "vision_config"):
        with torch.device("meta"):
            kind = type(_half(config, "text_config"))
    with _files(f"hf:{folder}", "model"):
        model, info = kind.from_pretrained(folder, output_loading_info=True, use_safetensors=True)
    found = {name: one for name, one in model.state_dict().items() if name not in info["missing_keys"]}
    return found | {name: torch.empty(0) for name in info["unexpected_keys"]}


def _pictures(model: nn.Module, pictures_BCHW: Tensor) -> dict[str, Tensor]:
    """The arguments of a model for pictures; the NaFlex towers of SigLIP 2 take patches, row by row."""
    config: Any = model.config
    if config.model_type != "siglip2_vision_model":
        return {"pixel_values": pictures_BCHW}
    side = config.patch_size
    cells = pictures_BCHW.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
    rows, columns = cells.shape[1:3]
    shapes_B2 = torch.tensor([[rows, columns]], device="cpu").expand(len(cells), 2)  # it is read there
    return {
        "pixel_values": cells.flatten(3).flatten(1, 2),
        "pixel_attention_mask": None,  # all of them
        "spatial_shapes": shapes_B2,
    }


def _not_padding(tokens_BL: Tensor, config: Any) -> Tensor | None:
    """1 for tokens and 0 for padding, int64 [B, L]; None for a SigLIP, which attends to it, and a CLIP, which is causal
    and pads with the token that ends a text."""
    if config.model_type.startswith(("siglip", "clip")) or config.pad_token_id is None:
        return None
    return (tokens_BL != config.pad_token_id).to(torch.int64)


_LIBRARIES: dict[str, Any] = {"open_clip": _OpenClip(), "timm": _Timm(), "hf": _HuggingFace()}


@cache
def preprocessing_of(reference: str) -> Preprocessing:
    """How its library prepares pictures for an image tower."""
    library, name = library_of(reference)
    return library.preprocessing(name)


@cache
def context_length_of(reference: str) -> int:
    """Number of tokens of the texts of a text tower."""
    library, name = library_of(reference)
    return library.context_length(name)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a tower is before it has weights: the width W of its embedding, D of an image tower's tokens, and the names
    of its tensors."""

    width: int
    names: frozenset[str]
    token_width: int = 0


@cache
def image_outline(reference: str, size_px: int) -> Outline:
    """The outline of an image tower for pictures of a size, which is tried on the meta device.

    Raises:
        UserError: there is no such tower, or it takes pictures of another size.
    """
    library, name = library_of(reference)
    with torch.device("meta"):
        model = library.image(name).eval()
        pictures = torch.zeros(1, 3, size_px, size_px)
        try:
            found, tokens = library.embed(model, pictures), library.tokens(model, pictures)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            native = preprocessing_of(reference).size_px
            if native in (None, size_px):
                raise _no_tower(reference, "of images", error) from error
            raise UserError(
                f"--size-px is {size_px}, and {reference} takes pictures of {native} px", hint=f"use --size-px {native}"
            ) from error
    return Outline(width=found.shape[-1], names=frozenset(model.state_dict()), token_width=tokens.shape[-1])


@cache
def text_outline(reference: str, pooling: Pooling) -> Outline:
    """The outline of a text tower; raises a UserError if there is no such tower."""
    library, name = library_of(reference)
    with torch.device("meta"):
        model = library.text(name, None).eval()
        # Only open_clip's towers have a fixed length; that of the others may need a tokenizer.
        length = library.context_length(name) if isinstance(library, _OpenClip) else 4
        try:
            found = library.embed_text(model, torch.zeros(1, length, dtype=torch.int64), pooling)
        except (TypeError, AttributeError, ValueError) as error:
            raise _no_tower(reference, "of texts", error) from error
    return Outline(width=found.shape[-1], names=frozenset(model.state_dict()))


def _no_tower(reference: str, what: str, error: Exception) -> UserError:
    return UserError(f"{reference} is not a tower {what}: {first_line(error)}", hint="name another tower")


@cache
def tokenizer_of(reference: str, context_length: int) -> Tokenize:
    """The tokenizer of a text tower: a text to int64 ids [context_length]."""
    library, name = library_of(reference)
    tokenize, lock = library.tokenizer(name, context_length), Lock()

    def ids(text: str) -> NDArray[np.int64]:
        with lock:  # loader threads share it, and fast tokenizers refuse a second caller
            return tokenize([text])[0].numpy().astype(np.int64)

    return ids
