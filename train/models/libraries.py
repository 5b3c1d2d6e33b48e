"""Image and text towers of open_clip, timm and transformers by name: modules, outputs, preprocessing, tokenizers.

A tower is named LIBRARY:NAME, where NAME is what the library itself takes: `open_clip:RN50`, `timm:MODEL.TAG`,
`open_clip:local-dir:FOLDER`, `hf:FOLDER` or `hf:ORGANISATION/NAME`. Its weights are new; --init.weights fills them.

Each library is an object with

    image(name)               a new image tower
    embed(model, pictures)    the library's embeddings [B, W] of pictures [B, C, H, W]
    tokens(model, pictures)   their last tokens [B, N, D]; of a convolutional network, cells of its last feature map
    preprocessing(name)       how it prepares pictures
    text(name, length), embed_text(model, tokens_BL, pooling), context_length(name), tokenizer(name, length): for texts

All raise a UserError for a name that the library does not know.

Shape suffixes: B pictures or texts, C channels, H and W pixels, L tokens of a text, N tokens of a picture, W width of
the library's embedding, D width of tokens.
"""

from collections.abc import Callable, Iterable
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
from clipmill.train.models.hugging_face import HuggingFace, Pooling, Preprocessing, flatten_tokens, hub_files
from clipmill.train.models.text import Tokenize

_LOCAL = "local-dir:"  # begins a name that is a folder
_CLIPS_MEAN, _CLIPS_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def library_of(reference: str) -> tuple[Any, str]:
    """The library of a tower, and the tower's name there."""
    library, _, name = reference.partition(":")
    return _LIBRARIES[library], name


def unknown_name_error(reference: str, known: Iterable[str]) -> UserError:
    """The error for a name that a library does not know, with the nearest ones."""
    near = get_close_matches(reference.partition(":")[2], list(known), n=3, cutoff=0.4)
    library = reference.partition(":")[0]
    return UserError(f"{library} has no tower {reference}", hint=f"nearest: {', '.join(near) or 'none'}")


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
            return flatten_tokens(model.forward_intermediates(pictures_BCHW, **options)["image_intermediates"][-1])
        found = model.forward_intermediates(pictures_BCHW, **options, output_fmt="NLC", output_extra_tokens=True)
        return torch.cat([found["image_intermediates_prefix"][-1], found["image_intermediates"][-1]], dim=1)

    def preprocessing(self, name: str) -> Preprocessing:
        from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

        size = self.config(name)["vision_cfg"]["image_size"]
        # A folder says how pixels are normalised. A name does not: its published weights do, where they agree.
        entries = [get_pretrained_cfg(name, tag) for tag in list_pretrained_tags_by_model(name)]
        if name.startswith(_LOCAL):
            file = Path(name.removeprefix(_LOCAL)) / "open_clip_config.json"
            entries = [parse_json(file.read_text(encoding="utf-8")).get("preprocess_cfg") or {}]
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
            with hub_files(encoder, "configuration"):
                # An encoder of transformers has the type of its configuration.
                return _build_text_tower(config["embed_dim"], text).float()
        return _build_text_tower(config["embed_dim"], text, bool(config.get("quick_gelu")))

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        found = model(tokens_BL)
        return found[0] if isinstance(found, tuple) else found

    def context_length(self, name: str) -> int:
        return int(self.config(name)["text_cfg"].get("context_length", 77))

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        import open_clip

        hub = self.config(name)["text_cfg"].get("hf_tokenizer_name")
        with hub_files(f"hf:{hub or name}", "tokenizer"):
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
        if not found and name.startswith(_LOCAL):
            raise UserError(
                f"open_clip:{name}: that folder has no open_clip_config.json that can be read",
                hint="name a folder that open_clip or train export --format open_clip wrote",
            )
        if not found:
            raise unknown_name_error(f"open_clip:{name}", open_clip.list_models())
        return found


class _Timm:
    """timm: classifiers of ImageNet lose their last layer; that of a CLIP's tower is its projection."""

    def image(self, name: str) -> nn.Module:
        import timm
        from timm.data import infer_imagenet_subset

        if not name.startswith(_LOCAL) and not timm.is_model(name):
            raise unknown_name_error(f"timm:{name}", timm.list_models())
        try:
            with torch.device("meta"):
                classes = infer_imagenet_subset(timm.create_model(name).pretrained_cfg)
            return timm.create_model(name, **({} if classes is None else {"num_classes": 0}))
        except (RuntimeError, OSError, ValueError) as error:
            tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
            hint = f"tags: {', '.join(tags) or 'none'}"
            if name.startswith(_LOCAL):
                hint = "name a folder with timm's config.json, as train export --format timm writes it"
            raise UserError(f"timm:{name}: {first_line(error)}", hint=hint) from error

    def embed(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        return model(pictures_BCHW)

    def tokens(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        features: Any = model.forward_features  # type: ignore[union-attr]
        return flatten_tokens(features(pictures_BCHW), channels_last=getattr(model, "output_fmt", "") == "NHWC")

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


_LIBRARIES: dict[str, Any] = {"open_clip": _OpenClip(), "timm": _Timm(), "hf": HuggingFace()}


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
    """What a tower is before it has weights: the width W of its embedding, number and width D of an image tower's
    tokens, and the names of its tensors."""

    width: int
    names: frozenset[str]
    num_tokens: int = 0
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
                f"--size-px is {size_px}, and {reference} takes pictures of {native} px",
                hint=f"use --size-px {native}",
                flags=("--size-px",),
            ) from error
    num_tokens, token_width = tokens.shape[1:]
    names = frozenset(model.state_dict())
    return Outline(width=found.shape[-1], names=names, num_tokens=num_tokens, token_width=token_width)


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
