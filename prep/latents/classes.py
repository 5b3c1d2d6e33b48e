"""The classes of VAEs that `prep latents` encodes with, one row each: what their configuration says of the latents.

Everything else is the same for all of them. Defaults are those of diffusers, since configurations on the Hugging Face
hub lack entries that were added later. Factors are those of the whole encoder, patches included.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class VaeClass:
    """A class of diffusers.

    Attributes:
        channels: the entry of the configuration with the number of latent channels, and its default.
        spatial: the factor by which each side shrinks.
        temporal: the factor by which the number of frames after the first one shrinks; None for a VAE of images, which
            encodes frame by frame.
        frames_step: segments have k x frames_step + 1 frames; None: the temporal factor.
        in_channels: number of channels that the encoder takes for pictures in RGB.
        scaling_factor: default of the entry of this name.
        statistics: where the mean and standard deviation of each channel are, by which latents are normalised: in the
            configuration, or as tensors beside the weights; None: latents are scaled by one factor.
        has_posterior: whether the encoder gives a distribution to sample; otherwise it gives the latents themselves.
        can_tile: whether the encoder takes a frame apart into tiles when asked to.
    """

    name: str
    channels: tuple[str, int]
    spatial: Callable[[Config], int]
    temporal: Callable[[Config], int] | None = None
    frames_step: int | None = None
    in_channels: Callable[[Config], int] = lambda config: 3
    scaling_factor: float = 1.0
    statistics: str | None = None
    has_posterior: bool = True
    can_tile: bool = True


def _doubled(entry: str, default: int) -> Callable[[Config], int]:
    """2 to the number of entries of a list but one: every block but the last halves the sides."""
    return lambda config: 2 ** (len(config[entry]) - 1 if entry in config else default)


def _given(entry: str, default: int) -> Callable[[Config], int]:
    return lambda config: int(config.get(entry) or default)


def _ltx(entry: str, patch: str, patch_size: int) -> Callable[[Config], int]:
    """LTX's factors: those of the configuration, or of its patches and of the blocks that halve space and time."""

    def factor(config: Config) -> int:
        halving = sum(config.get("spatio_temporal_scaling", (True, True, True, False)))
        return int(config.get(entry) or config.get(patch, patch_size) * 2**halving)

    return factor


IN_CONFIG, IN_WEIGHTS = "configuration", "weights"

CLASSES = {
    row.name: row
    for row in (
        VaeClass(
            name="AutoencoderKL",
            channels=("latent_channels", 4),
            spatial=_doubled("block_out_channels", 0),
            scaling_factor=0.18215,
        ),
        VaeClass(  # 2.1, and 2.2 with patches of 2 x 2
            name="AutoencoderKLWan",
            channels=("z_dim", 16),
            spatial=lambda config: _doubled("dim_mult", 3)(config) * _given("patch_size", 1)(config),
            temporal=lambda config: 2 ** sum(config.get("temperal_downsample", (False, True, True))),
            in_channels=lambda config: 3 * _given("patch_size", 1)(config) ** 2,
            statistics=IN_CONFIG,
        ),
        VaeClass(
            name="AutoencoderKLLTXVideo",
            channels=("latent_channels", 128),
            spatial=_ltx("spatial_compression_ratio", "patch_size", 4),
            temporal=_ltx("temporal_compression_ratio", "patch_size_t", 1),
            statistics=IN_WEIGHTS,
        ),
        VaeClass(
            name="AutoencoderKLHunyuanVideo",
            channels=("latent_channels", 16),
            spatial=_given("spatial_compression_ratio", 8),
            temporal=_given("temporal_compression_ratio", 4),
            scaling_factor=0.476986,
        ),
        VaeClass(
            name="AutoencoderKLHunyuanVideo15",
            channels=("latent_channels", 32),
            spatial=_given("spatial_compression_ratio", 16),
            temporal=_given("temporal_compression_ratio", 4),
            scaling_factor=1.03682,
        ),
        VaeClass(
            name="AutoencoderKLCogVideoX",
            channels=("latent_channels", 16),
            spatial=_doubled("block_out_channels", 3),
            temporal=_given("temporal_compression_ratio", 4),
            # It encodes eight frames at a time, and what does not divide goes into the first batch.
            frames_step=8,
            scaling_factor=1.15258426,
        ),
        VaeClass(
            name="AutoencoderKLCosmos",
            channels=("latent_channels", 16),
            spatial=_given("spatial_compression_ratio", 8),
            temporal=_given("temporal_compression_ratio", 8),
            statistics=IN_CONFIG,
            has_posterior=False,
            can_tile=False,
        ),
    )
}
