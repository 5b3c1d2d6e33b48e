"""Hugging Face's VisionEncoderDecoderModel of TimeSformer and GPT-2, and each of the two alone: names, configuration.

A TimesformerModel alone has its names without `encoder.`, a TimesformerForVideoClassification with `timesformer.`
instead; a GPT2LMHeadModel has its names without `decoder.`, a GPT2Model without `decoder.transformer.`. GPT-2's
matrices are transposed, and its last layer is the token embedding, `decoder.lm_head.weight` in old files.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.weights.conversion import (
    ConvertedStateDict,
    Format,
    NameTable,
    SourceFacts,
    any_begins,
    by_origin,
    require_finite,
    require_float_weights,
    require_floats,
)
from clipmill.train.weights.files import read_config, read_tensors, weights_file, without_prefixes
from clipmill.train.weights.hf_caption_config import CaptionConfig, caption_config_of, facts_of_hf_caption

_VIDEO, _TEXT = "video.transformer.resblocks.N", "decoder.transformer.resblocks.N"
_LAYER, _H = "encoder.encoder.layer.N", "decoder.transformer.h.N"
# Leading dimensions of 1 that theirs have and ours do not.
_LEADING = {"video.class_embedding": 2, "video.positional_embedding": 1, "video.temporal_embedding": 1}


def _whole_name(name: str) -> str:
    """The name in the whole captioner of a tensor of one of its parts."""
    if name.startswith("timesformer."):
        return f"encoder.{name.removeprefix('timesformer.')}"
    if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        return f"decoder.transformer.{name}"
    if name.startswith(("transformer.", "lm_head.")):
        return f"decoder.{name}"
    return f"encoder.{name}" if name.startswith(("embeddings.", "encoder.layer.", "layernorm.")) else name


def _to_ours(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, _LEADING[name]) if name in _LEADING else _transpose(name, tensor)


def _to_theirs(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[(None,) * _LEADING[name]] if name in _LEADING else _transpose(name, tensor)


def _transpose(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous() if name.startswith("decoder.transformer.") and tensor.ndim == 2 else tensor


NAMES = NameTable(
    owner="a VisionEncoderDecoderModel of TimeSformer and GPT-2",
    names={
        "video.conv1.*": "encoder.embeddings.patch_embeddings.projection.*",
        "video.class_embedding": "encoder.embeddings.cls_token",
        "video.positional_embedding": "encoder.embeddings.position_embeddings",
        "video.temporal_embedding": "encoder.embeddings.time_embeddings",
        f"{_VIDEO}.ln_time.*": f"{_LAYER}.temporal_layernorm.*",
        f"{_VIDEO}.time_attn.in_proj_*": f"{_LAYER}.temporal_attention.attention.qkv.*",
        f"{_VIDEO}.time_attn.out_proj.*": f"{_LAYER}.temporal_attention.output.dense.*",
        f"{_VIDEO}.time_proj.*": f"{_LAYER}.temporal_dense.*",
        f"{_VIDEO}.ln_1.*": f"{_LAYER}.layernorm_before.*",
        f"{_VIDEO}.attn.in_proj_*": f"{_LAYER}.attention.attention.qkv.*",
        f"{_VIDEO}.attn.out_proj.*": f"{_LAYER}.attention.output.dense.*",
        f"{_VIDEO}.ln_2.*": f"{_LAYER}.layernorm_after.*",
        f"{_VIDEO}.mlp.c_fc.*": f"{_LAYER}.intermediate.dense.*",
        f"{_VIDEO}.mlp.c_proj.*": f"{_LAYER}.output.dense.*",
        "video.ln_post.*": "encoder.layernorm.*",
        "projection.*": "enc_to_dec_proj.*",
        "decoder.token_embedding.weight": "decoder.transformer.wte.weight",
        "decoder.positional_embedding": "decoder.transformer.wpe.weight",
        f"{_TEXT}.ln_1.*": f"{_H}.ln_1.*",
        f"{_TEXT}.attn.in_proj_*": f"{_H}.attn.c_attn.*",
        f"{_TEXT}.attn.out_proj.*": f"{_H}.attn.c_proj.*",
        f"{_TEXT}.ln_cross.*": f"{_H}.ln_cross_attn.*",
        f"{_TEXT}.cross_attn.q_proj.*": f"{_H}.crossattention.q_attn.*",
        f"{_TEXT}.cross_attn.kv_proj.*": f"{_H}.crossattention.c_attn.*",
        f"{_TEXT}.cross_attn.out_proj.*": f"{_H}.crossattention.c_proj.*",
        f"{_TEXT}.ln_2.*": f"{_H}.ln_2.*",
        f"{_TEXT}.mlp.c_fc.*": f"{_H}.mlp.c_fc.*",
        f"{_TEXT}.mlp.c_proj.*": f"{_H}.mlp.c_proj.*",
        "decoder.ln_final.*": "decoder.transformer.ln_f.*",
    },
    # Masks that old versions kept among GPT-2's weights, the tied embedding, and a TimeSformer's classifier.
    ignored=(
        *(".attn.bias", ".crossattention.bias", "attn.masked_bias", "attention.masked_bias"),
        *("lm_head.weight", "classifier.weight", "classifier.bias"),
    ),
    canonical=_whole_name,
    to_ours=_to_ours,
    to_theirs=_to_theirs,
)
from_hf_caption, to_hf_caption = NAMES.read, NAMES.write


@dataclass(frozen=True, kw_only=True)
class CaptionFolder:
    """The sizes in a folder of transformers, and its weights under our names."""

    config: CaptionConfig
    converted: ConvertedStateDict


def read_caption_folder(folder: Path, *, needs_decoder: bool = False) -> CaptionFolder:
    """Reads config.json and the weights of the whole, of a TimeSformer, or of a GPT-2.

    Args:
        needs_decoder: refuse a TimeSformer alone.

    Raises:
        UserError: they are not there, damaged, or of a model that a captioner cannot be made of.
    """
    values = read_config(folder / "config.json")
    if values is None:
        raise UserError(f"there is no {folder / 'config.json'}", hint="name a folder that save_pretrained wrote")
    wanted = {"hint": "use a GPT-2, or a vision-encoder-decoder with one"} if needs_decoder else {}
    config = caption_config_of(values, source=str(folder), **wanted)
    path = weights_file(folder)
    state = without_prefixes(read_tensors(path))
    require_float_weights(state, source=path)
    converted = from_hf_caption(state)
    require_floats(by_origin(converted), source=path)
    require_finite(by_origin(converted), source=path)
    return CaptionFolder(config=config, converted=converted)


HF_TIMESFORMER = Format(
    name="hf_timesformer",
    title="Hugging Face's TimeSformer, or a captioner of it",
    convert=from_hf_caption,
    matches=lambda names: any_begins(
        names, "timesformer.", "encoder.embeddings.time_embeddings", "embeddings.time_embeddings"
    ),
    facts=SourceFacts(activation="gelu", video_eps=1e-6),
    model_types=("timesformer", "vision-encoder-decoder", "gpt2"),
    read_config=facts_of_hf_caption,
)
