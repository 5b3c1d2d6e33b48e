"""Settings of tasks that read clips as pixels or as latents."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from clipmill.train.config import fields as groups
from clipmill.train.config.fields import FIRST_RUN, GoesWith, Range
from clipmill.train.config.training import ClipSettings

_OF_LATENTS = GoesWith("input", ("latents",))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LatentSettings(ClipSettings):
    """Clips that are decoded, or segments of the latents that prep made of them."""

    input: Annotated[Literal["pixels", "latents"], groups.CLIPS, FIRST_RUN] = "pixels"
    """Input of the model. pixels: decoded clips; latents: segments of the column made by prep latents."""
    segment: Annotated[str, groups.CLIPS, _OF_LATENTS] = "5s"
    """Length of a segment of latents."""
    max_segments: Annotated[int | None, groups.CLIPS, Range(1, 10**9), _OF_LATENTS] = None
    """Maximum number of segments of a training video, spread evenly over it. Default: all of them."""

    @property
    def reads_latents(self) -> bool:
        """Whether the model takes latents."""
        return self.input == "latents"
