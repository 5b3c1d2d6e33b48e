"""Supported VAE classes, and functions that find the files of a VAE, hash its weights, and read its configuration.

The defaults of the classes equal the defaults in diffusers, because configurations on the Hugging Face Hub lack entries
that were added later. Downsampling factors include patching. This module does not import torch.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.request import model_folder

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class VaeClass:
    """Properties of a VAE class in diffusers.

    Attributes:
        name: Name of the class.
        channels: Name of the configuration entry with the number of latent channels, and the default number.
        spatial: Function that takes the configuration and returns the downsampling factor of width and height.
        temporal: Function that takes the configuration and returns the temporal downsampling factor, which applies to
            all frames but the first; None for an image VAE, which encodes frame by frame.
        frames_step: Step of the segment lengths, which are k x frames_step + 1 frames; None if the step is the temporal
            factor.
        in_channels: Function that takes the configuration and returns the number of input channels of the encoder for
            RGB pictures.
        scaling_factor: Default of the configuration entry `scaling_factor`.
        statistics: Location of the mean and standard deviation of each channel, which normalise the latents: the
            configuration, or tensors in the weights file; None if latents are scaled by a single factor.
        has_posterior: True if the encoder returns a distribution to sample from; False if it returns the latents.
        can_tile: True if the encoder can divide a frame into tiles.
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


def _block_factor(entry: str, default_halvings: int) -> Callable[[Config], int]:
    """Return a function that computes 2^(blocks - 1): each block in `entry` but the last halves the resolution."""
    return lambda config: 2 ** (len(config[entry]) - 1 if entry in config else default_halvings)


def _entry_factor(entry: str, default: int) -> Callable[[Config], int]:
    return lambda config: int(config.get(entry) or default)


def _ltx_factor(entry: str, patch: str, patch_size: int) -> Callable[[Config], int]:
    """Return a function that computes a factor of LTX: `entry`, or the patch size, doubled by each halving block."""

    def factor(config: Config) -> int:
        num_halvings = sum(config.get("spatio_temporal_scaling", (True, True, True, False)))
        return int(config.get(entry) or config.get(patch, patch_size) * 2**num_halvings)

    return factor


CONFIGURATION, WEIGHTS = "configuration", "weights"

CLASSES = {
    row.name: row
    for row in (
        VaeClass(
            name="AutoencoderKL",
            channels=("latent_channels", 4),
            spatial=_block_factor("block_out_channels", 0),
            scaling_factor=0.18215,
        ),
        VaeClass(  # Wan 2.1, and Wan 2.2, which has patches of 2 x 2
            name="AutoencoderKLWan",
            channels=("z_dim", 16),
            spatial=lambda config: _block_factor("dim_mult", 3)(config) * _entry_factor("patch_size", 1)(config),
            temporal=lambda config: 2 ** sum(config.get("temperal_downsample", (False, True, True))),
            in_channels=lambda config: 3 * _entry_factor("patch_size", 1)(config) ** 2,
            statistics=CONFIGURATION,
        ),
        VaeClass(
            name="AutoencoderKLLTXVideo",
            channels=("latent_channels", 128),
            spatial=_ltx_factor("spatial_compression_ratio", "patch_size", 4),
            temporal=_ltx_factor("temporal_compression_ratio", "patch_size_t", 1),
            statistics=WEIGHTS,
        ),
        VaeClass(
            name="AutoencoderKLHunyuanVideo",
            channels=("latent_channels", 16),
            spatial=_entry_factor("spatial_compression_ratio", 8),
            temporal=_entry_factor("temporal_compression_ratio", 4),
            scaling_factor=0.476986,
        ),
        VaeClass(
            name="AutoencoderKLHunyuanVideo15",
            channels=("latent_channels", 32),
            spatial=_entry_factor("spatial_compression_ratio", 16),
            temporal=_entry_factor("temporal_compression_ratio", 4),
            scaling_factor=1.03682,
        ),
        VaeClass(
            name="AutoencoderKLCogVideoX",
            channels=("latent_channels", 16),
            spatial=_block_factor("block_out_channels", 3),
            temporal=_entry_factor("temporal_compression_ratio", 4),
            # The model encodes eight frames at a time, and adds the remaining frame to the first eight.
            frames_step=8,
            scaling_factor=1.15258426,
        ),
        VaeClass(
            name="AutoencoderKLCosmos",
            channels=("latent_channels", 16),
            spatial=_entry_factor("spatial_compression_ratio", 8),
            temporal=_entry_factor("temporal_compression_ratio", 8),
            statistics=CONFIGURATION,
            has_posterior=False,
            can_tile=False,
        ),
    )
}


