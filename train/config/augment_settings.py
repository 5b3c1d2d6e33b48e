"""Settings of augmentation: a group of the training settings, nothing by default."""

import math
from dataclasses import dataclass, fields

from manifests.errors import UserError

MAX_MAGNITUDE = 10.0
_MAX_OPERATIONS = 15
_MAX_HUE = 0.5


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How much the clips of training are changed. Everything is drawn once a clip and holds for all its frames."""

    flip: float = 0.0
    """Probability that a clip is mirrored, left to right."""
    brightness: float = 0.0
    """x: the clip is multiplied by a factor from max(0, 1 - x) to 1 + x."""
    contrast: float = 0.0
    """x: the distance to the clip's mean grey, likewise."""
    saturation: float = 0.0
    """x: the distance of each pixel to its own grey, likewise."""
    hue: float = 0.0
    """x: colours turn by -x to x of a full circle; at most 0.5."""
    blur: float = 0.0
    """Probability that a clip is blurred."""
    rand_ops: int = 0
    """Operations of RandAugment that are drawn for a clip, each of them done with probability 1/2; VideoMAE: 4."""
    rand_magnitude: float = 7.0
    """Mean strength of these operations, from 0 to 10."""
    rand_std: float = 0.5
    """Standard deviation of their strength."""
    erase: float = 0.0
    """Probability that a box through all frames becomes noise (random erasing); VideoMAE: 0.25."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            holds, rule = _rule(field.name, value)
            if not holds:
                raise UserError(f"--augment.{field.name.replace('_', '-')} is {value}", hint=f"it must be {rule}")


def _rule(name: str, value: float) -> tuple[bool, str]:
    if name in ("flip", "blur", "erase"):
        return 0 <= value <= 1, "a probability, from 0 to 1"
    if name == "hue":
        return 0 <= value <= _MAX_HUE, "part of a circle, from 0 to 0.5"
    if name == "rand_ops":
        return 0 <= value <= _MAX_OPERATIONS, f"from 0 to {_MAX_OPERATIONS}"
    if name == "rand_magnitude":
        return 0 <= value <= MAX_MAGNITUDE, f"from 0 to {MAX_MAGNITUDE:g}"
    return math.isfinite(value) and value >= 0, "0 or more"
