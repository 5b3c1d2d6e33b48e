"""Convert weights of towers that libraries build (`--towers.image`, `--towers.text`) to our names, and back.

    ours                     open_clip                  transformers
    video.model.*            visual.*                   vision_model.*, visual_projection, or names without a prefix
    text.model.*             text.*, or as in CLIP      text_model.*, text_projection, or names without a prefix

timm's files contain only an image tower. Tensors of other towers are converted like the weights of a CLIP. The parts
that we add to a library's tower have no counterpart in the library: `video.proj`, `video.pool.*`,
`video.temporal_embedding` and `text.text_projection`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import DualEncoderTowers, Towers
from clipmill.train.models.dual_encoder import DualEncoderSize
from clipmill.train.models.hugging_face import read_processor
from clipmill.train.models.library_towers import image_outline, library_of, preprocessing_of, text_outline
from clipmill.train.weights.architecture import Logits
from clipmill.train.weights.conversion import (
    LOGIT_SCALE,
    ConvertedStateDict,
    Format,
    SourceFacts,
    Tensors,
    any_starts_with,
)
from clipmill.train.weights.exported import save_json, save_tensors
from clipmill.train.weights.files import read_config, rgb_values
from clipmill.train.weights.hf_clip import from_hf
from clipmill.train.weights.open_clip import BUFFERS, TEXT_ROOTS, from_open_clip, open_clip_config, to_open_clip

IMAGE, TEXT = "video.model.", "text.model."
LOGIT_BIAS = "logit_bias"
_ANY_PX = 224  # frame size for towers that specify none; tensor names do not depend on the frame size
_DEFAULT_TOWERS = Towers()
_IMAGE_COMPONENTS = ("visual", "vision_model", "visual_projection")
# First components of the names in a CLIP's text tower, and the name of the temperature.
TEXT_COMPONENTS = ("text", "text_model", *TEXT_ROOTS)


def library_format(towers: Towers) -> Format | None:
    """Return the weight format of towers that a library builds; None if no tower comes from a library."""
    names = dict[str, frozenset[str]]()
    if towers.image is not None:
        names[IMAGE] = image_outline(towers.image, preprocessing_of(towers.image).size_px or _ANY_PX).names
    if (text := getattr(towers, "text", None)) is not None:
        names[TEXT] = text_outline(text, getattr(towers, "text_pooling", "own")).names
    if not names:
        return None
    title = " and ".join(filter(None, (towers.image, text)))
    return Format(name="library", title=title, convert=partial(_convert_state, names), matches=lambda _: True)


def _convert_state(names: Mapping[str, frozenset[str]], state: Tensors) -> ConvertedStateDict:
    """Convert a state dict; `names` are the tensor names of each library tower, by prefix (`IMAGE` or `TEXT`)."""
    tensors, origins = dict[str, torch.Tensor](), dict[str, str]()
    unknown, other_state, ignored = dict[str, torch.Tensor](), dict[str, torch.Tensor](), list[str]()
    # In a model with two towers, the first component of a name identifies the tower.
    has_two_towers = any_starts_with(
        state, "token_embedding.", *(f"{root}." for root in ("text", "text_model", *_IMAGE_COMPONENTS))
    )
    for name, tensor in state.items():
        root = name.partition(".")[0]
        # The complete name, the name without its first component, and the name without its first two components.
        parts = name.split(".")
        endings = [".".join(parts[start:]) for start in range(min(3, len(parts)))]
        prefixes = list(names)
        if has_two_towers:
            prefixes = [TEXT] if root in TEXT_COMPONENTS else [IMAGE] if root in _IMAGE_COMPONENTS else []
        prefixes = [prefix for prefix in prefixes if prefix in names and root != LOGIT_SCALE]
        our_name = next((f"{prefix}{part}" for prefix in prefixes for part in endings if part in names[prefix]), None)
        if not tensor.is_floating_point() or name.endswith(BUFFERS) or name == LOGIT_BIAS:
            ignored.append(name)
        elif our_name is not None and our_name not in tensors:
            tensors[our_name], origins[our_name] = tensor, name
        else:
            (unknown if prefixes else other_state)[name] = tensor
    other_converted = (
        from_hf(other_state)
        if any_starts_with(other_state, "text_model.", "vision_model.")
        else from_open_clip(other_state)
    )
    return ConvertedStateDict(
        tensors={**other_converted.tensors, **tensors},
        origins={**other_converted.origins, **origins},
        unknown={**other_converted.unknown, **unknown},
        ignored=(*other_converted.ignored, *ignored),
    )


def library_facts(folder: Path) -> SourceFacts:
    """Return the pixel normalisation that the weights in a folder were trained with."""
    config = read_config(folder / "open_clip_config.json")
    preprocess = (config.get("preprocess_cfg") or {}) if config is not None else read_processor(str(folder))
    preprocess = preprocess or (read_config(folder / "config.json") or {}).get("pretrained_cfg") or {}
    return facts_of_entry({name: preprocess.get(f"image_{name}", preprocess.get(name)) for name in ("mean", "std")})


def facts_of_entry(entry: Mapping[str, Any], towers: Towers = _DEFAULT_TOWERS) -> SourceFacts:
    """Return facts from open_clip's entry for a pretrained tag; `towers` are the towers that the weights are for."""
    mean, std = (rgb_values(None if entry.get(name) is None else list(entry[name])) for name in ("mean", "std"))
    lacks_quick_gelu = entry.get("quick_gelu") and not (towers.image or "").endswith("-quickgelu")
    remarks = (
        ("they were trained with QuickGELU; to use it, load open_clip:NAME-quickgelu",) if lacks_quick_gelu else ()
    )
    names = {name: value for name in ("image", "text") if (value := getattr(towers, name, None)) is not None}
    frame_px = None if towers.image is None else preprocessing_of(towers.image).size_px
    return SourceFacts(mean=mean, std=std, frame_px=frame_px, towers=names, remarks=remarks)


