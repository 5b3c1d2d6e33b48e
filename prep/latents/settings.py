"""The settings of `prep latents`: every one that changes what is stored, and nothing else."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from manifests.errors import UserError

TINY = "tiny"  # the small seeded VAE that needs no weights
_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|ms)", re.ASCII)
_MAX_SIZE_PX = 4096


@dataclass(frozen=True, kw_only=True)
class LatentsSettings:
    """What the latents show, and how they are made."""

    vae: str
    """Folder or Hugging Face name of a diffusers AutoencoderKL; tiny is a small random one, for trying things out."""

    fps: str = "4"
    """Frames a second: 4, 1/2, 30000/1001."""

    size: int = 256
    """Side in pixels of the square that is encoded."""

    crop: Literal["centre", "random"] = "centre"
    """centre: the largest square; random: a seeded square for each segment, of 8/9 of the short side."""

    segment: str = "5s"
    """Length of what shares a random crop."""

    seed: int = 0
    """Of random crops and samples."""

    posterior: Literal["mean", "sample"] = "mean"
    """What is stored of the VAE's normal distribution: its mean, or a seeded sample."""

    dtype: Literal["float16", "bfloat16"] = "float16"
    """Of the stored numbers."""

    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """In which the VAE computes."""

    def __post_init__(self) -> None:
        if not self.vae:
            raise UserError("--vae is empty", hint="name a folder, a model such as stabilityai/sd-vae-ft-mse, or tiny")
        if not Fraction(1, 60) <= self.fps_exact <= 240:
            raise UserError(f"--fps {self.fps} is out of range", hint="give 1/60 to 240 frames a second")
        if not 8 <= self.size <= _MAX_SIZE_PX:
            raise UserError(f"--size {self.size} is out of range", hint=f"give 8 to {_MAX_SIZE_PX} pixels")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed {self.seed} is out of range", hint="give a number from 0 on")
        if (self.segment_s * self.fps_exact).denominator != 1:
            raise UserError(
                f"a segment of {self.segment} at {self.fps} fps is {float(self.segment_s * self.fps_exact):g} frames",
                hint="choose --segment and --fps so that their product is whole, for example --segment 5s --fps 4",
            )

    @property
    def fps_exact(self) -> Fraction:
        """Frames a second, exact."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(f'--fps "{self.fps}" is not a rate', hint="write 4, 1/2 or 30000/1001") from None

    @property
    def segment_s(self) -> Fraction:
        """Length of a segment in seconds, exact."""
        match = _LENGTH.fullmatch(self.segment)
        if match is None or Fraction(match["number"]) == 0:
            raise UserError(f'--segment "{self.segment}" is not a length', hint="write it with its unit: 5s or 500ms")
        return Fraction(match["number"]) / (1000 if match["unit"] == "ms" else 1)

    @property
    def segment_frames(self) -> int:
        """Frames of a segment."""
        return int(self.segment_s * self.fps_exact)
