"""Loading the array of one sample of `latents` or `text` and comparing it with its row of the index."""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manifests.json_text import parse_json
from prep.latents.storage import is_finite
from prep.text.digests import text_digest

_STORED = {"float16": "<f2", "bfloat16": "<u2"}
_MAX_LENGTH_ERROR = 0.01  # float16 rounds a unit vector by far less


def check_latents(row: dict[str, Any], members: dict[str, bytes]) -> tuple[list[str], int]:
    """What differs, and the number of frames."""
    wanted = tuple(row[name] for name in ("num_frames", "channels", "height", "width"))
    array = _load(members["latents.npy"])
    if array is None:
        return ["latents.npy cannot be loaded"], 0
    if array.shape != wanted or array.dtype.str != _STORED.get(row["dtype"]):
        return [f"latents.npy is {array.dtype} {array.shape}, the index says {row['dtype']} {wanted}"], 0
    return ([] if is_finite(array) else ["latents.npy has numbers that are not finite"]), len(array)


def check_text(row: dict[str, Any], members: dict[str, bytes]) -> tuple[list[str], int]:
    """What differs, and the number of rows."""
    array = _load(members["text.npy"])
    wanted = (row["num_rows"], row["width"])
    if array is None:
        return ["text.npy cannot be loaded"], 0
    if array.shape != wanted or array.dtype.str != _STORED["float16"]:
        return [f"text.npy is {array.dtype} {array.shape}, the index says float16 {wanted}"], 0
    differences = []
    lengths = np.linalg.norm(array.astype(np.float32), axis=1)
    if not bool((np.abs(lengths - 1) < _MAX_LENGTH_ERROR).all()):
        differences.append("text.npy has rows that are not of unit length")
    try:
        described = parse_json(members["json"])
        digests = [text_digest(text) for text in described["texts"]]
        rows = described["caption_id"], described["caption_row"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [*differences, f"the json member cannot be read: {error!r}"], len(array)
    if digests != row["text_digest"]:
        differences.append("the texts of the json are not those of the index")
    if rows != (row["caption_id"], row["caption_row"]):
        differences.append("the captions' rows in the json are not those of the index")
    return differences, len(array)


def _load(payload: bytes) -> NDArray[np.generic] | None:
    try:
        return np.load(BytesIO(payload), allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return None
