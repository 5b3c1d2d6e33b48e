"""Names and configuration of Hugging Face's TimeSformer, GPT-2, and the model that combines them.

In the file of a single TimeSformer or GPT-2, names lack a prefix: a TimesformerModel has no `encoder.` (a
TimesformerForVideoClassification has `timesformer.` instead), a GPT2LMHeadModel has no `decoder.`, and a GPT2Model has
no `decoder.transformer.`. GPT-2's matrices are transposed. GPT-2's output layer shares the matrix of the token
embedding. Old files contain this matrix a second time, as `decoder.lm_head.weight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.models.captioner import Gpt2Size
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.weights.conversion import (
    ConvertedStateDict,
    Format,
    NameTable,
    SourceFacts,
    any_starts_with,
    require_finite,
    require_float_weights,
    require_floats,
    tensors_by_origin,
)
from clipmill.train.weights.files import (
    as_config,
    read_config,
    read_tensors,
    rgb_values,
    weights_file,
    without_prefixes,
)


@dataclass(frozen=True, kw_only=True)
class TimeSformerShape:
    """Dimensions of a TimeSformer, and of the clips that it takes.

    Attributes:
        size: Dimensions of the network.
        image_px: Side length of a frame, in pixels.
        num_frames: Number of frames in a clip.
    """

    size: VideoViTSize
    image_px: int
    num_frames: int


@dataclass(frozen=True, kw_only=True)
class CaptionConfig:
    """Dimensions of a captioner's parts; None for a part that the model lacks."""

    video: TimeSformerShape | None
    decoder: Gpt2Size | None


def hf_caption_config(
    video: TimeSformerShape, decoder: Gpt2Size, *, end_id: int, pad_id: int, dropout: float
) -> dict[str, Any]:
    """Return the content of config.json for a VisionEncoderDecoderModel.

    Args:
        video: Dimensions of the encoder.
        decoder: Dimensions of the decoder.
        end_id: ID of the token before and after a caption.
        pad_id: ID of the padding token.
        dropout: Dropout probability of the decoder.
    """
    from transformers import GPT2Config, TimesformerConfig, VisionEncoderDecoderConfig

    tokens: dict[str, Any] = {"bos_token_id": end_id, "eos_token_id": end_id, "pad_token_id": pad_id}
    trunk, text = video.size.trunk, decoder.trunk
    encoder = TimesformerConfig(
        image_size=video.image_px,
        patch_size=video.size.patch_px,
        num_channels=video.size.num_channels,
        num_frames=video.num_frames,
        hidden_size=trunk.width,
        num_hidden_layers=trunk.depth,
        num_attention_heads=trunk.num_heads,
        intermediate_size=trunk.mlp_width,
        hidden_act=trunk.activation,
        layer_norm_eps=trunk.norm_eps,
    )
    gpt2 = GPT2Config(
        add_cross_attention=True,
        vocab_size=decoder.vocabulary_size,
        n_positions=decoder.context_length,
        n_embd=text.width,
        n_layer=text.depth,
        n_head=text.num_heads,
        layer_norm_epsilon=text.norm_eps,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=0.0,
        **{**tokens, "is_decoder": True},
    )
    caption_config = VisionEncoderDecoderConfig(
        encoder=encoder.to_dict(),
        decoder=gpt2.to_dict(),
        architectures=["VisionEncoderDecoderModel"],
        # The encoder and the decoder do not share an embedding.
        **{**tokens, "decoder_start_token_id": end_id, "tie_word_embeddings": False},
    )
    return caption_config.to_dict()


