"""What chance decides about each clip: a pure function of the seed and the sample's position.

Neither the other clips of the batch nor what was drawn before matters, so a run that is resumed draws the same.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.augment.settings import Augment
from train.data.order import Positions, mix

# The range of SimCLR (Chen et al., 2020), in pixels of the model's input.
MIN_SIGMA_PX, MAX_SIGMA_PX = 0.1, 2.0
_NAMES = ("flip", "brightness", "contrast", "saturation", "hue", "blur", "sigma")
_MANTISSA_BITS = 53


@dataclass(frozen=True)
class Draw:
    """One value a clip, each [B]."""

    flip: NDArray[np.bool_]
    brightness: NDArray[np.float32]
    """Factor, 1 changes nothing; so for contrast and saturation."""
    contrast: NDArray[np.float32]
    saturation: NDArray[np.float32]
    hue: NDArray[np.float32]
    """Part of a circle, 0 changes nothing."""
    blur_sigma_px: NDArray[np.float32]
    """0 changes nothing."""


def draw(positions: Positions, settings: Augment, *, seed: int) -> Draw:
    """Draws for the samples at `positions` (int64 [B], of train.data.order)."""
    uniform = _uniform(np.asarray(positions, dtype=np.int64), seed=seed)
    factors = {
        name: _between(uniform[name], max(0.0, 1 - strength), 1 + strength)
        for name, strength in (
            ("brightness", settings.brightness),
            ("contrast", settings.contrast),
            ("saturation", settings.saturation),
        )
    }
    sigma_px = _between(uniform["sigma"], MIN_SIGMA_PX, MAX_SIGMA_PX)
    return Draw(
        flip=uniform["flip"] < settings.flip,
        hue=_between(uniform["hue"], -settings.hue, settings.hue),
        blur_sigma_px=np.where(uniform["blur"] < settings.blur, sigma_px, np.float32(0)),
        **factors,
    )


def uniform(positions: Positions, count: int, *, seed: int, purpose: str) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each of the samples at `positions`, [B, count]: as pure as `draw`."""
    digest = hashlib.blake2b(f"{purpose}/{seed}".encode(), digest_size=8).digest()
    key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys = mix(np.asarray(key + np.arange(count, dtype=np.uint64), dtype=np.uint64))
    hashes = mix(mix(positions.astype(np.uint64))[:, None] ^ keys[None, :])
    return np.asarray((hashes >> np.uint64(64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS, dtype=np.float64)


def _uniform(positions: Positions, *, seed: int) -> dict[str, NDArray[np.float64]]:
    """Numbers in [0, 1) for each position, a sequence of its own for each name."""
    digest = hashlib.blake2b(f"augment/{seed}".encode(), digest_size=8 * len(_NAMES)).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    # Hashed twice: keys that differ in a few bits only would otherwise pair positions that differ in the same bits.
    hashes = mix(mix(positions.astype(np.uint64))[None, :] ^ keys[:, None])
    values = (hashes >> np.uint64(64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
    return dict(zip(_NAMES, values, strict=True))


def _between(uniform: NDArray[np.float64], low: float, high: float) -> NDArray[np.float32]:
    return (low + (high - low) * uniform).astype(np.float32)
