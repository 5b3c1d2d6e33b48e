"""Settings of the weights that training starts from: a group of the training settings."""

from dataclasses import dataclass
from typing import Literal

from manifests.errors import UserError

FormatChoice = Literal[
    "auto", "open_clip", "openai", "hf", "avion", "lavila", "videomae", "hf_videomae", "hf_timesformer"
]


@dataclass(frozen=True, kw_only=True)
class Init:
    """Weights to start from."""

    weights: str | None = None
    """A file, a folder, a run, or NAME:TAG of open_clip (which downloads it); left out: random weights."""
    format: FormatChoice = "auto"
    """Who wrote the weights; auto: told by the names of the tensors. hf_timesformer: for captioners alone."""
    allow: tuple[str, ...] = ()
    """Patterns of tensors that may be missing, left over or of another shape, such as `video.proj`, `visual.*`."""
    pixel_mean: tuple[float, float, float] | None = None
    """Of R, G and B from 0 to 1, by which pictures are normalised: the weights', else CLIP's (videomae: ImageNet's)."""
    pixel_std: tuple[float, float, float] | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        if self.weights is None and (self.format != "auto" or self.allow):
            raise UserError(
                "--init.format and --init.allow are about weights, and there are none", hint="name them: --init.weights"
            )
        for name, least in (("pixel_mean", 0.0), ("pixel_std", 1e-3)):
            values = getattr(self, name)
            if values is not None and not all(least <= value <= 1 for value in values):
                flag = f"--init.{name.replace('_', '-')}"
                raise UserError(f"{flag} is {values}", hint=f"three numbers from {least:g} to 1, for R, G and B")