def state_of(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a library's module (`IMAGE` or `TEXT`), with the library's names."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


# Export of towers in their library's own format. The folder is written as the library itself writes it, and contains
# only the tensors that the format can store.


@dataclass(frozen=True, kw_only=True)
class LibraryTowers:
    """Towers of a dual encoder whose image tower comes from a library.

    Attributes:
        settings: Settings of the run.
        size: Dimensions of the towers.
        weights: Tensors, keyed by our names, including `logit_scale`.
        logits: Map from cosine similarities to logits.
    """

    settings: ClipSettings
    size: DualEncoderSize
    weights: Tensors
    logits: Logits

    @property
    def towers(self) -> DualEncoderTowers:
        """Settings of the towers."""
        assert isinstance(self.settings.towers, DualEncoderTowers)
        return self.settings.towers

    @property
    def image(self) -> str:
        """Name of the image tower."""
        assert self.towers.image is not None
        return self.towers.image

    @property
    def normalization(self) -> dict[str, list[float]]:
        """Mean and standard deviation of the pixel normalisation, as `mean` and `std`."""
        init = self.settings.init
        return {"mean": list(init.pixel_mean or ()), "std": list(init.pixel_std or ())}


def write_library(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    """Write towers in the format of the image tower's library. Return the weights file, and our names for its tensors.

    Raises:
        UserError: The library's format cannot store these towers.
    """
    library = towers.image.partition(":")[0]
    write = {"open_clip": _write_open_clip, "timm": _write_timm, "hf": _write_hf}[library]
    return write(folder, towers)


def _write_open_clip(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    weights, text = towers.weights, towers.towers.text
    if "video.proj" in weights or ("text.text_projection" in weights and text is not None):
        raise UserError(
            "--format open_clip cannot store the projection that clipmill added to a tower of open_clip",
            hint="use --format torch, or train without --towers.embedding-width",
        )
    if not any(name.startswith("text.") for name in weights) or (text or "open_clip:").partition(":")[0] != "open_clip":
        raise UserError(
            "--format open_clip needs a text tower that open_clip supports, but this model has none",
            hint="use --format torch, which stores only the video tower",
        )
    library: Any = library_of(towers.image)[0]
    config = dict(library.config(towers.image.partition(":")[2]))
    state = {f"visual.{name}": tensor for name, tensor in state_of(weights, IMAGE).items()}
    if text is None:
        model_config = open_clip_config(towers.size, towers.settings.init, image_px=towers.settings.size_px)[
            "model_cfg"
        ]
        config |= {"text_cfg": model_config["text_cfg"], "quick_gelu": model_config["quick_gelu"]}
        state |= to_open_clip({name: tensor for name, tensor in weights.items() if name.startswith("text.")})
        config.pop("custom_text", None)
    else:
        length = towers.towers.context_length
        text_config = library.config(text.partition(":")[2])["text_cfg"]
        config |= {
            "text_cfg": {**text_config, **({} if length is None else {"context_length": length})},
            "custom_text": True,
        }
        state |= {f"text.{name}": tensor for name, tensor in state_of(weights, TEXT).items()}
    state[LOGIT_SCALE] = weights[LOGIT_SCALE]
    if "init_logit_bias" in config or towers.logits.bias is not None:
        config["init_logit_bias"] = towers.logits.bias or config.get("init_logit_bias", 0.0)
        state[LOGIT_BIAS] = torch.tensor(float(config["init_logit_bias"]))
    config["embed_dim"] = towers.size.embedding_width
    file = folder / "open_clip_model.safetensors"
    save_tensors(state, file)
    preprocess = {**towers.normalization, "size": towers.settings.size_px, "mode": "RGB"}
    preprocess["interpolation"] = preprocessing_of(towers.image).interpolation or "bicubic"
    save_json(folder / "open_clip_config.json", {"model_cfg": config, "preprocess_cfg": preprocess})
    return file, {name for name in weights if name.startswith((IMAGE, "text.")) or name == LOGIT_SCALE}


def _write_timm(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    import timm

    model = _fill_model(towers.image, towers.weights)
    config = {"mean": towers.normalization["mean"], "std": towers.normalization["std"]}
    timm.models.save_for_hf(model, str(folder), model_config=config, safe_serialization=True)
    return folder / "model.safetensors", {name for name in towers.weights if name.startswith(IMAGE)}


def _write_hf(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # save_pretrained would print a progress bar between our lines
    library: Any = library_of(towers.image)[0]
    name, weights = towers.image.partition(":")[2], towers.weights
    stored_names = {our_name for our_name in weights if our_name.startswith(IMAGE)}
    if towers.towers.text == towers.image:
        # Both towers come from the same model.
        config = library.config(name)
        if towers.towers.context_length is not None:
            config.text_config.max_position_embeddings = towers.towers.context_length
        model: Any = transformers.AutoModel.from_config(config)
        weight_format = library_format(towers.towers)
        assert weight_format is not None
        origins = weight_format.convert(model.state_dict()).origins
        our_names = {their_name: our_name for our_name, their_name in origins.items()}
        model.load_state_dict(
            {their_name: weights[our_name] for their_name, our_name in our_names.items()}, strict=False
        )
        stored_names = set(our_names.values())
        if (bias := getattr(model, LOGIT_BIAS, None)) is not None and towers.logits.bias is not None:
            nn.init.constant_(bias, towers.logits.bias)
        library.hub_tokenizer(name).save_pretrained(folder)
    else:
        model = _fill_model(towers.image, weights)
    model.save_pretrained(folder)
    normalization = {f"image_{key}": value for key, value in towers.normalization.items()}
    save_json(folder / "preprocessor_config.json", {**read_processor(name), **normalization})
    return folder / "model.safetensors", stored_names


def _fill_model(reference: str, weights: Tensors) -> Any:
    library, name = library_of(reference)
    model = library.image(name)
    model.load_state_dict(state_of(weights, IMAGE))
    return model
