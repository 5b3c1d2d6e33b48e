"""Settings of captions and of augmentation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from manifests.errors import UserError
from train.config.fields import PROBABILITY, SHARE, Checked, GoesWith, Range, caught

_RAND_OPS = GoesWith("rand_ops", use="1 or more")
_JITTER = Range(least=0)
MAX_MAGNITUDE = 10.0


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(Checked):
    """Which caption of a clip a sample shows."""

    prefix = "captions"

    sources: str | None = None
    """Sampling weights of caption sources, such as `human=1,*rephraser*=2`; other sources are left out. Default: all
    sources alike."""
    min_relevancy: Annotated[float | None, SHARE] = None
    """Also show captions of other clips whose relevancy, by verb and nouns, exceeds this (0.1 for EK-100). Default:
    only the clip's own captions."""

    def rules(self) -> Iterator[UserError]:
        """Weights can be read."""
        if self.sources is not None:
            yield from caught(parse_weights, self.sources)


def parse_weights(text: str) -> dict[str, float]:
    """The weights of `name=weight,name=weight`, in this order.

    Raises:
        UserError: it is not of that form, a weight is negative or not a number, or all are 0.
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


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Augmentation of training clips. Parameters are drawn once per clip and hold for all of its frames."""

    prefix = "augment"

    flip: Annotated[float, PROBABILITY] = 0.0
    """Probability of a horizontal flip."""
    brightness: Annotated[float, _JITTER] = 0.0
    """Brightness jitter x: factor from max(0, 1 - x) to 1 + x."""
    contrast: Annotated[float, _JITTER] = 0.0
    """Contrast jitter x: factor from max(0, 1 - x) to 1 + x, around the clip's mean grey."""
    saturation: Annotated[float, _JITTER] = 0.0
    """Saturation jitter x: factor from max(0, 1 - x) to 1 + x, around the grey of each pixel."""
    hue: Annotated[float, Range(0, 0.5)] = 0.0
    """Hue jitter x: shift from -x to x, as a share of the colour circle."""
    blur: Annotated[float, PROBABILITY] = 0.0
    """Probability of a Gaussian blur."""
    rand_ops: Annotated[int, Range(0, 15)] = 0
    """Number of RandAugment operations per clip, each applied with probability 1/2 (VideoMAE: 4)."""
    rand_magnitude: Annotated[float, Range(0, MAX_MAGNITUDE), _RAND_OPS] = 7.0
    """Mean magnitude of the RandAugment operations."""
    rand_std: Annotated[float, _JITTER, _RAND_OPS] = 0.5
    """Standard deviation of the RandAugment magnitude."""
    erase: Annotated[float, PROBABILITY] = 0.0
    """Probability of random erasing: a box through all frames becomes noise (VideoMAE: 0.25)."""
