"""The configuration files beside weights of transformers' VideoMAE: pure functions of sizes and settings."""

from collections.abc import Sequence
from typing import Any

from train.config.training import ClipSettings
from train.models.transformer import TransformerSize
from train.weights.converted import IMAGENET_MEAN, IMAGENET_STD

_BILINEAR = 2  # as PIL numbers it


def encoder_config(trunk: TransformerSize, *, cube: tuple[int, int, int], num_frames: int, side: int) -> dict[str, Any]:
    """What config.json says of an encoder.

    Args:
        cube: channels, frames and side of a cube.
        side: of the square that is cut into cubes.
    """
    num_channels, tubelet, patch = cube
    return {
        "model_type": "videomae",
        "image_size": side,
        "patch_size": patch,
        "num_channels": num_channels,
        "num_frames": num_frames,
        "tubelet_size": tubelet,
        "hidden_size": trunk.width,
        "num_hidden_layers": trunk.depth,
        "num_attention_heads": trunk.num_heads,
        "intermediate_size": 4 * trunk.width,
        "hidden_act": trunk.activation,
        "layer_norm_eps": trunk.norm_eps,
        # Old versions of transformers read this name, and new ones take it for qv_bias.
        "qkv_bias": True,
    }


def pretraining_config(encoder: dict[str, Any], decoder: TransformerSize) -> dict[str, Any]:
    """config.json of VideoMAEForPreTraining."""
    return {
        "architectures": ["VideoMAEForPreTraining"],
        **encoder,
        # This alone gives its encoder a last layer norm.
        "use_mean_pooling": False,
        "norm_pix_loss": True,
        "decoder_hidden_size": decoder.width,
        "decoder_num_hidden_layers": decoder.depth,
        "decoder_num_attention_heads": decoder.num_heads,
        "decoder_intermediate_size": 4 * decoder.width,
    }


def classifier_config(encoder: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """config.json of VideoMAEForVideoClassification."""
    return {
        "architectures": ["VideoMAEForVideoClassification"],
        **encoder,
        "use_mean_pooling": True,
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "problem_type": "single_label_classification",
    }


def videomae_preprocessor_config(settings: ClipSettings) -> dict[str, Any]:
    """preprocessor_config.json: the short side to size, the centre square, normalised."""
    return {
        "image_processor_type": "VideoMAEImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": settings.size_px},
        "resample": _BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": settings.size_px, "width": settings.size_px},
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(settings.init.pixel_mean or IMAGENET_MEAN),
        "image_std": list(settings.init.pixel_std or IMAGENET_STD),
    }