TINY = "tiny"  # name of the small VAE with seeded weights; it needs no download
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
IMAGE_CLASS = "AutoencoderKL"
_BLOCK_BYTES = 1 << 20
_HINT = "use a folder with an AutoencoderKL, a model such as stabilityai/sd-vae-ft-mse, or tiny"
_FILES = [f"{folder}{file}" for folder in ("", "vae/") for file in (CONFIG_FILE, WEIGHTS_FILE)]
_STATISTICS = ("latents_mean", "latents_std")

# Identity of the tiny VAE. Change it whenever the code that makes the VAE (clipmill.prep.latents.vae) changes.
_TINY_SHA256 = hashlib.sha256(b"clipmill tiny VAE, version 1").hexdigest()
TINY_CONFIG: dict[str, Any] = {
    "_class_name": IMAGE_CLASS,
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [4, 4, 8, 8],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
    "scaling_factor": 1.5,  # gives the latents of natural videos a standard deviation of about 1
}


@dataclass(frozen=True)
class Vae:
    """A VAE, as returned by `find_vae` or described by a recipe.

    Attributes:
        name: Name of the model on the Hugging Face Hub, or `tiny`. For a folder, only the last component of its path,
            because moving a folder does not change the weights; for PIPELINE/vae, PIPELINE-vae.
        source: Name or absolute path by which other machines find the VAE.
        directory: Folder of the files; None for `tiny`, or if only the recipe is known.
        sha256: SHA-256 (hex) of the configuration and the weights.
        channels: Number of latent channels.
        factor: Factor by which the VAE downsamples width and height.
        scaling_factor, shift_factor: Stored latents are (latents - shift_factor) x scaling_factor.
        kind: Name of the class in diffusers, a key of CLASSES.
        temporal_factor: A segment of k x temporal_factor + 1 frames has k + 1 latent frames; None for an image VAE.
        latents_mean, latents_std: Statistics of each channel, or of each latent frame of each channel. If present,
            stored latents are (latents - latents_mean) x (scaling_factor / latents_std).
    """

    name: str
    source: str
    directory: Path | None
    sha256: str
    channels: int
    factor: int
    scaling_factor: float
    shift_factor: float | None
    kind: str = IMAGE_CLASS
    temporal_factor: int | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None

    @property
    def row(self) -> VaeClass:
        """Properties of the class of this VAE."""
        return CLASSES[self.kind]

    @property
    def frames_step(self) -> int:
        """Step of the segment lengths, which are k x frames_step + 1 frames; 1 for an image VAE."""
        return self.row.frames_step or self.temporal_factor or 1


def find_vae(name: str) -> Vae:
    """Return the VAE with the given name: `tiny`, a folder, or a model on the Hugging Face Hub (downloaded once).

    A folder may contain the VAE itself, or a pipeline with the VAE in `vae/`.

    Raises:
        UserError: The VAE does not exist or is damaged, its class is not in CLASSES, it has no safetensors weights, or
            it does not take RGB input; or safetensors is not installed.
    """
    if name == TINY:
        return _make_vae(name, name, None, _TINY_SHA256, TINY_CONFIG)
    folder, directory = _find_folders(name)
    config_path = directory / CONFIG_FILE
    try:
        config = parse_json(config_path.read_bytes())
    except OSError as error:
        raise UserError(f"{config_path} cannot be read: {error.strerror}", hint=_HINT) from None
    except ValueError as error:
        raise UserError(f"{config_path} is damaged: {error}", hint=_HINT) from None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind not in CLASSES:
        raise UserError(
            f"{config_path} describes {kind}, which is not a supported VAE"
            if kind
            else f"{config_path} does not contain the class of a model (_class_name)",
            hint=f"{_HINT}; supported diffusers classes: {', '.join(CLASSES)}",
        )
    weights = directory / WEIGHTS_FILE
    if not weights.is_file():
        raise UserError(
            f"{directory} does not contain {WEIGHTS_FILE}",
            hint="save the model with save_pretrained of diffusers: only safetensors weights are supported",
        )
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    try:
        with weights.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{weights} cannot be read: {error.strerror}", hint=_HINT) from None
    # Detect a file without an encoder here, before workers start and load the weights.
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError("safetensors is not installed", hint="install clipmill[columns]") from None
    try:
        with safe_open(weights, framework="numpy") as tensors:
            is_vae = any(name.startswith("encoder.") for name in tensors.keys())  # noqa: SIM118 - it is not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(f"{weights} is damaged: {error}", hint="download or save the weights again") from None
    if not is_vae:
        raise UserError(f"{weights} does not contain a VAE encoder", hint=_HINT)
    if not Path(name).expanduser().is_dir():
        return _make_vae(name, name, directory, digest.hexdigest(), config)
    short_name = f"{folder.parent.name}-vae" if folder.name == "vae" else folder.name
    return _make_vae(short_name, str(folder), directory, digest.hexdigest(), config)


