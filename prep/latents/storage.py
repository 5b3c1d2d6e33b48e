"""Latents as they are stored: float16, or the bits of bfloat16 as uint16, since npy has no such type."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

_BFLOAT16_EXPONENT = 0x7F80


def as_stored(latents: NDArray[np.float32], *, dtype: Literal["float16", "bfloat16"]) -> NDArray[np.generic]:
    """Rounds to nearest, ties to even. What is too large becomes infinite; `is_finite` tells."""
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return latents.astype(np.float16)
    bits = np.ascontiguousarray(latents).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding the payload of a NaN could make it an infinity, or overflow.
    return np.where(np.isnan(latents), np.uint16(0x7FC0), rounded.astype(np.uint16))


def is_finite(stored: NDArray[np.generic]) -> bool:
    """Whether every number is neither NaN nor infinite."""
    if stored.dtype == np.uint16:
        bits = stored.view(np.uint16) & _BFLOAT16_EXPONENT
        return bool((bits != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(stored.astype(np.float32)).all())
