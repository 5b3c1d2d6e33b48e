"""Towers of libraries in their library's own format: what it has a place for, as the library itself writes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import DualEncoderTowers
from clipmill.train.models.dual_encoder import DualEncoderSize
from clipmill.train.models.hugging_face import read_processor
from clipmill.train.models.libraries import library_of, preprocessing_of
from clipmill.train.weights.conversion import LOGIT_SCALE, Tensors
from clipmill.train.weights.exported import save_json, save_tensors
from clipmill.train.weights.library import IMAGE, LOGIT_BIAS, TEXT, library_format, state_of
from clipmill.train.weights.logits import Logits
from clipmill.train.weights.open_clip import open_clip_config, to_open_clip


@dataclass(frozen=True, kw_only=True)
class LibraryTowers:
    """Towers of a dual encoder, whose image tower is a library's.

    Attributes:
        weights: by our names, with `logit_scale`.
        logits: of the loss.
    """

    settings: ClipSettings
    size: DualEncoderSize
    weights: Tensors
    logits: Logits

    @property
    def towers(self) -> DualEncoderTowers:
        """Their settings."""
        assert isinstance(self.settings.towers, DualEncoderTowers)
        return self.settings.towers

    @property
    def image(self) -> str:
        """The name of the image tower."""
        assert self.towers.image is not None
        return self.towers.image

    @property
    def normalisation(self) -> dict[str, list[float]]:
        """Mean and standard deviation of pixels."""
        init = self.settings.init
        return {"mean": list(init.pixel_mean or ()), "std": list(init.pixel_std or ())}


def write_library(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    """Write towers in the format of their image tower's library: the file of weights, and our names of what it holds.

    Raises:
        UserError: the library has no place for such towers.
    """
    library = towers.image.partition(":")[0]
    write = {"open_clip": _write_open_clip, "timm": _write_timm, "hf": _write_hf}[library]
    return write(folder, towers)


def _write_open_clip(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    weights, text = towers.weights, towers.towers.text
    if "video.proj" in weights or ("text.text_projection" in weights and text is not None):
        raise UserError(
            "a tower has a projection of its own beside open_clip's, which open_clip has no place for",
            hint="use --format torch, or train without --towers.embedding-width",
        )
    if not any(name.startswith("text.") for name in weights) or (text or "open_clip:").partition(":")[0] != "open_clip":
        raise UserError(
            "open_clip's models have two towers of open_clip, and the text tower is of another kind",
            hint="use --format torch, which is the video tower alone",
        )
    library: Any = library_of(towers.image)[0]
    config = dict(library.config(towers.image.partition(":")[2]))
    state = {f"visual.{name}": one for name, one in state_of(weights, IMAGE).items()}
    if text is None:
        own = open_clip_config(towers.size, towers.settings.init, image_px=towers.settings.size_px)["model_cfg"]
        config |= {"text_cfg": own["text_cfg"], "quick_gelu": own["quick_gelu"]}
        state |= to_open_clip({name: one for name, one in weights.items() if name.startswith("text.")})
        config.pop("custom_text", None)
    else:
        length = towers.towers.context_length
        its = library.config(text.partition(":")[2])["text_cfg"]
        config |= {"text_cfg": {**its, **({} if length is None else {"context_length": length})}, "custom_text": True}
        state |= {f"text.{name}": one for name, one in state_of(weights, TEXT).items()}
    state[LOGIT_SCALE] = weights[LOGIT_SCALE]
    if "init_logit_bias" in config or towers.logits.bias is not None:
        config["init_logit_bias"] = towers.logits.bias or config.get("init_logit_bias", 0.0)
        state[LOGIT_BIAS] = torch.tensor(float(config["init_logit_bias"]))
    config["embed_dim"] = towers.size.embedding_width
    file = folder / "open_clip_model.safetensors"
    save_tensors(state, file)
    preprocess = {**towers.normalisation, "size": towers.settings.size_px, "mode": "RGB"}
    preprocess["interpolation"] = preprocessing_of(towers.image).interpolation or "bicubic"
    save_json(folder / "open_clip_config.json", {"model_cfg": config, "preprocess_cfg": preprocess})
    return file, {name for name in weights if name.startswith((IMAGE, "text.")) or name == LOGIT_SCALE}


def _write_timm(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    import timm

    model = _fill_model(towers.image, towers.weights)
    config = {"mean": towers.normalisation["mean"], "std": towers.normalisation["std"]}
    timm.models.save_for_hf(model, str(folder), model_config=config, safe_serialization=True)
    return folder / "model.safetensors", {name for name in towers.weights if name.startswith(IMAGE)}


def _write_hf(folder: Path, towers: LibraryTowers) -> tuple[Path, set[str]]:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # of save_pretrained, among our own lines
    library: Any = library_of(towers.image)[0]
    name, weights = towers.image.partition(":")[2], towers.weights
    held = {one for one in weights if one.startswith(IMAGE)}
    if towers.towers.text == towers.image:
        # Both halves of one model.
        config = library.config(name)
        if towers.towers.context_length is not None:
            config.text_config.max_position_embeddings = towers.towers.context_length
        model: Any = transformers.AutoModel.from_config(config)
        form = library_format(towers.towers)
        assert form is not None
        ours = {theirs: one for one, theirs in form.convert(model.state_dict()).origins.items()}
        model.load_state_dict({theirs: weights[one] for theirs, one in ours.items()}, strict=False)
        held = set(ours.values())
        if (bias := getattr(model, LOGIT_BIAS, None)) is not None and towers.logits.bias is not None:
            nn.init.constant_(bias, towers.logits.bias)
        library.hub_tokenizer(name).save_pretrained(folder)
    else:
        model = _fill_model(towers.image, weights)
    model.save_pretrained(folder)
    changed = {f"image_{key}": value for key, value in towers.normalisation.items()}
    save_json(folder / "preprocessor_config.json", {**read_processor(name), **changed})
    return folder / "model.safetensors", held


def _fill_model(reference: str, weights: Tensors) -> Any:
    library, name = library_of(reference)
    model = library.image(name)
    model.load_state_dict(state_of(weights, IMAGE))
    return model