def vae_folder(name: str) -> Path | None:
    """Return the folder with the files of a VAE that `find_vae` has found; None for `tiny`.

    Raises:
        UserError: The folder or the model does not exist.
    """
    return None if name == TINY else _find_folders(name)[1]


def _find_folders(name: str) -> tuple[Path, Path]:
    """Return the folder of a model, and the folder with the files of its VAE."""
    folder = model_folder(name, files=_FILES, what="VAE", flag="--vae", hint=_HINT)
    return folder, folder / "vae" if (folder / "vae" / CONFIG_FILE).is_file() else folder


def _make_vae(name: str, source: str, directory: Path | None, sha256: str, config: dict[str, Any]) -> Vae:
    """Return the VAE that a configuration describes.

    Raises:
        UserError: An entry is invalid or missing.
    """
    row = CLASSES[config["_class_name"]]
    if (channels := config.get("in_channels", 3)) != (num_required := row.in_channels(config)):
        raise UserError(
            f"the VAE {name} expects {channels} input channels, but RGB frames need {num_required}", hint=_HINT
        )
    shift = config.get("shift_factor")
    try:
        entry, default = row.channels
        scaling_factor = float(config.get("scaling_factor", row.scaling_factor))
        shift_factor = None if shift is None else float(shift)
        if not (0 < scaling_factor < math.inf and math.isfinite(shift_factor or 0)):
            raise ValueError(f"scaling_factor is {scaling_factor:g}, and shift_factor is {shift_factor}")
        num_channels = int(config.get(entry, default))
        mean, std = _statistics(row, config, directory, num_channels=num_channels)
        return Vae(
            name=name,
            source=source,
            directory=directory,
            sha256=sha256,
            channels=num_channels,
            factor=row.spatial(config),
            scaling_factor=scaling_factor,
            shift_factor=shift_factor,
            kind=row.name,
            temporal_factor=None if row.temporal is None else row.temporal(config),
            latents_mean=mean,
            latents_std=std,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"the configuration of the VAE {name} is damaged: {error}", hint=_HINT) from None


def _statistics(
    row: VaeClass, config: dict[str, Any], directory: Path | None, *, num_channels: int
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return the mean and standard deviation that normalise the latents; (None, None) if they are not normalised.

    Raises:
        ValueError: The statistics are missing or invalid.
    """
    if row.statistics == CONFIGURATION:
        mean, std = (config.get(name, "") for name in _STATISTICS)
        if mean is None and std is None:
            return None, None  # the configuration explicitly has no statistics
    elif row.statistics == WEIGHTS and directory is not None:
        from safetensors import safe_open

        with safe_open(directory / WEIGHTS_FILE, framework="numpy") as file:
            names = file.keys()
            mean, std = (file.get_tensor(name).tolist() if name in names else "" for name in _STATISTICS)
    else:
        return None, None
    if not mean or not std:
        statistics = " and ".join(_STATISTICS)
        raise ValueError(f"{statistics}, which normalise the latents, are missing from the {row.statistics}")
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    if len(mean) != len(std) or len(mean) % num_channels:
        raise ValueError(
            f"latents_mean contains {len(mean)} values and latents_std contains {len(std)} values, but the VAE has"
            f" {num_channels} channels"
        )
    if not all(map(math.isfinite, mean)):
        raise ValueError("latents_mean contains non-finite values")
    if not all(0 < value < math.inf for value in std):
        raise ValueError("latents_std contains values that are not positive and finite")
    return mean, std
