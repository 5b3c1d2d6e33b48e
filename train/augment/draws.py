"""Random augmentation parameters for each clip: a pure function of (seed, position) (`device/random.py`)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clipmill.train.config.clips import MAX_MAGNITUDE, Augment
from clipmill.train.device.random import Positions, draw_uniform

# Range of sigma in SimCLR (Chen et al. 2020), in pixels of the model's input.
MIN_SIGMA_PX, MAX_SIGMA_PX = 0.1, 2.0
# RandAugment operations (clipmill.train.augment.rand_augment), in the order of their numbers in a draw.
OPERATIONS = (
    *("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add"),
    *("saturation", "contrast", "brightness", "sharpness"),
    *("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)
_NAMES = ("flip", "brightness", "contrast", "saturation", "hue", "blur", "sigma")
_OPERATION_PROBABILITY = 0.5
# Erased box: range of its fraction of the frame's area, and maximum ratio of height to width (Zhong et al. 2020, table
# 1 and section 3).
_MIN_AREA, _MAX_AREA = 0.02, 1 / 3
_MAX_ASPECT = 10 / 3
_BOX_ATTEMPTS = 10
_SEEDS = 2.0**53


@dataclass(frozen=True)
class Draw:
    """Drawn parameters of a batch, with one row per clip; the shape is [B] unless stated otherwise."""

    flip: NDArray[np.bool_]
    brightness: NDArray[np.float32]
    """Factor; 1 means no change. Contrast and saturation are defined in the same way."""
    contrast: NDArray[np.float32]
    saturation: NDArray[np.float32]
    hue: NDArray[np.float32]
    """Fraction of a full turn; 0 means no change."""
    blur_sigma_px: NDArray[np.float32]
    """Standard deviation; 0 means no blur."""
    operation: NDArray[np.int64]
    """Indices of the N operations in `OPERATIONS`, in the order of application, [B, N]; -1 means no operation."""
    strength: NDArray[np.float64]
    """Strengths of the operations, from 0 to 1, [B, N]; a negative strength means the opposite direction."""
    box: NDArray[np.float64]
    """Erased box, [B, 4]: height and width relative to the frame's side, and offsets from top and left relative to the
        free space. A height of 0 means no box."""
    noise_seed: NDArray[np.int64]


def draw(positions: Positions, settings: Augment, *, seed: int) -> Draw:
    """Draw the parameters of the samples at `positions` (int64 [B])."""
    positions = np.asarray(positions, dtype=np.int64)
    values_BN = draw_uniform(positions, len(_NAMES), seed=seed, purpose="augment")
    drawn = dict(zip(_NAMES, values_BN.T, strict=True))
    factors = {
        name: _scale_to_range(drawn[name], max(0.0, 1 - strength), 1 + strength)
        for name, strength in (
            ("brightness", settings.brightness),
            ("contrast", settings.contrast),
            ("saturation", settings.saturation),
        )
    }
    sigma_px = _scale_to_range(drawn["sigma"], MIN_SIGMA_PX, MAX_SIGMA_PX)
    operation_BN, strength_BN = _operations(positions, settings, seed=seed)
    return Draw(
        flip=drawn["flip"] < settings.flip,
        hue=_scale_to_range(drawn["hue"], -settings.hue, settings.hue),
        blur_sigma_px=np.where(drawn["blur"] < settings.blur, sigma_px, np.float32(0)),
        operation=operation_BN,
        strength=strength_BN,
        box=_boxes(positions, settings.erase, seed=seed),
        noise_seed=(draw_uniform(positions, 1, seed=seed, purpose="erase/noise")[:, 0] * _SEEDS).astype(np.int64),
        **factors,
    )


def _scale_to_range(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float32]:
    return (low + (high - low) * values).astype(np.float32)


def _operations(positions: Positions, settings: Augment, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    values_BN5 = draw_uniform(positions, 5 * settings.rand_ops, seed=seed, purpose="rand-augment").reshape(
        len(positions), settings.rand_ops, 5
    )
    kind, application, radius, angle, sign = np.moveaxis(values_BN5, -1, 0)
    operation_BN = np.where(application < _OPERATION_PROBABILITY, (kind * len(OPERATIONS)).astype(np.int64), -1)
    # Normally distributed numbers (Box and Muller 1958).
    normal_BN = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
    magnitude_BN = np.clip(settings.rand_magnitude + settings.rand_std * normal_BN, 0, MAX_MAGNITUDE)
    return operation_BN, magnitude_BN / MAX_MAGNITUDE * np.where(sign < 0.5, -1.0, 1.0)


def _boxes(positions: Positions, probability: float, *, seed: int) -> NDArray[np.float64]:
    """Draw boxes with a random area and aspect ratio: the first of ten boxes that fits, or no box."""
    boxes_B4 = np.zeros((len(positions), 4))
    if not probability:
        return boxes_B4
    values_BN = draw_uniform(positions, 3 + 2 * _BOX_ATTEMPTS, seed=seed, purpose="erase")
    area_BA = _MIN_AREA + (_MAX_AREA - _MIN_AREA) * values_BN[:, 3 : 3 + _BOX_ATTEMPTS]
    aspect_BA = np.exp(math.log(_MAX_ASPECT) * (2 * values_BN[:, 3 + _BOX_ATTEMPTS :] - 1))
    height_BA, width_BA = np.sqrt(area_BA * aspect_BA), np.sqrt(area_BA / aspect_BA)
    fits_BA = np.maximum(height_BA, width_BA) < 1
    has_box_B = (values_BN[:, 0] < probability) & fits_BA.any(axis=1)
    rows, first = np.flatnonzero(has_box_B), fits_BA.argmax(axis=1)[has_box_B]
    boxes_B4[rows, 0], boxes_B4[rows, 1] = height_BA[rows, first], width_BA[rows, first]
    boxes_B4[rows, 2:] = values_BN[rows, 1:3]
    return boxes_B4
