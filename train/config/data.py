"""Settings of which caption a clip is shown with: a group of the training settings."""

import math
from dataclasses import dataclass

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
