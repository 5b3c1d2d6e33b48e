"""Small random video VAEs, one of each class, saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import diffusers
import torch

_FOUR, _ONE = (8, 8, 8, 8), (1, 1, 1, 1, 1)
_HALVING = (True, True, False, False)
_WAN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.5, 1.5, 2.0, 0.7]}
_CONFIGS: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": {**_WAN, **_STATISTICS},
    "Wan 2.2": {**_WAN, **_STATISTICS, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12},
    "AutoencoderKLLTXVideo": {
        "latent_channels": 4,
        "block_out_channels": _FOUR,
        "decoder_block_out_channels": _FOUR,
        "layers_per_block": _ONE,
        "decoder_layers_per_block": _ONE,
        "spatio_temporal_scaling": _HALVING,
        "decoder_spatio_temporal_scaling": _HALVING,
        "patch_size": 2,
    },
    "AutoencoderKLHunyuanVideo": {
        "latent_channels": 4,
        "block_out_channels": _FOUR,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 4,
        "block_out_channels": (8, 8, 8, 8, 8),
        "layers_per_block": 1,
    },
    "AutoencoderKLCogVideoX": {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "block_out_channels": _FOUR,
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
    },
    "AutoencoderKLCosmos": {
        "latent_channels": 4,
        "encoder_block_out_channels": _FOUR,
        "decode_block_out_channels": _FOUR,
        "attention_resolutions": (8,),
        "resolution": 64,
        "num_layers": 1,
        # one value per channel and latent frame
        "latents_mean": [0.01 * index for index in range(12)],
        "latents_std": [1 + 0.1 * index for index in range(12)],
    },
}
NAMES = [*_CONFIGS]


def load_vae(folder: Path, name: str) -> Any:
    """Load the model with diffusers."""
    return _class(name).from_pretrained(folder).eval()


def save_model(name: str, folder: Path) -> Path:
    """Save a model of a class to a folder."""
    torch.manual_seed(0)
    model = _class(name)(**_CONFIGS[name])
    if name == "AutoencoderKLLTXVideo":
        model.latents_mean += 0.1
        model.latents_std *= 0.5
    model.save_pretrained(folder)
    return folder


def _class(name: str) -> Any:
    return getattr(diffusers, "AutoencoderKLWan" if name == "Wan 2.2" else name)
