"""Export of dual encoders (open_clip, transformers, timm, torch.export, ONNX), and conversion of CLIP weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import deferred_checks
from clipmill.train.config.model import LIBRARY, DualEncoderTowers, kind_of
from clipmill.train.evaluation.served import PROGRAM_FORMATS, exported_program, logit_facts
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, ModelShape, size_of
from clipmill.train.spec import AdoptedModel, ExportRequest
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import with_source_towers
from clipmill.train.weights.architecture import frame_px_of, match_size, model_name_of, num_frames_of
from clipmill.train.weights.conversion import CONV, LOGIT_SCALE, TEMPORAL_EMBEDDING, Tensors
from clipmill.train.weights.exported import (
    EXTRAS_FILE,
    Export,
    preprocessor_config,
    require_format,
    save_extras,
    save_json,
    save_tensors,
)
from clipmill.train.weights.hf_clip import TOKENIZER_REMARK, hf_config, save_tokenizer, to_hf
from clipmill.train.weights.library import LibraryTowers, write_library
from clipmill.train.weights.open_clip import open_clip_config, to_open_clip
from clipmill.train.weights.source import Say, Source

FrameEmbedding = Literal["mean", "zero"]

_POSITIONS = "video.positional_embedding"
_CLIP_LOGIT_SCALE = 2.6592  # log(1 / 0.07), the initial value in CLIP
_RGB, _CUBE_DIMS = 3, 5  # number of channels of RGB; number of dimensions of a convolution over cubes


@dataclass(frozen=True, kw_only=True)
class ImageTowers:
    """Weights of a dual encoder whose video tower was converted to take a single frame.

    Attributes:
        tensors: Tensors without the temporal embedding, keyed by their names in clipmill.
        extras: Original tensors of the video tower that were changed or omitted.
        limitations: Limitations of the image tower, as remarks for the user.
    """

    tensors: dict[str, torch.Tensor]
    extras: dict[str, torch.Tensor]
    limitations: tuple[str, ...]


def image_towers(weights: Tensors, *, rule: FrameEmbedding) -> ImageTowers:
    """Convert weights of a dual encoder so that its video tower takes a single frame.

    Args:
        weights: Weights of a DualEncoder.
        rule: Treatment of the temporal embedding. mean: add its mean to the positional embeddings of the patches, so
            that an image is treated as a frame at an unknown time; zero: omit the temporal embedding, whose values are
            0 in a new video tower.
    """
    tensors, extras, limitations = dict(weights), {}, []
    temporal_TD = extras[TEMPORAL_EMBEDDING] = tensors.pop(TEMPORAL_EMBEDDING)
    if temporal_TD.count_nonzero():
        treatment = {"mean": "its mean is added to the positional embeddings of patches", "zero": "it is omitted"}[rule]
        limitations.append(f"an image tower cannot use the temporal embedding of {len(temporal_TD)} steps: {treatment}")
        if rule == "mean":
            extras[_POSITIONS] = tensors[_POSITIONS]
            tensors[_POSITIONS] = tensors[_POSITIONS].clone()
            tensors[_POSITIONS][1:] += temporal_TD.mean(0)
    if tensors[CONV].ndim == _CUBE_DIMS:
        extras[CONV] = tensors[CONV]
        depth = tensors[CONV].shape[2]
        limitations.append(f"cubes of {depth} frames become patches: an image is treated as {depth} equal frames")
        tensors[CONV] = tensors[CONV].sum(2)
    return ImageTowers(tensors=tensors, extras=extras, limitations=tuple(limitations))


def adopted_clip(source: Source, path: Path, *, say: Say) -> AdoptedModel | None:
    """Convert CLIP weights to a dual encoder.

    Return None if the weights lack a text tower, or if the video tower is neither CLIP's nor from a library.
    """
    tensors, towers = source.converted.tensors, source.facts.towers
    is_library = source.kind == LIBRARY and {"image", "text"} <= towers.keys()
    if not (is_library or (source.kind == "clip" and any(name.startswith("text.") for name in tensors))):
        return None
    with deferred_checks():  # the checks of --model do not apply to these weights
        settings = DualEncoderSettings(
            model=model_name_of(source),
            num_frames=num_frames_of(source, default=DualEncoderSettings.num_frames),
            size_px=frame_px_of(source, default=DualEncoderSettings.size_px),
            towers=DualEncoderTowers(**towers) if is_library else DualEncoderTowers(kind="clip"),
        )
        settings = with_source_towers(settings, source, say=say)
    if is_library:
        say(f"weights: an image model; the embedding of a clip is the mean over its {settings.num_frames} frames")
    elif TEMPORAL_EMBEDDING not in tensors:
        say(
            "weights: an image model; in clipmill, its tower attends to the patches of all "
            f"{settings.num_frames} frames together; use --num-frames 1 for the original image model"
        )
    size = match_size(size_of(settings.model, settings.towers), source)
    return AdoptedModel(settings=settings, shape=ModelShape(size=size, image_px=settings.size_px))


def exported_clip(request: ExportRequest) -> Export:
    """Export a dual encoder to the requested format.

    Raises:
        UserError: The format cannot represent the towers.
    """
    format_name, settings, log_scale = request.format_name, request.settings, request.logits.log_scale
    if format_name in PROGRAM_FORMATS:
        return _exported_video_tower(request)
    if settings.towers.image is not None:
        return _exported_library(request)
    require_format(format_name, ("open_clip", "hf", *PROGRAM_FORMATS), what="a dual encoder")
    if settings.towers.text is not None:
        raise UserError(
            f"the text tower is {settings.towers.text}, but --format {format_name} needs the text tower of CLIP",
            hint="use --format torch or onnx to export only the video tower",
            flags=("--format",),
        )
    if (kind := kind_of(settings.towers)) != "clip":
        raise UserError(
            f"the video tower is of kind {kind}, but --format {format_name} needs the image tower of CLIP",
            hint="use --format torch or onnx, which support every video tower",
            flags=("--format",),
        )
    _require_clip(request.weights)
    size, side_px = request.shape.size, settings.size_px
    towers = image_towers(request.weights, rule=request.frame_embedding)
    remarks = [f"{limitation}; the original tensors are kept in {EXTRAS_FILE}" for limitation in towers.limitations]
    if log_scale is None:
        remarks.append(
            "the loss had no single temperature: the exported temperature is 0.07, the initial value of CLIP"
        )
    if format_name == "hf":
        remarks.append(TOKENIZER_REMARK)
    scale = torch.tensor(_CLIP_LOGIT_SCALE if log_scale is None else log_scale)
    tensors = {**towers.tensors, LOGIT_SCALE: scale}

    def write(folder: Path) -> None:
        if format_name == "open_clip":
            file = folder / "open_clip_model.safetensors"
            save_tensors(to_open_clip(tensors), file)
            save_json(folder / "open_clip_config.json", open_clip_config(size, settings.init, image_px=side_px))
        else:
            file = folder / "model.safetensors"
            save_tensors(to_hf(tensors), file)
            save_json(folder / "config.json", hf_config(size, image_px=side_px, log_scale=float(scale)))
            preprocessor = preprocessor_config("CLIPImageProcessor", settings, kind="clip")
            save_json(folder / "preprocessor_config.json", preprocessor)
            save_tokenizer(folder, context_length=size.text.context_length)
        save_extras(towers.extras, folder, weights_path=file)

    is_exact = request.frame_embedding == "mean" or not request.weights[TEMPORAL_EMBEDDING].count_nonzero()
    model_input = "" if settings.num_frames == 1 and is_exact else "single images"
    return Export(write=write, remarks=tuple(remarks), model_input=model_input)


def _exported_library(request: ExportRequest) -> Export:
    """Export towers in the format of the image tower's library, and all other tensors to a separate file."""
    settings = request.settings
    library, _, name = settings.towers.image.partition(":")
    require_format(request.format_name, (library, *PROGRAM_FORMATS), what=f"{library}'s tower {name}")
    log_scale = request.logits.log_scale
    scale = torch.tensor(_CLIP_LOGIT_SCALE if log_scale is None else log_scale)
    towers = LibraryTowers(
        settings=settings,
        size=request.shape.size,
        weights={**request.weights, LOGIT_SCALE: scale},
        logits=request.logits,
    )

    def write(folder: Path) -> None:
        file, written_names = write_library(folder, towers)
        if extras := {name: tensor for name, tensor in towers.weights.items() if name not in written_names}:
            save_extras(extras, folder, weights_path=file)

    part_names = sorted({name.split(".")[0] for name in request.weights if not name.startswith("video.model.")})
    remarks = (
        (f"tensors of {', '.join(part_names)} that {library} cannot store are in {EXTRAS_FILE}",) if part_names else ()
    )
    return Export(write=write, remarks=remarks, model_input="" if settings.num_frames == 1 else "single images")


