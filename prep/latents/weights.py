"""The VAE's weights: their location and hash, and the VAE's configuration. This module does not import torch."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.hub import model_folder
from clipmill.prep.latents.classes import CLASSES, IN_CONFIG, IN_WEIGHTS, VaeClass

TINY = "tiny"  # the small VAE with seeded weights; needs no download
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
IMAGE_CLASS = "AutoencoderKL"
_PIECE_BYTES = 1 << 20
_SUGGESTION = "give a folder with an AutoencoderKL, a model such as stabilityai/sd-vae-ft-mse, or tiny"
_WANTED = [f"{folder}{file}" for folder in ("", "vae/") for file in (CONFIG_FILE, WEIGHTS_FILE)]
_STATISTICS = ("latents_mean", "latents_std")

# Identifies the tiny VAE: change this name whenever the code that makes it (clipmill.prep.latents.vae) changes.
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
    """A VAE that was found.

    Attributes:
        name: name given by the user; for a folder only its last component, since moving a folder does not change the
            weights.
        source: name or absolute path of the folder, with which another machine finds the VAE.
        directory: folder of its files; None for `tiny`, and if only the recipe is known.
        sha256: hash of configuration and weights.
        channels: number of latent channels.
        factor: factor by which the VAE downsamples each side.
        scaling_factor, shift_factor: stored latents are (latents - shift_factor) x scaling_factor.
        kind: class of diffusers, a row of clipmill.prep.latents.classes.
        temporal_factor: a segment of k x temporal_factor + 1 frames has k + 1 latent frames; None for a VAE of images.
        latents_mean, latents_std: of each channel, or of each channel and latent frame in turn. With them, stored
            latents are (latents - latents_mean) x (scaling_factor / latents_std).
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
        """What its class has in common."""
        return CLASSES[self.kind]

    @property
    def frames_step(self) -> int:
        """Segments have k x frames_step + 1 frames; 1 for a VAE of images."""
        return self.row.frames_step or self.temporal_factor or 1


def find_vae(name: str) -> Vae:
    """Return the VAE called `name`: `tiny`, a folder, or a model on the Hugging Face Hub, which is downloaded once.

    A folder may be that of the VAE itself, or that of a pipeline with the VAE in `vae/`.

    Raises:
        UserError: it does not exist, or is not a VAE of CLASSES with three input channels and safetensors weights.
    """
    if name == TINY:
        return _described(name, name, None, _TINY_SHA256, TINY_CONFIG)
    local = Path(name).expanduser()
    folder = _model_folder(name)
    source = str(folder) if local.is_dir() else name
    directory = _with_files(folder)
    config = _config(directory)
    weights = directory / WEIGHTS_FILE
    if not weights.is_file():
        raise UserError(
            f"{directory} does not contain {WEIGHTS_FILE}",
            hint="only safetensors weights are supported; write them with save_pretrained of diffusers",
        )
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    try:
        with weights.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise UserError(f"{weights} cannot be read: {error.strerror}", hint=_SUGGESTION) from None
    _require_weights(weights)
    shown = _name_of(Path(source)) if local.is_dir() else name
    return _described(shown, source, directory, digest.hexdigest(), config)


def vae_folder(name: str) -> Path | None:
    """Return the folder with the files of a VAE that `find_vae` has found; None for `tiny`.

    Raises:
        UserError: it does not exist.
    """
    return None if name == TINY else _with_files(_model_folder(name))


def _model_folder(name: str) -> Path:
    return model_folder(name, files=_WANTED, what="VAE", asked="--vae", hint=_SUGGESTION)


def _with_files(folder: Path) -> Path:
    return folder / "vae" if (folder / "vae" / CONFIG_FILE).is_file() else folder


def _name_of(folder: Path) -> str:
    return f"{folder.parent.name}-vae" if folder.name == "vae" else folder.name


def _config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        config = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint=_SUGGESTION) from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", hint=_SUGGESTION) from None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind not in CLASSES:
        raise UserError(
            f"{path} describes {kind or 'no model'}, not a VAE that prep latents knows",
            hint=f"{_SUGGESTION}; classes of diffusers: {', '.join(CLASSES)}",
        )
    return dict(config)


def _require_weights(path: Path) -> None:
    """Raise UserError unless the file is a safetensors file that contains an encoder; called before any work begins."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError("safetensors is not installed", hint="install clipmill[columns]") from None
    try:
        with safe_open(path, framework="numpy") as file:
            is_vae = any(name.startswith("encoder.") for name in file.keys())  # noqa: SIM118 - it is not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}", hint="download or save the weights again") from None
    if not is_vae:
        raise UserError(f"{path} does not contain a VAE encoder", hint=_SUGGESTION)


def _described(name: str, source: str, directory: Path | None, sha256: str, config: dict[str, Any]) -> Vae:
    row = CLASSES[config["_class_name"]]
    if (channels := config.get("in_channels", 3)) != row.in_channels(config):
        raise UserError(f"the VAE {name} expects {channels} input channels, but videos have 3", hint=_SUGGESTION)
    shift = config.get("shift_factor")
    try:
        entry, default = row.channels
        scaling_factor = float(config.get("scaling_factor", row.scaling_factor))
        shift_factor = None if shift is None else float(shift)
        if not (0 < scaling_factor < math.inf and math.isfinite(shift_factor or 0)):
            raise ValueError(f"its scaling_factor is {scaling_factor:g}, its shift_factor {shift_factor}")
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
        raise UserError(f"the configuration of the VAE {name} is damaged: {error}", hint=_SUGGESTION) from None


def _statistics(
    row: VaeClass, config: dict[str, Any], directory: Path | None, *, num_channels: int
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return the mean and standard deviation by which latents are normalised; raises ValueError if they do not fit."""
    if row.statistics == IN_CONFIG:
        mean, std = (config.get(name, "") for name in _STATISTICS)
        if mean is None and std is None:
            return None, None  # as the configuration says
    elif row.statistics == IN_WEIGHTS and directory is not None:
        from safetensors import safe_open

        with safe_open(directory / WEIGHTS_FILE, framework="numpy") as file:
            there = file.keys()
            mean, std = (file.get_tensor(name).tolist() if name in there else "" for name in _STATISTICS)
    else:
        return None, None
    if not mean or not std:
        raise ValueError(f"{' and '.join(_STATISTICS)} are missing from its {row.statistics}, which normalise latents")
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    if len(mean) != len(std) or len(mean) % num_channels or not all(map(math.isfinite, mean)):
        raise ValueError(
            f"its latents_mean has {len(mean)} values, latents_std {len(std)}, for {num_channels} channels"
        )
    if not all(0 < one < math.inf for one in std):
        raise ValueError("its latents_std is not positive")
    return mean, std
