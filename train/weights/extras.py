"""What an export keeps beside an image tower, so that the video tower comes back bit by bit.

The file says which weights it belongs to, by their SHA-256: once somebody has trained the image tower on, it does not
fit any more.
"""

import hashlib
from pathlib import Path

import torch

from manifests.errors import UserError
from train.weights.converted import Tensors
from train.weights.files import read_tensors

EXTRAS_FILE = "video_extras.safetensors"
_OWNER = "weights_sha256"


def save_tensors(tensors: Tensors, path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Writes a file of safetensors; tensors may share memory."""
    from safetensors.torch import save_file

    # Clones: safetensors refuses parts of one tensor.
    save_file({name: one.detach().clone().contiguous() for name, one in tensors.items()}, path, metadata)


def save_extras(extras: Tensors, folder: Path, *, beside: Path) -> None:
    """Writes a folder's extras, which belong to the weights in the file `beside`."""
    save_tensors(extras, folder / EXTRAS_FILE, metadata={_OWNER: _digest(beside)})


def read_extras(folder: Path, *, beside: Path) -> dict[str, torch.Tensor]:
    """The extras of a folder, by our names; {} where it has none.

    Raises:
        UserError: they belong to other weights than those in the file `beside`, or are damaged.
    """
    path = folder / EXTRAS_FILE
    if not path.is_file():
        return {}
    extras = read_tensors(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        owner = (file.metadata() or {}).get(_OWNER)
    if owner != _digest(beside):
        raise UserError(
            f"{path} belongs to other weights than {beside.name}, which has changed since the export",
            hint=f"to start from {beside.name} as from any image model, remove {EXTRAS_FILE}",
        )
    return extras


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
