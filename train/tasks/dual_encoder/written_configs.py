"""The configuration files that are written beside exported weights: pure functions of sizes and settings."""

from typing import Any

from train.config.training import DualEncoderSettings
from train.models.dual_encoder import DualEncoderSize
from train.models.transformer import NORM_EPS
from train.weights.converted import CLIP_MEAN, CLIP_STD

_START_TOKEN = 49406
_BICUBIC = 3  # as PIL numbers it


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


def hf_config(size: DualEncoderSize, settings: DualEncoderSettings, *, log_scale: float) -> dict[str, Any]:
    """config.json of a CLIPModel."""
    towers = {}
    for name, trunk in (("vision", size.video.trunk), ("text", size.text.trunk)):
        towers[name] = {
            "model_type": f"clip_{name}_model",
            "hidden_act": trunk.activation,
            "hidden_size": trunk.width,
            "intermediate_size": 4 * trunk.width,
            "layer_norm_eps": trunk.norm_eps,
            "num_attention_heads": trunk.num_heads,
            "num_hidden_layers": trunk.depth,
            "projection_dim": size.embedding_width,
        }
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": size.embedding_width,
        "logit_scale_init_value": log_scale,
        "vision_config": {
            **towers["vision"],
            "image_size": settings.size_px,
            "num_channels": size.video.num_channels,
            "patch_size": size.video.patch_px,
        },
        "text_config": {
            **towers["text"],
            "bos_token_id": _START_TOKEN,
            # The largest id, at whose first place both read the embedding.
            "eos_token_id": size.text.vocabulary_size - 1,
            "max_position_embeddings": size.text.context_length,
            "vocab_size": size.text.vocabulary_size,
        },
    }


def hf_preprocessor_config(settings: DualEncoderSettings) -> dict[str, Any]:
    """preprocessor_config.json: the short side to size, the centre square, normalised."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": settings.size_px},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": settings.size_px, "width": settings.size_px},
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(settings.init.pixel_mean or CLIP_MEAN),
        "image_std": list(settings.init.pixel_std or CLIP_STD),
    }
