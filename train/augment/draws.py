"""What chance decides about the pictures of each clip (train.data.chance)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.augment.settings import Augment
from train.data.chance import uniform
from train.data.order import Positions

# The range of SimCLR (Chen et al., 2020), in pixels of the model's input.
MIN_SIGMA_PX, MAX_SIGMA_PX = 0.1, 2.0
_NAMES = ("flip", "brightness", "contrast", "saturation", "hue", "blur", "sigma")


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
    values_BN = uniform(np.asarray(positions, dtype=np.int64), len(_NAMES), seed=seed, purpose="augment")
    drawn = dict(zip(_NAMES, values_BN.T, strict=True))
    factors = {
        name: _between(drawn[name], max(0.0, 1 - strength), 1 + strength)
        for name, strength in (
            ("brightness", settings.brightness),
            ("contrast", settings.contrast),
            ("saturation", settings.saturation),
        )
    }
    sigma_px = _between(drawn["sigma"], MIN_SIGMA_PX, MAX_SIGMA_PX)
    return Draw(
        flip=drawn["flip"] < settings.flip,
        hue=_between(drawn["hue"], -settings.hue, settings.hue),
        blur_sigma_px=np.where(drawn["blur"] < settings.blur, sigma_px, np.float32(0)),
        **factors,
    )


def _between(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float32]:
    return (low + (high - low) * values).astype(np.float32)
