"""Settings of augmentation: a group of the training settings, nothing by default."""

import math
from dataclasses import dataclass, fields

from manifests.errors import UserError

_PROBABILITIES = ("flip", "blur")
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _PROBABILITIES:
                holds, rule = 0 <= value <= 1, "a probability, from 0 to 1"
            elif field.name == "hue":
                holds, rule = 0 <= value <= _MAX_HUE, "part of a circle, from 0 to 0.5"
            else:
                holds, rule = math.isfinite(value) and value >= 0, "0 or more"
            if not holds:
                raise UserError(f"--augment.{field.name} is {value}", hint=f"it must be {rule}")
