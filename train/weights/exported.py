"""Publish exported folders atomically, and write files that several formats share.

An exported image tower has no temporal parameters. The temporal parameters of the video tower are stored in a separate
file, video_extras.safetensors, so that `--init.weights FOLDER` restores the video tower bit for bit. This file also
records the SHA-256 of the weights. It is rejected if the weights have changed since the export.
"""

import hashlib
import json
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX, sync
from clipmill.train.config.clips import ClipSettings
from clipmill.train.weights.conversion import MEANS, STDS, Tensors
from clipmill.train.weights.files import read_tensors

EXTRAS_FILE = "video_extras.safetensors"
_SHA256_KEY = "weights_sha256"


@dataclass(frozen=True, kw_only=True)
class Export:
    """An export that is ready to be written.

    Attributes:
        write: Function that writes the files of the export to a folder.
        remarks: Notes for the user.
        model_input: Input of the exported model if it differs from the run's input, such as "single images".
        usage: Markdown instructions for using an exported program; empty for exported weights, which all commands
            accept as WEIGHTS.
    """

    write: Callable[[Path], None]
    remarks: tuple[str, ...] = ()
    model_input: str = ""
    usage: str = ""


def require_format(format_name: str, supported_formats: Sequence[str], *, what: str) -> None:
    """Raise a UserError unless the format is one that the exported model (`what`) supports."""
    if format_name not in supported_formats:
        raise UserError(
            f"--format {format_name} cannot store {what}",
            hint=f"use --format {' or '.join(supported_formats)}",
            flags=("--format",),
        )


def publish_folder(out: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under a temporary name and rename it, so that `out` is either complete or missing.

    Raises:
        UserError: The folder cannot be written.
    """
    from safetensors import SafetensorError

    temporary_folder = out.parent / f"{TEMPORARY_PREFIX}{out.name}"
    shutil.rmtree(temporary_folder, ignore_errors=True)
    try:
        temporary_folder.mkdir(parents=True)
        write(temporary_folder)
        for path in temporary_folder.rglob("*"):
            sync(path)
        sync(temporary_folder)
        temporary_folder.replace(out)
        sync(out.parent)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises a RuntimeError on a full disk
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write {out}: {reason}", hint="use a different --out") from error
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


def save_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tensors(tensors: Tensors, path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. The tensors may share memory."""
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    # Clone the tensors, because safetensors rejects tensors that share memory.
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path, metadata)
    path.chmod(mode)  # safetensors renames a temporary file that only its owner can read


def preprocessor_config(processor: str, settings: ClipSettings, *, kind: str) -> dict[str, Any]:
    """Return the content of preprocessor_config.json, which resizes the short side, crops the centre and normalises.

    Args:
        processor: Name of the image processor class in transformers, such as CLIPImageProcessor.
        kind: Kind of tower, which determines the default normalisation.
    """
    import transformers

    config = getattr(transformers, processor)(
        size={"shortest_edge": settings.size_px},
        crop_size={"height": settings.size_px, "width": settings.size_px},
        image_mean=list(settings.init.pixel_mean or MEANS[kind]),
        image_std=list(settings.init.pixel_std or STDS[kind]),
    ).to_dict()
    return {**config, "image_processor_type": processor}  # some versions of transformers append "Fast"


def save_extras(extras: Tensors, folder: Path, *, weights_path: Path) -> None:
    """Write the tensors that only the video tower has, and the SHA-256 of the weights file."""
    save_tensors(extras, folder / EXTRAS_FILE, metadata={_SHA256_KEY: _digest(weights_path)})


def read_extras(folder: Path, *, weights_path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors that `save_extras` wrote, keyed by our names. Return {} if the folder contains no such file.

    Raises:
        UserError: The tensors do not belong to the weights in `weights_path`, or the file is damaged.
    """
    path = folder / EXTRAS_FILE
    if not path.is_file():
        return {}
    extras = read_tensors(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        recorded_hash = (file.metadata() or {}).get(_SHA256_KEY)
    if recorded_hash != _digest(weights_path):
        raise UserError(
            f"{path} does not belong to {weights_path.name}, which has changed since the export",
            hint=f"delete {EXTRAS_FILE} to use {weights_path.name} as an image model",
        )
    return extras


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
