"""Settings of which caption a clip is shown with: a group of the training settings."""

import math
from dataclasses import dataclass, fields

from manifests.errors import UserError


@dataclass(frozen=True, kw_only=True)
class CaptionSettings:
    """Which of a clip's captions a visit shows."""

    sources: str | None = None
    """Weights of sources, `human=1,*rephraser*=2`; others are left out. All alike when left out."""
    min_relevancy: float | None = None
    """Show any sentence more relevant than this, by verb and nouns (0.1 for EK-100); a clip's own if left out."""

    def __post_init__(self) -> None:
        if self.sources is not None:
            parse_weights(self.sources)
        if self.min_relevancy is not None and not 0 <= self.min_relevancy < 1:
            raise UserError(f"--captions.min-relevancy is {self.min_relevancy}", hint="it must be from 0 to below 1")


def parse_weights(text: str) -> dict[str, float]:
    """The weights of `name=weight,name=weight`, in this order.

    Raises:
        UserError: it is not of that form, a weight is negative or no number, or none is more than 0.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.rpartition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not (math.isfinite(weight) and weight >= 0):
            raise UserError(
                f"--captions.sources has {part.strip()!r}",
                hint="write each source once, as name=weight with a weight of 0 or more: human=1,rephraser=2",
            )
        weights[name] = weight
    if not any(weights.values()):
        raise UserError(f"--captions.sources is {text!r}: every weight is 0", hint="give one a weight of more than 0")
    return weights


# Settings of augmentation: a group of the training settings, nothing by default.


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
