"""Weights of towers that libraries build (`--towers.image`, `--towers.text`): under our names, and back.

    ours                     open_clip                  transformers
    video.model.*            visual.*                   vision_model.*, visual_projection, or all of a model's
    text.model.*             text.*, or CLIP's          text_model.*, text_projection, or all of a model's

timm's files are of an image tower alone. What else is in a file is converted like the weights of a CLIP. No library has
our parts around its own: `video.proj`, `video.pool.*`, `video.temporal_embedding`, `text.text_projection`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipmill.train.config.model import Towers
from clipmill.train.models.libraries import image_outline, preprocessing_of, text_outline
from clipmill.train.weights.conversion import (
    ConvertedStateDict,
    Format,
    SourceFacts,
    Tensors,
    any_begins,
)
from clipmill.train.weights.files import colours, read_config
from clipmill.train.weights.hf_clip import from_hf
from clipmill.train.weights.open_clip import BUFFERS, TEXT_ROOTS, from_open_clip

IMAGE, TEXT = "video.model.", "text.model."
LOGIT_BIAS = "logit_bias"
_ANY_PX = 224
_OF_TEXT, _OF_IMAGE = ("text", "text_model"), ("visual", "vision_model", "visual_projection")


def library_format(towers: Towers) -> Format | None:
    """The format of weights for towers, one of which is a library's; None if none is."""
    names = dict[str, frozenset[str]]()
    if towers.image is not None:
        names[IMAGE] = image_outline(towers.image, preprocessing_of(towers.image).size_px or _ANY_PX).names
    if (text := getattr(towers, "text", None)) is not None:
        names[TEXT] = text_outline(text, getattr(towers, "text_pooling", "own")).names
    if not names:
        return None
    which = " and ".join(filter(None, (towers.image, text)))
    return Format(name="library", title=which, convert=partial(_converted, names), matches=lambda _: True)


def _converted(names: Mapping[str, frozenset[str]], state: Tensors) -> ConvertedStateDict:
    tensors, origins, rest = dict[str, torch.Tensor](), dict[str, str](), dict[str, torch.Tensor]()
    is_clip = any_begins(state, "visual.", "token_embedding.", *(f"{root}." for root in (*_OF_TEXT, *_OF_IMAGE)))
    ignored = [name for name, one in state.items() if not one.is_floating_point() or name.endswith(BUFFERS)]
    ignored += [name for name in (LOGIT_BIAS,) if name in state]
    for name, tensor in state.items():
        ours = _our_name(name, names, is_clip=is_clip)
        if name in ignored:
            continue
        if ours is None or ours in tensors:
            rest[name] = tensor
        else:
            tensors[ours], origins[ours] = tensor, name
    other = from_hf(rest) if any_begins(rest, "text_model.", "vision_model.") else from_open_clip(rest)
    return replace(
        other,
        tensors={**other.tensors, **tensors},
        origins={**other.origins, **origins},
        ignored=(*other.ignored, *ignored),
    )


def _our_name(name: str, names: Mapping[str, frozenset[str]], *, is_clip: bool) -> str | None:
    """The name of a tensor of a library's tower; None for others. Prefixes may be the library's or a larger model's."""
    root = name.partition(".")[0]
    if is_clip:
        sides = [TEXT] if root in _OF_TEXT or root in TEXT_ROOTS else [IMAGE] if root in _OF_IMAGE else []
    else:
        sides = list(names)
    for side in sides:
        found = next((part for part in _endings(name) if part in names.get(side, ())), None)
        if found is not None:
            return f"{side}{found}"
    return None


def _endings(name: str) -> Iterator[str]:
    """A name, and the same without its first one and two parts."""
    parts = name.split(".")
    for begin in range(min(3, len(parts))):
        yield ".".join(parts[begin:])


def library_facts(folder: Path) -> SourceFacts:
    """How the pictures were normalised that weights in a folder were trained on."""
    own = read_config(folder / "open_clip_config.json")
    found = (own.get("preprocess_cfg") or {}) if own is not None else read_config(folder / "preprocessor_config.json")
    found = found or (read_config(folder / "config.json") or {}).get("pretrained_cfg") or {}
    return facts_of_entry({name: found.get(f"image_{name}", found.get(name)) for name in ("mean", "std")})


def facts_of_entry(entry: Mapping[str, Any]) -> SourceFacts:
    """Facts from the entry of a tag of open_clip."""
    mean, std = (colours(None if entry.get(name) is None else list(entry[name])) for name in ("mean", "std"))
    remarks = ("trained with QuickGELU, which open_clip:NAME-quickgelu has",) if entry.get("quick_gelu") else ()
    return SourceFacts(mean=mean, std=std, remarks=remarks)


def state_of(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a library's module (`IMAGE` or `TEXT`), by its own names."""
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
