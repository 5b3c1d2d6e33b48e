"""A dual encoder as a folder that open_clip or transformers opens.

A video tower is written as the image tower that it is for one frame. What an image tower has no place for stays beside
it, in video_extras.safetensors: `--init.weights FOLDER` reads both and gets the run's weights bit by bit.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from manifests.errors import UserError
from train.config.files import load_settings
from train.config.training import DualEncoderSettings
from train.models.dual_encoder import DualEncoderSize, size_of
from train.models.transformer import NORM_EPS
from train.run.folder import RunFolder
from train.weights.conversion import CLIP_MEAN, CLIP_STD, CONV, LOGIT_SCALE, TEMPORAL_EMBEDDING, Tensors
from train.weights.exported import (
    EXTRAS_FILE,
    Exported,
    preprocessor_config,
    require_format,
    save_extras,
    save_json,
    save_tensors,
)
from train.weights.hf_clip import hf_config, to_hf
from train.weights.open_clip import to_open_clip
from train.weights.sources import read_log_scale

FrameEmbedding = Literal["mean", "zero"]

_POSITIONS = "video.positional_embedding"
_CLIPS_START = 2.6592  # log(1 / 0.07), what an untrained CLIP has
_RGB = 3


@dataclass(frozen=True, kw_only=True)
class ImageTowers:
    """Towers of which the video tower takes pictures.

    Attributes:
        tensors: by our name, without a temporal embedding.
        extras: the tensors that were changed or have no place, as they were.
        lost: what the image tower cannot do, for the user.
    """

    tensors: dict[str, torch.Tensor]
    extras: dict[str, torch.Tensor]
    lost: tuple[str, ...]


def image_towers(weights: Tensors, *, rule: FrameEmbedding) -> ImageTowers:
    """The towers for single pictures.

    Args:
        weights: a DualEncoder's.
        rule: mean: the mean temporal embedding is added to the positions of the patches (a picture is a frame from
            anywhere in a clip); zero: it is left out (what the tower computed before it learned one).
    """
    tensors, extras, lost = dict(weights), {}, []
    temporal_TD = tensors.pop(TEMPORAL_EMBEDDING)
    extras[TEMPORAL_EMBEDDING] = temporal_TD
    if temporal_TD.count_nonzero():
        how = {"mean": "its mean is added to the positions of patches", "zero": "it is left out"}[rule]
        lost.append(f"the temporal embedding of {len(temporal_TD)} steps has no place in an image tower: {how}")
    if rule == "mean" and temporal_TD.count_nonzero():
        extras[_POSITIONS] = tensors[_POSITIONS]
        tensors[_POSITIONS] = tensors[_POSITIONS].clone()
        tensors[_POSITIONS][1:] += temporal_TD.mean(0)
    if tensors[CONV].ndim == 5:
        extras[CONV] = tensors[CONV]
        lost.append(
            f"cubes of {tensors[CONV].shape[2]} frames become patches, which see a picture as so many equal frames"
        )
        tensors[CONV] = tensors[CONV].sum(2)
    return ImageTowers(tensors=tensors, extras=extras, lost=tuple(lost))


def exported_clip(
    run: RunFolder, weights: Tensors, *, checkpoint: Path, form: str, frame_embedding: FrameEmbedding
) -> Exported:
    """A dual encoder for open_clip or transformers.

    Raises:
        UserError: the format cannot hold such towers.
    """
    require_format(form, ("open_clip", "hf"), what="a dual encoder")
    settings = load_settings(run.settings, DualEncoderSettings)
    size = _checked_size(settings, weights)
    towers = image_towers(weights, rule=frame_embedding)
    log_scale = read_log_scale(checkpoint)
    remarks = [f"{one}; kept in {EXTRAS_FILE}" for one in towers.lost]
    if log_scale is None:
        remarks.append("the loss had no single temperature: the format wants one, and is given 0.07, CLIP's start")
    tensors = {**towers.tensors, LOGIT_SCALE: torch.tensor(_CLIPS_START if log_scale is None else log_scale)}
    return Exported(
        write=lambda folder: _write(folder, tensors, towers.extras, size, settings, form=form), remarks=tuple(remarks)
    )


def _checked_size(settings: DualEncoderSettings, weights: Tensors) -> DualEncoderSize:
    """The size of the towers.

    Raises:
        UserError: they are none of CLIP's.
    """
    if not any(name.startswith("text.") for name in weights):
        raise UserError(
            "the run has no text tower (--text-tower frozen): open_clip and transformers know no model without one",
            hint="export a run that trained one",
        )
    if weights[CONV].shape[1] != _RGB:
        raise UserError(
            f"the run was trained on latents of {weights[CONV].shape[1]} channels, and both formats take pictures",
            hint="export a run of --input pixels",
        )
    return size_of(settings.model, settings.towers)


def _write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    extras: dict[str, torch.Tensor],
    size: DualEncoderSize,
    settings: DualEncoderSettings,
    *,
    form: str,
) -> None:
    if form == "open_clip":
        file = folder / "open_clip_model.safetensors"
        save_tensors(to_open_clip(tensors), file)
        save_json(folder / "open_clip_config.json", open_clip_config(size, settings))
    else:
        file = folder / "model.safetensors"
        save_tensors(to_hf(tensors), file)
        log_scale = float(tensors[LOGIT_SCALE])
        save_json(folder / "config.json", hf_config(size, image_px=settings.size_px, log_scale=log_scale))
        preprocessor = preprocessor_config("CLIPImageProcessor", settings, kind="clip")
        save_json(folder / "preprocessor_config.json", preprocessor)
        write_tokenizer(folder, context_length=size.text.context_length)
    save_extras(extras, folder, beside=file)


def open_clip_config(size: DualEncoderSize, settings: DualEncoderSettings) -> dict[str, Any]:
    """open_clip_config.json of the towers for pictures."""
    video, text = size.video.trunk, size.text.trunk
    norm = {} if video.norm_eps == NORM_EPS else {"norm_kwargs": {"eps": video.norm_eps}}
    return {
        "model_cfg": {
            "embed_dim": size.embedding_width,
            "quick_gelu": video.activation == "quick_gelu",
            "vision_cfg": {
                "image_size": settings.size_px,
                "layers": video.depth,
                "width": video.width,
                "head_width": video.width // video.num_heads,
                "patch_size": size.video.patch_px,
                **norm,
            },
            "text_cfg": {
                "context_length": size.text.context_length,
                "vocab_size": size.text.vocabulary_size,
                "width": text.width,
                "heads": text.num_heads,
                "layers": text.depth,
            },
        },
        "preprocess_cfg": {
            "mean": list(settings.init.pixel_mean or CLIP_MEAN),
            "std": list(settings.init.pixel_std or CLIP_STD),
        },
    }


# CLIP's byte-pair tokenizer as the files that transformers reads, from the vocabulary that open_clip ships.


# The same tokens under the names that OpenAI and transformers give them.
_NAMES = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
_START, _END = "<|startoftext|>", "<|endoftext|>"


def write_tokenizer(folder: Path, *, context_length: int) -> None:
    """Writes vocab.json, merges.txt and their configuration."""
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    vocabulary = {_NAMES.get(token, token): number for token, number in tokenizer.encoder.items()}
    merges = [" ".join(pair) for pair in tokenizer.bpe_ranks]
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    config = {
        **special,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": context_length,
        "tokenizer_class": "CLIPTokenizer",
    }
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
