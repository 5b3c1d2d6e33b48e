"""Settings of captions, of augmentation, and of how clips are shown to trained weights."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import PROBABILITY, SHARE, Checked, GoesWith, Range, errors_of
from clipmill.train.config.model import PICTURE_PX

Settings = TypeVar("Settings")
_RAND_OPS = GoesWith("rand_ops", use="1 or more")
_JITTER = Range(least=0)
MAX_MAGNITUDE = 10.0


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(Checked):
    """Which caption of a clip a sample shows."""

    prefix = "captions"

    sources: str | None = None
    """Sampling weights of caption sources, such as `human=1,*rephraser*=2`; other sources are left out. Default: all
    sources alike but those of models (`captioner@1f2e3d4c`)."""
    min_relevancy: Annotated[float | None, SHARE] = None
    """Also show captions of other clips whose relevancy, by verb and nouns, exceeds this (0.1 for EK-100). Default:
    only the clip's own captions."""

    def rules(self) -> Iterator[UserError]:
        """Yields weights that cannot be parsed."""
        if self.sources is not None:
            yield from errors_of(parse_weights, self.sources)


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
                flags=("--captions.sources",),
            )
        weights[name] = weight
    if not any(weights.values()):
        raise UserError(
            f"--captions.sources is {text!r}: every weight is 0",
            hint="give one a weight of more than 0",
            flags=("--captions.sources",),
        )
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


# Weights for use by a command: a run, or others; --run is the name of before.
Weights = Annotated[str, Parameter(name=("--weights", "--run"))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Overrides(Checked):
    """How clips are shown to trained weights, where that differs from their training; fields of ClipSettings."""

    num_frames: Annotated[int | None, Range(1, 1024)] = None
    """Number of frames per clip; temporal embeddings are interpolated. Default: as in training."""
    sampling: Literal["uniform", "stride", "lavila"] | None = None
    """Frame sampling. Default: as in training."""
    size_px: Annotated[int | None, Range(2, 4096)] = None
    """Frame size in pixels; positional embeddings are interpolated. Default: as in training."""

    def given(self) -> dict[str, Any]:
        """The overrides that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def beside(self, settings: Any) -> "Overrides":
        """The overrides that differ from the settings of a run (`ClipSettings`).

        Raises:
            UserError: clips of latents cannot be shown in that way.
        """
        found = {name: value for name, value in self.given().items() if value != getattr(settings, name)}
        wrong = [name for name in found if name != "num_frames"]
        if wrong and settings.reads_latents:
            raise UserError(
                f"--{wrong[0].replace('_', '-')} is {found[wrong[0]]}, which is about pictures, and the model takes "
                "latents",
                hint="leave it out; --num-frames may differ from the training's",
            )
        return Overrides(**found)

    def applied(self, settings: Settings) -> Settings:
        """The settings of a run with these overrides. A model named after its frame size accepts other sizes, too."""
        changes, model = self.given(), getattr(settings, "model", "")
        if self.size_px is not None and model in PICTURE_PX:
            changes["model"] = model.removesuffix(f"-{PICTURE_PX[model]}")
        return replace(settings, **changes)  # type: ignore[type-var]


AS_TRAINED = Overrides()
