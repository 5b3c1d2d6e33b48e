"""The configurations of a VisionEncoderDecoderModel of TimeSformer and GPT-2, from our sizes and back; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from manifests.errors import UserError
from train.config.model import Activation
from train.models.gpt2 import Gpt2Size
from train.models.transformer import TransformerSize
from train.models.video_vit import VideoViTSize
from train.tasks.caption.settings import (
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)
from train.weights.configs import colours
from train.weights.converted import Facts

# What the models here compute, whatever the configuration: another value of these would be another model.
_TIMESFORMER_NEEDED: dict[str, tuple[Any, ...]] = {
    "attention_type": ("divided_space_time",),
    "qkv_bias": (True,),
    "hidden_act": ("gelu", "quick_gelu"),
}
_GPT2_NEEDED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
}
# Their defaults, where a configuration says nothing.
_TIMESFORMER: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "num_frames": 8,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "attention_type": "divided_space_time",
    "qkv_bias": True,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class TimeSformerShape:
    """Sizes of a TimeSformer and of the clips that it takes."""

    size: VideoViTSize
    image_px: int
    num_frames: int


@dataclass(frozen=True, kw_only=True)
class CaptionConfig:
    """What a folder says of its weights; a part that it has not is None.

    Attributes:
        end_id: the token before and behind a caption.
        pad_id: the token that fills rows up.
    """

    video: TimeSformerShape | None
    decoder: Gpt2Size | None
    end_id: int | None = None
    pad_id: int | None = None


def hf_caption_config(
    video: TimeSformerShape, decoder: Gpt2Size, *, end_id: int, pad_id: int, dropout: float
) -> dict[str, Any]:
    """config.json of the whole."""
    tokens = {"decoder_start_token_id": end_id, "bos_token_id": end_id, "eos_token_id": end_id, "pad_token_id": pad_id}
    trunk, text = video.size.trunk, decoder.trunk
    return {
        "architectures": ["VisionEncoderDecoderModel"],
        "model_type": "vision-encoder-decoder",
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,  # not between encoder and decoder
        **tokens,
        "encoder": {
            **_TIMESFORMER,
            "model_type": "timesformer",
            "image_size": video.image_px,
            "patch_size": video.size.patch_px,
            "num_channels": video.size.num_channels,
            "num_frames": video.num_frames,
            "hidden_size": trunk.width,
            "num_hidden_layers": trunk.depth,
            "num_attention_heads": trunk.num_heads,
            "intermediate_size": 4 * trunk.width,
            "hidden_act": trunk.activation,
            "layer_norm_eps": trunk.norm_eps,
        },
        "decoder": {
            **_GPT2,
            "model_type": "gpt2",
            "is_decoder": True,
            "add_cross_attention": True,
            "vocab_size": decoder.vocabulary_size,
            "n_positions": decoder.context_length,
            "n_embd": text.width,
            "n_layer": text.depth,
            "n_head": text.num_heads,
            "layer_norm_epsilon": text.norm_eps,
            "embd_pdrop": dropout,
            "resid_pdrop": dropout,
            "attn_pdrop": 0.0,
            **{name: tokens[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        },
    }


def hf_generation_config(
    *, end_id: int, pad_id: int, decoding: DecodingSettings | None = None, context_length: int | None = None
) -> dict[str, Any]:
    """generation_config.json: the tokens that `generate` begins, ends and fills with, and how it writes captions.

    Args:
        decoding: as captions are written by default; transformers' own defaults, 20 tokens among them, when left out.
        context_length: tokens of a text at most.
    """
    tokens = {
        "bos_token_id": end_id,
        "decoder_start_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
    }
    if decoding is None:
        return tokens
    longest = min(max_tokens_of(decoding), context_length or max_tokens_of(decoding))
    lengths: dict[str, Any] = {"max_new_tokens": longest}
    if decoding.min_tokens:
        lengths["min_new_tokens"] = min(decoding.min_tokens, longest - 1)
    return {**tokens, **lengths, **_choosing(decoding)}


def caption_config_of(
    config: Mapping[str, Any],
    *,
    source: str,
    hint: str = "use a TimeSformer, a GPT-2, or a vision-encoder-decoder of both",
) -> CaptionConfig:
    """What a config.json says: of the whole, of a TimeSformer, or of a GPT-2.

    Args:
        hint: what to use instead of another model.

    Raises:
        UserError: it is of another model, or of one that computes something else than those here.
    """
    kind = config.get("model_type")
    if kind == "timesformer":
        return CaptionConfig(video=_timesformer_of(config, source=source), decoder=None)
    if kind == "gpt2":
        decoder = _gpt2_of(config, source=source)
        return CaptionConfig(video=None, decoder=decoder, end_id=config.get("eos_token_id", 50256))
    if kind == "vision-encoder-decoder":
        encoder, text = config.get("encoder") or {}, config.get("decoder") or {}
        if (encoder.get("model_type"), text.get("model_type")) == ("timesformer", "gpt2"):
            end_id = config.get("decoder_start_token_id", text.get("bos_token_id"))
            return CaptionConfig(
                video=_timesformer_of(encoder, source=source),
                decoder=_gpt2_of(text, source=source),
                end_id=end_id,
                pad_id=config.get("pad_token_id", text.get("pad_token_id")),
            )
        kind = f"{kind} of {encoder.get('model_type')} and {text.get('model_type')}"
    raise UserError(
        f"{source} is a {kind}, which a captioner cannot be made of",
        hint=hint,
    )


def facts_of_hf_caption(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> Facts:
    """Facts from the config.json and preprocessor_config.json of a TimeSformer, or of a captioner of one.

    Raises:
        UserError: see `caption_config_of`; or there is no TimeSformer in it.
    """
    video = caption_config_of(config, source=source).video
    if video is None:
        raise UserError(f"{source} has no video tower", hint="--init.weights name a tower, --decoder.weights a GPT-2")
    trunk = video.size.trunk
    return Facts(
        activation=trunk.activation,
        video_eps=trunk.norm_eps,
        mean=colours(preprocess.get("image_mean")),
        std=colours(preprocess.get("image_std")),
        video_heads=trunk.num_heads,
    )


def _choosing(decoding: DecodingSettings) -> dict[str, Any]:
    """Which tokens `generate` chooses."""
    num_beams = num_beams_of(decoding)
    if decoding.method == "sample":
        # Older versions take the likeliest 50 where nothing is said.
        limits = {"top_k": decoding.top_k or 0, "top_p": 1.0 if decoding.top_p is None else decoding.top_p}
        return {"do_sample": True, "num_beams": 1, "temperature": temperature_of(decoding), **limits}
    if decoding.method == "greedy" or num_beams == 1:
        return {"do_sample": False, "num_beams": 1}
    return {
        "do_sample": False,
        "num_beams": num_beams,
        "length_penalty": length_penalty_of(decoding),
        "early_stopping": bool(decoding.early_stopping),
    }


def _timesformer_of(given: Mapping[str, Any], *, source: str) -> TimeSformerShape:
    config = {**_TIMESFORMER, **given}
    _require(config, _TIMESFORMER_NEEDED, source=source)
    _require(config, {"intermediate_size": (4 * config["hidden_size"],)}, source=source)
    _require_shared(config, width="hidden_size", heads="num_attention_heads", source=source)
    for name in ("image_size", "patch_size"):
        if not isinstance(config[name], int):
            raise UserError(f"{source}: {name} is {config[name]!r}", hint="use weights for square pictures and patches")
    trunk = TransformerSize(
        width=config["hidden_size"],
        depth=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        activation=cast("Activation", config["hidden_act"]),
        norm_eps=config["layer_norm_eps"],
    )
    size = VideoViTSize(trunk=trunk, patch_px=config["patch_size"], num_channels=config["num_channels"])
    return TimeSformerShape(size=size, image_px=config["image_size"], num_frames=config["num_frames"])


def _gpt2_of(given: Mapping[str, Any], *, source: str) -> Gpt2Size:
    config = {**_GPT2, **given}
    _require(config, _GPT2_NEEDED, source=source)
    _require(config, {"n_inner": (None, 4 * config["n_embd"])}, source=source)
    _require_shared(config, width="n_embd", heads="n_head", source=source)
    trunk = TransformerSize(width=config["n_embd"], depth=config["n_layer"], num_heads=config["n_head"])
    return Gpt2Size(
        trunk=replace(trunk, norm_eps=config["layer_norm_epsilon"]),
        vocabulary_size=config["vocab_size"],
        context_length=config["n_positions"],
    )


def _require_shared(config: Mapping[str, Any], *, width: str, heads: str, source: str) -> None:
    """No tensor shows the number of heads: a wrong one is found here or nowhere."""
    if config[width] % config[heads]:
        raise UserError(
            f"{source}: {width} is {config[width]}, which {heads} {config[heads]} cannot share",
            hint="mend config.json, or get the folder again",
        )


def _require(config: Mapping[str, Any], needed: Mapping[str, tuple[Any, ...]], *, source: str) -> None:
    for name, values in needed.items():
        if config[name] not in values:
            raise UserError(
                f"{source}: {name} is {config[name]!r}, which the models here do not have",
                hint=f"use weights with {' or '.join(map(repr, values))}",
            )