def generation_config(*, end_id: int, pad_id: int, decoding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of generation_config.json.

    Args:
        end_id: ID of the token before and after a caption.
        pad_id: ID of the padding token.
        decoding: Arguments for `generate` of transformers.
    """
    from transformers import GenerationConfig

    tokens = {"bos_token_id": end_id, "decoder_start_token_id": end_id, "eos_token_id": end_id, "pad_token_id": pad_id}
    values = {**tokens, **decoding}
    # Write values even if they are the defaults of this version of transformers: other versions have other defaults.
    return {**GenerationConfig(**values).to_diff_dict(), **values}


def caption_config_of(
    config: Mapping[str, Any],
    *,
    source: str,
    hint: str = "use a TimeSformer, a GPT-2, or a vision-encoder-decoder with both",
) -> CaptionConfig:
    """Return the dimensions that the config.json of a captioner, a TimeSformer, or a GPT-2 specifies.

    Args:
        config: Content of config.json.
        source: Origin of the configuration, for error messages.
        hint: Hint for the error about an unsupported type of model.

    Raises:
        UserError: The type of the model is not supported, or the model uses a feature that our models lack.
    """
    kind = config.get("model_type")
    if kind == "timesformer":
        return CaptionConfig(video=_timesformer_of(config, source=source), decoder=None)
    if kind == "gpt2":
        return CaptionConfig(video=None, decoder=_gpt2_of(config, source=source))
    if kind == "vision-encoder-decoder":
        encoder, text = config.get("encoder") or {}, config.get("decoder") or {}
        if (encoder.get("model_type"), text.get("model_type")) == ("timesformer", "gpt2"):
            video = _timesformer_of(encoder, source=source)
            return CaptionConfig(video=video, decoder=_gpt2_of(text, source=source))
        kind = f"{kind} with {encoder.get('model_type')} and {text.get('model_type')}"
    raise UserError(f"{source} is a {kind} model, which cannot be part of a captioner", hint=hint)


_TIMESFORMER_KEYS = (
    "image_size patch_size num_channels num_frames hidden_size num_hidden_layers num_attention_heads "
    "intermediate_size hidden_act layer_norm_eps attention_type qkv_bias"
)
_GPT2_KEYS = (
    "vocab_size n_positions n_embd n_layer n_head n_inner activation_function layer_norm_epsilon scale_attn_weights "
    "scale_attn_by_inverse_layer_idx tie_word_embeddings bos_token_id eos_token_id"
)


def _timesformer_of(entries: Mapping[str, Any], *, source: str) -> TimeSformerShape:
    from transformers import TimesformerConfig

    config = as_config(TimesformerConfig, entries, keys=_TIMESFORMER_KEYS, source=source)
    _require(
        config,
        source=source,
        attention_type=("divided_space_time",),
        qkv_bias=(True,),
        hidden_act=("gelu", "quick_gelu"),
        intermediate_size=(4 * config.hidden_size,),
    )
    _require_divisible(config, width="hidden_size", heads="num_attention_heads", source=source)
    for name in ("image_size", "patch_size"):
        if not isinstance(getattr(config, name), int):
            raise UserError(
                f"{source}: {name} is {getattr(config, name)!r}, but images and patches must be square",
                hint="use weights for square images and patches",
            )
    trunk = TransformerSize(
        width=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        activation=config.hidden_act,
        norm_eps=config.layer_norm_eps,
    )
    size = VideoViTSize(trunk=trunk, patch_px=config.patch_size, num_channels=config.num_channels)
    return TimeSformerShape(size=size, image_px=config.image_size, num_frames=config.num_frames)


def _gpt2_of(entries: Mapping[str, Any], *, source: str) -> Gpt2Size:
    from transformers import GPT2Config

    # GPT2Config's default end token is outside a vocabulary that is smaller than GPT-2's, and would cause warnings.
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = as_config(GPT2Config, {**entries, **ends}, keys=_GPT2_KEYS, source=source)
    _require(
        config,
        source=source,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        tie_word_embeddings=(True,),
        n_inner=(None, 4 * config.n_embd),
    )
    _require_divisible(config, width="n_embd", heads="n_head", source=source)
    trunk = TransformerSize(
        width=config.n_embd, depth=config.n_layer, num_heads=config.n_head, norm_eps=config.layer_norm_epsilon
    )
    return Gpt2Size(trunk=trunk, vocabulary_size=config.vocab_size, context_length=config.n_positions)


def _require(config: Any, *, source: str, **values: tuple[Any, ...]) -> None:
    """Raise a UserError for a value that our models do not support; `values` lists the supported values by name."""
    for name, supported_values in values.items():
        if getattr(config, name) not in supported_values:
            raise UserError(
                f"{source}: {name} is {getattr(config, name)!r}, which clipmill's models do not support",
                hint=f"use weights whose {name} is {' or '.join(map(repr, supported_values))}",
            )


def _require_divisible(config: Any, *, width: str, heads: str, source: str) -> None:
    """Raise a UserError if the width is not a multiple of the number of heads. Tensor shapes do not reveal this."""
    if getattr(config, width) % getattr(config, heads):
        raise UserError(
            f"{source}: {width} {getattr(config, width)} is not a multiple of {heads} {getattr(config, heads)}",
            hint="correct config.json, or download the folder again",
        )


def facts_of_hf_caption(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Return facts from config.json and the processor (`read_processor`) of a TimeSformer or a captioner.

    Raises:
        UserError: The model is a GPT-2 without a video tower, or `caption_config_of` rejects the configuration.
    """
    video = caption_config_of(config, source=source).video
    if video is None:
        raise UserError(
            f"{source} has no video tower",
            hint="pass a video tower to --init.weights; pass a GPT-2 to --decoder.weights",
        )
    trunk = video.size.trunk
    return SourceFacts(
        activation=trunk.activation,
        video_eps=trunk.norm_eps,
        mean=rgb_values(preprocess.get("image_mean")),
        std=rgb_values(preprocess.get("image_std")),
        video_heads=trunk.num_heads,
    )


_VIDEO, _TEXT = "video.transformer.resblocks.N", "decoder.transformer.resblocks.N"
_LAYER, _H = "encoder.encoder.layer.N", "decoder.transformer.h.N"
# Number of leading dimensions of size 1 that the foreign tensor has and our tensor lacks.
_NUM_LEADING_DIMS = {"video.class_embedding": 2, "video.positional_embedding": 1, "video.temporal_embedding": 1}


def _complete_name(name: str) -> str:
    """Return the name that a tensor of a single TimeSformer or GPT-2 has in a captioner."""
    if name.startswith("timesformer."):
        return f"encoder.{name.removeprefix('timesformer.')}"
    if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        return f"decoder.transformer.{name}"
    if name.startswith(("transformer.", "lm_head.")):
        return f"decoder.{name}"
    return f"encoder.{name}" if name.startswith(("embeddings.", "encoder.layer.", "layernorm.")) else name


def _transpose(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous() if name.startswith("decoder.transformer.") and tensor.ndim == 2 else tensor


NAMES = NameTable(
    owner="a VisionEncoderDecoderModel with TimeSformer and GPT-2",
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
    # Masks that old versions of transformers stored with GPT-2's weights, the output layer of GPT-2 (the same matrix as
    # the token embedding), and the classifier of a TimeSformer.
    ignored=(
        *(".attn.bias", ".crossattention.bias", "attn.masked_bias", "attention.masked_bias"),
        *("lm_head.weight", "classifier.weight", "classifier.bias"),
    ),
    canonical=_complete_name,
    to_ours=lambda name, tensor: (
        tensor.flatten(0, _NUM_LEADING_DIMS[name]) if name in _NUM_LEADING_DIMS else _transpose(name, tensor)
    ),
    to_theirs=lambda name, tensor: (
        tensor[(None,) * _NUM_LEADING_DIMS[name]] if name in _NUM_LEADING_DIMS else _transpose(name, tensor)
    ),
)
from_hf_caption, to_hf_caption = NAMES.read, NAMES.write


@dataclass(frozen=True, kw_only=True)
class CaptionFolder:
    """Dimensions and converted weights from a transformers folder."""

    config: CaptionConfig
    converted: ConvertedStateDict


def read_caption_folder(folder: Path, *, needs_decoder: bool = False) -> CaptionFolder:
    """Read config.json and the weights of a captioner, a TimeSformer, or a GPT-2.

    Args:
        needs_decoder: True if the hint of an error should ask for a model with a decoder.

    Raises:
        UserError: The files are missing or damaged, or belong to a model that cannot be part of a captioner.
    """
    values = read_config(folder / "config.json")
    if values is None:
        raise UserError(f"there is no {folder / 'config.json'}", hint="use a folder that save_pretrained wrote")
    hint = {"hint": "use a GPT-2, or a vision-encoder-decoder with a GPT-2"} if needs_decoder else {}
    config = caption_config_of(values, source=str(folder), **hint)
    path = weights_file(folder)
    state = without_prefixes(read_tensors(path))
    require_float_weights(state, source=path)
    converted = from_hf_caption(state)
    require_floats(tensors_by_origin(converted), source=path)
    require_finite(tensors_by_origin(converted), source=path)
    return CaptionFolder(config=config, converted=converted)


HF_TIMESFORMER = Format(
    name="hf_timesformer",
    title="Hugging Face's TimeSformer, or a captioner that contains it",
    convert=from_hf_caption,
    matches=lambda names: any_starts_with(
        names, "timesformer.", "encoder.embeddings.time_embeddings", "embeddings.time_embeddings"
    ),
    facts=SourceFacts(activation="gelu", video_eps=1e-6),
    model_types=("timesformer", "vision-encoder-decoder", "gpt2"),
    read_config=facts_of_hf_caption,
)
