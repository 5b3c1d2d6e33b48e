"""The recipe of the `latents` column: the settings of `prep latents`, the VAE's weights, and the variant of `video`."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.units import parse_length
from clipmill.prep.core.column import recipe_fingerprint
from clipmill.prep.latents.weights import Vae, find_vae
from clipmill.shards.where_flag import check_where

LATENTS = "latents"
MODEL = Parameter(group=Group("Latents", sort_key=1))
LATENTS_SCHEMA = 1  # incremented when the same settings begin to produce different bytes
_MAX_SIZE_PX = 4096
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, kw_only=True)
class LatentsSettings:
    """Settings of `prep latents` that affect the bytes of the latents."""

    vae: Annotated[str, MODEL, FIRST_RUN]
    """VAE: folder or Hugging Face name of a diffusers AutoencoderKL, or tiny (small, random weights, for trials)."""

    fps: Annotated[str, MODEL, FIRST_RUN] = "4"
    """Sampling rate in frames per second, 1/60 to 240, such as 1/2 or 30000/1001."""

    size: Annotated[int, MODEL, FIRST_RUN] = 256
    """Side of the square VAE input in pixels, 8 to 4096, a multiple of the VAE's downsampling factor."""

    crop: Annotated[Literal["centre", "random", "exact"], MODEL, FIRST_RUN] = "centre"
    """Square crop of the frames. centre: the largest square; random: a random square per segment, with 8/9 of the short
    side; exact: a random square per segment of --size pixels, which is not resized."""

    segment: Annotated[str, MODEL] = "5s"
    """Length of a segment, whose frames share one random crop, with unit: 5s, 500ms. It must be a whole number of
    frames at --fps."""

    seed: Annotated[int, MODEL] = 0
    """Random seed of --crop random, --crop exact and --posterior sample, 0 or more."""

    posterior: Annotated[Literal["mean", "sample"], MODEL] = "mean"
    """Latents to store: the mean of the posterior, or a sample."""

    dtype: Annotated[Literal["float16", "bfloat16"], MODEL] = "float16"
    """Data type of the stored latents."""

    compression: Annotated[Literal["none", "zstd"], MODEL] = "none"
    """Compression of the stored latents. zstd: about a tenth smaller, lossless; training then decompresses chunks
    instead of mapping them."""

    precision: Annotated[Literal["float32", "float16", "bfloat16"], MODEL] = "float32"
    """Precision of the VAE's computation."""

    where: Annotated[str | None, MODEL] = None
    """Condition that selects the chunks to encode, on their scores and videos, such as 'motion > 0.2 and not
    duplicate'. It is not part of the variant: another condition encodes what is missing, and drops what it does not
    select. Default: all chunks."""

    def __post_init__(self) -> None:
        if not self.vae:
            raise UserError("--vae is empty", hint="give a folder, a model such as stabilityai/sd-vae-ft-mse, or tiny")
        if not Fraction(1, 60) <= self.fps_exact <= 240:
            raise UserError(f"--fps {self.fps} is out of range", hint="give 1/60 to 240 frames a second")
        if not 8 <= self.size <= _MAX_SIZE_PX:
            raise UserError(f"--size {self.size} is out of range", hint=f"give 8 to {_MAX_SIZE_PX} pixels")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed {self.seed} is out of range", hint="give a whole number from 0 to 2^63 - 1")
        if (self.segment_s * self.fps_exact).denominator != 1:
            raise UserError(
                f"a segment of {self.segment} at {self.fps} fps has {float(self.segment_s * self.fps_exact):g} frames",
                hint="choose --segment and --fps for a whole number of frames per segment, for example "
                "--segment 5s --fps 4",
            )
        check_where(self.where)

    @property
    def fps_exact(self) -> Fraction:
        """Sampling rate in frames per second, exact."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(f'--fps "{self.fps}" is not a number', hint="write 4, 1/2 or 30000/1001") from None

    @property
    def segment_s(self) -> Fraction:
        """Length of a segment in seconds, exact."""
        return parse_length(self.segment, flag="--segment")

    @property
    def segment_frames(self) -> int:
        """Number of frames in a segment."""
        return int(self.segment_s * self.fps_exact)


@dataclass(frozen=True, kw_only=True)
class LatentsRecipe:
    """Everything that the latents depend on besides the chunks themselves.

    Attributes:
        video: name of the `video` variant whose chunks are encoded.
    """

    settings: LatentsSettings
    vae: Vae
    video: str

    def __post_init__(self) -> None:
        if self.settings.size % self.vae.factor:
            raise UserError(
                f"--size {self.settings.size} is not a multiple of the VAE's downsampling factor, {self.vae.factor}",
                hint=f"use {self.settings.size // self.vae.factor * self.vae.factor or self.vae.factor}",
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of `as_dict` as canonical JSON."""
        return recipe_fingerprint(self.as_dict())

    @property
    def variant(self) -> str:
        """Folder name: the VAE's name, the main settings, and the first 8 digits of the fingerprint."""
        settings = self.settings
        vae = _NOT_IN_A_NAME.sub("-", self.vae.name.rpartition("/")[2]).strip("-.") or "vae"
        fps = settings.fps.replace("/", "-")
        return f"{vae}-{settings.size}px-{fps}fps-{settings.crop}-{settings.posterior}-{self.fingerprint[:8]}"

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """Shape of the latents of one frame: channels, height and width."""
        side = self.settings.size // self.vae.factor
        return self.vae.channels, side, side

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values.

        Settings that cannot affect the bytes are null, such as the seed if nothing is random.
        """
        settings = asdict(self.settings)
        del settings["where"]  # selects chunks, whose latents do not depend on it
        is_random = settings["crop"] != "centre"
        settings["segment"] = self.settings.segment if is_random else None
        settings["seed"] = self.settings.seed if is_random or settings["posterior"] == "sample" else None
        settings["fps"] = str(self.settings.fps_exact)
        if settings["compression"] == "none":
            del settings["compression"]  # latents have been stored so since before the setting
        return {
            **settings,
            "schema": LATENTS_SCHEMA,
            "column": LATENTS,
            "video": self.video,
            "vae": self.vae.name,
            "vae_sha256": self.vae.sha256,
            "channels": self.vae.channels,
            "factor": self.vae.factor,
            "scaling_factor": self.vae.scaling_factor,
            "shift_factor": self.vae.shift_factor,
        }


def resolve(settings: LatentsSettings, *, video: str) -> LatentsRecipe:
    """Find the VAE that `settings` refer to and return the full recipe.

    Raises:
        UserError: the VAE does not exist, or is incompatible with the settings.
    """
    return LatentsRecipe(settings=settings, vae=find_vae(settings.vae), video=video)


def latents_recipe_from_dict(stored: Mapping[str, Any]) -> LatentsRecipe:
    """Return the recipe of a variant (`clipmill.prep.core.selection.stored_request`), without searching for the
    weights.

    Raises:
        UserError: the recipe was written with another version of the recipe schema.
    """
    if stored.get("schema") != LATENTS_SCHEMA or stored.get("column") != LATENTS:
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r}, but this version supports {LATENTS_SCHEMA}",
            hint="run `prep latents` with the desired settings to create a new variant",
        )
    names = {field.name for field in fields(LatentsSettings)}
    settings = {name: value for name, value in stored.items() if name in names and value is not None}
    of_vae = ("channels", "factor", "scaling_factor", "shift_factor")
    try:
        vae = Vae(
            name=stored["vae"],
            source=stored["vae"],
            directory=None,
            sha256=stored["vae_sha256"],
            **{name: stored[name] for name in of_vae},
        )
        return LatentsRecipe(settings=LatentsSettings(**settings), vae=vae, video=stored["video"])
    except KeyError as error:
        raise UserError(f"the recipe lacks {error}", hint="run `prep latents` again to rewrite it") from None
