"""Names of Hugging Face's VisionEncoderDecoderModel of a TimesformerModel and a GPT2LMHeadModel.

ours                                        theirs
video.conv1.*                               encoder.embeddings.patch_embeddings.projection.*
video.class_embedding, [D]                  encoder.embeddings.cls_token, [1, 1, D]
video.positional_embedding, [1 + P, D]      encoder.embeddings.position_embeddings, [1, 1 + P, D]
video.temporal_embedding, [T, D]            encoder.embeddings.time_embeddings, [1, T, D]
video.transformer.resblocks.N.*             encoder.encoder.layer.N.*
video.ln_post.*                             encoder.layernorm.*
projection.*                                enc_to_dec_proj.*
decoder.token_embedding.weight              decoder.transformer.wte.weight      (and decoder.lm_head.weight, the same)
decoder.positional_embedding                decoder.transformer.wpe.weight
decoder.transformer.resblocks.N.*           decoder.transformer.h.N.*           (matrices transposed)
decoder.ln_final.*                          decoder.transformer.ln_f.*

A TimesformerForVideoClassification has `classifier.*` beside, which is `head.*` here.

A TimesformerModel alone has its names without `encoder.`, a TimesformerForVideoClassification with `timesformer.`
instead; a GPT2LMHeadModel has its names without `decoder.`, a GPT2Model without `decoder.transformer.`.
"""

import re

import torch

from train.weights.converted import Converted, Tensors, convert_names

_SINGLE = {
    "video.conv1.weight": "encoder.embeddings.patch_embeddings.projection.weight",
    "video.conv1.bias": "encoder.embeddings.patch_embeddings.projection.bias",
    "video.class_embedding": "encoder.embeddings.cls_token",
    "video.positional_embedding": "encoder.embeddings.position_embeddings",
    "video.temporal_embedding": "encoder.embeddings.time_embeddings",
    "video.ln_post.weight": "encoder.layernorm.weight",
    "video.ln_post.bias": "encoder.layernorm.bias",
    "projection.weight": "enc_to_dec_proj.weight",
    "projection.bias": "enc_to_dec_proj.bias",
    "decoder.token_embedding.weight": "decoder.transformer.wte.weight",
    "decoder.positional_embedding": "decoder.transformer.wpe.weight",
    "decoder.ln_final.weight": "decoder.transformer.ln_f.weight",
    "decoder.ln_final.bias": "decoder.transformer.ln_f.bias",
    "head.weight": "classifier.weight",
    "head.bias": "classifier.bias",
}
_VIDEO_BLOCK = {
    "ln_time": "temporal_layernorm",
    "time_attn.in_proj": "temporal_attention.attention.qkv",
    "time_attn.out_proj": "temporal_attention.output.dense",
    "time_proj": "temporal_dense",
    "ln_1": "layernorm_before",
    "attn.in_proj": "attention.attention.qkv",
    "attn.out_proj": "attention.output.dense",
    "ln_2": "layernorm_after",
    "mlp.c_fc": "intermediate.dense",
    "mlp.c_proj": "output.dense",
}
_TEXT_BLOCK = {
    "ln_1": "ln_1",
    "attn.in_proj": "attn.c_attn",
    "attn.out_proj": "attn.c_proj",
    "ln_cross": "ln_cross_attn",
    "cross_attn.q_proj": "crossattention.q_attn",
    "cross_attn.kv_proj": "crossattention.c_attn",
    "cross_attn.out_proj": "crossattention.c_proj",
    "ln_2": "ln_2",
    "mlp.c_fc": "mlp.c_fc",
    "mlp.c_proj": "mlp.c_proj",
}
_BLOCKS = {"video": ("encoder.encoder.layer", _VIDEO_BLOCK), "decoder": ("decoder.transformer.h", _TEXT_BLOCK)}
_OURS = re.compile(r"(video|decoder)\.transformer\.resblocks\.(\d+)\.(.+)[._](weight|bias)")
_THEIRS = re.compile(r"(encoder\.encoder\.layer|decoder\.transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")
# Leading dimensions of 1 that theirs have and ours have not.
_LEADING = {"video.class_embedding": 2, "video.positional_embedding": 1, "video.temporal_embedding": 1}
# Masks that old versions kept among GPT-2's weights, the second end of the tied embedding, and a classifier's head.
_NO_WEIGHTS = ("attn.masked_bias", "attention.masked_bias", "lm_head.weight", "classifier.weight", "classifier.bias")
_MASK = re.compile(r"(.*\.)?h\.\d+\.(attn|crossattention)\.bias")
_TEXT_ROOTS = ("wte.", "wpe.", "h.", "ln_f.")
_VIDEO_ROOTS = ("embeddings.", "encoder.layer.", "layernorm.")


def from_hf_caption(state: Tensors) -> Converted:
    """A state dict of a VisionEncoderDecoderModel, or of one of its two parts, under our names."""
    whole = {_in_whole(name): tensor for name, tensor in state.items()}
    masks = [name for name in whole if _MASK.fullmatch(name)]
    found = convert_names(
        {name: tensor for name, tensor in whole.items() if name not in masks}, _our_name, no_weights=_NO_WEIGHTS
    )
    tensors = {name: _ours_of(name, tensor) for name, tensor in found.tensors.items()}
    return Converted(tensors=tensors, origins=found.origins, unknown=found.unknown, ignored=(*found.ignored, *masks))


def to_hf_caption(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Our tensors as a state dict of a VisionEncoderDecoderModel, without the second end of the tied embedding.

    Raises:
        ValueError: a tensor has a name that it knows nothing like.
    """
    return {_their_name(name): _theirs_of(name, tensor) for name, tensor in tensors.items()}


def _in_whole(name: str) -> str:
    """The name that a tensor of one of the two parts has in the whole."""
    if name.startswith("timesformer."):
        return f"encoder.{name.removeprefix('timesformer.')}"
    if name.startswith(_TEXT_ROOTS):
        return f"decoder.transformer.{name}"
    if name.startswith(("transformer.", "lm_head.")):
        return f"decoder.{name}"
    return f"encoder.{name}" if name.startswith(_VIDEO_ROOTS) else name


def _our_name(name: str) -> str | None:
    for ours, theirs in _SINGLE.items():
        if name == theirs:
            return ours
    if match := _THEIRS.fullmatch(name):
        for root, (layers, parts) in _BLOCKS.items():
            for ours, theirs in parts.items():
                if (match[1], match[3]) == (layers, theirs):
                    # in_proj_weight is a parameter of ours, and out_proj.weight one of a module.
                    joint = "_" if ours.endswith("in_proj") else "."
                    return f"{root}.transformer.resblocks.{match[2]}.{ours}{joint}{match[4]}"
    return None


def _their_name(name: str) -> str:
    if name in _SINGLE:
        return _SINGLE[name]
    if match := _OURS.fullmatch(name):
        layers, parts = _BLOCKS[match[1]]
        if match[3] in parts:
            return f"{layers}.{match[2]}.{parts[match[3]]}.{match[4]}"
    raise ValueError(f"a VisionEncoderDecoderModel of TimeSformer and GPT-2 has nothing like {name}")


def _ours_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name in _LEADING:
        return tensor.flatten(0, _LEADING[name])
    return tensor.T.contiguous() if _is_transposed(name, tensor) else tensor


def _theirs_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name in _LEADING:
        return tensor[(None,) * _LEADING[name]]
    return tensor.T.contiguous() if _is_transposed(name, tensor) else tensor


def _is_transposed(name: str, tensor: torch.Tensor) -> bool:
    return name.startswith("decoder.transformer.") and tensor.ndim == 2
