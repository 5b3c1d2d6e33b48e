"""Dimensions of towers, temperature and bias, derived from the tensors of weights."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import PATCH_PX, ModelName
from clipmill.train.distributed.world import World
from clipmill.train.models.dual_encoder import DualEncoderSize
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.run.checkpoint import fill, read_table
from clipmill.train.weights.conversion import CONV, LOGIT_SCALE, PROJECTION, TEMPORAL_EMBEDDING, Tensors, require_finite
from clipmill.train.weights.loading import depth_of
from clipmill.train.weights.source import Source

_POSITIONS = "video.positional_embedding"
# Width of an attention head in published CLIP and VideoMAE models; ViT-H (width 1280) and ViT-g (1408) have 16 heads.
_HEAD_WIDTH, _NUM_HEADS = 64, {1280: 16, 1408: 16}
_RGB = 3


def match_size(size: DualEncoderSize, source: Source) -> DualEncoderSize:
    """Return `size` with the tower dimensions of the weights.

    The number of heads cannot be read from tensors. It comes from the configuration of the weights, from `size` if the
    widths are equal, or from published models with the same width, whichever is available first.

    Raises:
        UserError: The configuration states a different depth, or a number of heads that does not divide the width.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in source.converted.tensors.items()}
    video, text, width = size.video, size.text, size.embedding_width
    if (conv := shapes.get(CONV)) is not None:
        trunk = _trunk(video.trunk, conv[0], depth_of(shapes, "video"), source.facts.video_heads)
        is_divided = any(".temporal_attn." in name for name in shapes)
        video = replace(video, trunk=trunk, patch_px=conv[-1], num_channels=conv[1], is_divided=is_divided)
    if (gain := shapes.get("text.ln_final.weight")) is not None:
        text = replace(text, trunk=_trunk(text.trunk, gain[0], depth_of(shapes, "text"), source.facts.text_heads))
    if (projection := shapes.get(PROJECTION)) is not None:
        width = projection[-1]
    for name, trunk, configured_depth in (
        ("video", video.trunk, source.facts.video_depth),
        ("text", text.trunk, source.facts.text_depth),
    ):
        if depth := depth_of(shapes, name):
            if configured_depth not in (None, depth):
                _refuse(source, name, f"{depth} blocks", f"{configured_depth}")
            if trunk.width % trunk.num_heads:
                _refuse(source, name, f"width {trunk.width}", f"{trunk.num_heads} heads, which do not divide the width")
    return DualEncoderSize(video=video, text=text, embedding_width=width)


def _refuse(source: Source, tower: str, actual_text: str, configured_text: str) -> NoReturn:
    raise UserError(
        f"{source.title}: the {tower} tower of the weights has {actual_text}, but the configuration says "
        f"{configured_text}",
        hint="download the weights and the configuration again: one of them is truncated or from another model",
    )


def _trunk(trunk: TransformerSize, width: int, depth: int, num_heads: int | None) -> TransformerSize:
    if num_heads is None:
        num_heads = trunk.num_heads if width == trunk.width else _NUM_HEADS.get(width, max(1, width // _HEAD_WIDTH))
    return replace(trunk, width=width, depth=depth, num_heads=num_heads)


def model_name_of(source: Source) -> ModelName:
    """Return b16 or l14, whichever has the patch size of the weights; b16 if neither has it."""
    conv = source.converted.tensors.get(CONV)
    names: list[ModelName] = ["b16", "l14"]
    return next((name for name in names if conv is not None and PATCH_PX[name] == conv.shape[-1]), "b16")


def frame_px_of(source: Source, *, default: int) -> int:
    """Return the side length, in pixels, of the frames that the weights were trained on.

    The length is derived from the positional embeddings, or else read from the configuration. Return `default` if
    neither specifies the length.

    Raises:
        UserError: The weights take latents. Files from other projects do not record the size or the column of latents.
    """
    tensors = source.converted.tensors
    conv, positions = tensors.get(CONV), tensors.get(_POSITIONS)
    if conv is not None and conv.shape[1] != _RGB:
        raise UserError(
            f"{source.title}: the weights take {conv.shape[1]} channels, but clips of pixels have {_RGB}",
            hint="use the run itself, or the folder that `train export` wrote for it",
        )
    if conv is None or positions is None:
        return source.facts.frame_px or default
    return math.isqrt(len(positions) - 1) * int(conv.shape[-1])


def num_frames_of(source: Source, *, default: int) -> int:
    """Return the number of frames that the weights' temporal embedding covers; `default` if they contain none."""
    embedding = source.converted.tensors.get(TEMPORAL_EMBEDDING)
    return default if embedding is None else len(embedding) * (source.tubelet or 1)


_LOG_SCALE, _TEMPERATURE, _BIAS = "objective.logit_scale", "objective.temperature", "objective.logit_bias"


@dataclass(frozen=True)
class Logits:
    """Map from cosine similarities to logits: logit = cosine * exp(log_scale) + bias.

    Attributes:
        log_scale: log(1 / temperature); None if it is unknown, or if each sample has its own temperature.
        bias: Bias of SigLIP's loss; None for other losses.
    """

    log_scale: float | None = None
    bias: float | None = None


def logits_of(tensors: Tensors) -> Logits:
    """Return the map to logits for a converted state dict of another project or of an export."""
    scale = tensors.get(LOGIT_SCALE)
    return Logits(None if scale is None else float(scale))


def read_logits(checkpoint: Path) -> Logits:
    """Return the map to logits from the loss in a checkpoint.

    Raises:
        UserError: The checkpoint cannot be read, or a number in it is not finite.
    """
    table = read_table(checkpoint)
    names = [name for name in (_LOG_SCALE, _TEMPERATURE, _BIAS) if name in table and not table[name]["size"]]
    numbers = {name: torch.zeros(()) for name in names}
    if numbers:
        fill(checkpoint, table, numbers, world=World())  # one call, because each call downloads from a bucket
    require_finite(numbers, source=checkpoint)
    values = {name: float(number) for name, number in numbers.items()}
    temperature = values.get(_TEMPERATURE)
    return Logits(values.get(_LOG_SCALE, None if temperature is None else -math.log(temperature)), values.get(_BIAS))
