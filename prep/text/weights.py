"""Files of weights, looked at without loading them."""

import hashlib
import struct
from pathlib import Path

from manifests.errors import UserError
from manifests.json_text import parse_json

SAFETENSORS = ".safetensors"
_PIECE_BYTES = 1 << 24
_MAX_HEADER_BYTES = 100 << 20


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file by their names, from its header.

    Raises:
        UserError: it is no such file, or it ends before its tensors do.
    """
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError("it has no header")
            header = parse_json(file.read(header_bytes))
        header.pop("__metadata__", None)
        end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size < end:
            raise ValueError(f"it has {path.stat().st_size} bytes of {end}")
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(
            f"{path} is no safetensors file: {error}", hint="download it again, or give another file"
        ) from None