class _VideoTower(nn.Module):
    """Module that embeds clips [B, C, T, H, W] as unit-length vectors [B, E] with a dual encoder's video tower."""

    def __init__(self, model: DualEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        return self.model.embed_video(clips)


def _exported_video_tower(request: ExportRequest) -> Export:
    """Export the video tower as a program (torch.export or ONNX)."""
    settings, size = request.settings, request.shape.size
    model = DualEncoder(
        size,
        image_px=request.shape.image_px,
        num_frames=settings.num_frames,
        attend=attend_with_sdpa,
        towers=replace(settings.towers, activation_checkpointing=False),
        has_text_tower=False,
    )
    model.load_state_dict({name: tensor for name, tensor in request.weights.items() if name.startswith("video.")})
    output = {
        "kind": "embeddings of unit length",
        "width": size.embedding_width,
        **logit_facts(request.logits.log_scale, request.logits.bias),
    }
    return exported_program(request, _VideoTower(model), output)


def _require_clip(weights: Tensors) -> None:
    """Raise a UserError unless both towers have CLIP's architecture, and the video tower takes pixels."""
    if not any(name.startswith("text.") for name in weights):
        raise UserError(
            "the run has no text tower (--text-tower frozen), but --format open_clip and hf require one",
            hint="export a run with --text-tower trained",
            flags=("--text-tower",),
        )
    if any(".temporal_attn." in name for name in weights):
        raise UserError(
            "the video tower has LaViLa's divided attention over time and space, but --format open_clip and hf need an "
            "image tower",
            hint="use the weights without exporting them: train eval, train embed and load_model read them",
        )
    if weights[CONV].shape[1] != _RGB:
        raise UserError(
            f"the run was trained on latents with {weights[CONV].shape[1]} channels, but --format open_clip and hf "
            "need pixels",
            hint="export a run with --input pixels",
        )
