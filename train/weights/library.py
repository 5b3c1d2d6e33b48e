"""Weights of towers that libraries build (`--towers.image`, `--towers.text`): under our names, and back.

    ours                     open_clip                  transformers
    video.model.*            visual.*                   vision_model.*, visual_projection, or all of a model's
    text.model.*             text.*, or CLIP's          text_model.*, text_projection, or all of a model's

timm's files are of an image tower alone. What else is in a file is converted like the weights of a CLIP. No library has
our parts around its own: `video.proj`, `video.pool.*`, `video.temporal_embedding`, `text.text_projection`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipmill.train.config.model import Towers
from clipmill.train.models.hugging_face import read_processor
from clipmill.train.models.libraries import image_outline, preprocessing_of, text_outline
from clipmill.train.weights.conversion import LOGIT_SCALE, ConvertedStateDict, Format, SourceFacts, Tensors, any_begins
from clipmill.train.weights.files import colours, read_config
from clipmill.train.weights.hf_clip import from_hf
from clipmill.train.weights.open_clip import BUFFERS, TEXT_ROOTS, from_open_clip

IMAGE, TEXT = "video.model.", "text.model."
LOGIT_BIAS = "logit_bias"
_ANY_PX = 224
_PLAIN = Towers()
_OF_IMAGE = ("visual", "vision_model", "visual_projection")
OF_TEXT = ("text", "text_model", *TEXT_ROOTS)  # first parts of the names of a CLIP's text tower, and of its temperature


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
    return Format(name="library", title=which, convert=partial(_convert_state, names), matches=lambda _: True)


def _convert_state(names: Mapping[str, frozenset[str]], state: Tensors) -> ConvertedStateDict:
    tensors, origins = dict[str, torch.Tensor](), dict[str, str]()
    unknown, rest, ignored = dict[str, torch.Tensor](), dict[str, torch.Tensor](), list[str]()
    # Of a model with two towers, the first part of a name says which.
    has_both = any_begins(state, "token_embedding.", *(f"{root}." for root in ("text", "text_model", *_OF_IMAGE)))
    for name, tensor in state.items():
        root = name.partition(".")[0]
        sides = list(names)
        if has_both:
            sides = [TEXT] if root in OF_TEXT else [IMAGE] if root in _OF_IMAGE else []
        sides = [side for side in sides if side in names and root != LOGIT_SCALE]
        ours = next((f"{side}{part}" for side in sides for part in _endings(name) if part in names[side]), None)
        if not tensor.is_floating_point() or name.endswith(BUFFERS) or name == LOGIT_BIAS:
            ignored.append(name)
        elif ours is not None and ours not in tensors:
            tensors[ours], origins[ours] = tensor, name
        else:
            (unknown if sides else rest)[name] = tensor
    other = from_hf(rest) if any_begins(rest, "text_model.", "vision_model.") else from_open_clip(rest)
    return ConvertedStateDict(
        tensors={**other.tensors, **tensors},
        origins={**other.origins, **origins},
        unknown={**other.unknown, **unknown},
        ignored=(*other.ignored, *ignored),
    )


def _endings(name: str) -> Iterator[str]:
    """A name, and the same without its first one and two parts."""
    parts = name.split(".")
    for begin in range(min(3, len(parts))):
        yield ".".join(parts[begin:])


def library_facts(folder: Path) -> SourceFacts:
    """How the pictures were normalised that weights in a folder were trained on."""
    own = read_config(folder / "open_clip_config.json")
    found = (own.get("preprocess_cfg") or {}) if own is not None else read_processor(str(folder))
    found = found or (read_config(folder / "config.json") or {}).get("pretrained_cfg") or {}
    return facts_of_entry({name: found.get(f"image_{name}", found.get(name)) for name in ("mean", "std")})


def facts_of_entry(entry: Mapping[str, Any], towers: Towers = _PLAIN) -> SourceFacts:
    """Facts from the entry of a tag of open_clip, whose weights are for `towers`."""
    mean, std = (colours(None if entry.get(name) is None else list(entry[name])) for name in ("mean", "std"))
    is_other = entry.get("quick_gelu") and not (towers.image or "").endswith("-quickgelu")
    remarks = ("trained with QuickGELU, which open_clip:NAME-quickgelu has",) if is_other else ()
    names = {name: value for name in ("image", "text") if (value := getattr(towers, name, None)) is not None}
    picture_px = None if towers.image is None else preprocessing_of(towers.image).size_px
    return SourceFacts(mean=mean, std=std, picture_px=picture_px, towers=names, remarks=remarks)


def state_of(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a library's module (`IMAGE` or `TEXT`), by its own names."""
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
