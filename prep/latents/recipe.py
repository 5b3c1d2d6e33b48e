"""The recipe of the `latents` column: the settings of `prep latents`, the VAE's weights, and the variant of `video`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, parse_length
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Checked, Range, errors_of
from clipmill.prep.core.recipe import NOT_STORED, STORED_IF_CHANGED, Recipe
from clipmill.prep.latents.weights import Vae, find_vae
from clipmill.shards.where_flag import check_where

LATENTS = "latents"
Precision = Literal["float32", "float16", "bfloat16"]
MODEL = Parameter(group=Group("Latents", sort_key=1))
EXTENSION = "latents.npy"  # extension of the member of each sample
COMPRESSED = f"{EXTENSION}.zst"
LATENTS_SCHEMA = 2  # increment it when the same settings begin to produce different bytes
SEED = Range(0, (1 << 63) - 1, hint="use a whole number from 0 to 2^63 - 1")
_FPS = Range(Fraction(1, 60), 240, hint="use --fps 1/60 to 240")  # type: ignore[arg-type]
_FRAMES = re.compile(r"([1-9]\d{0,5})f", re.ASCII)
_VAE = ("channels", "factor", "scaling_factor", "shift_factor")
_STATISTICS = ("latents_mean", "latents_std")
_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, kw_only=True)
class LatentsSettings(Checked):
    """Settings of `prep latents`. All of them except `where` affect the bytes of the latents."""

    vae: Annotated[str, MODEL, FIRST_RUN]
    """VAE: folder or Hugging Face name of a diffusers VAE for images (AutoencoderKL) or videos (Wan, LTXVideo,
    HunyuanVideo, HunyuanVideo15, CogVideoX, Cosmos), or tiny (a small VAE with random weights, for trials)."""

    fps: Annotated[str, MODEL, FIRST_RUN] = "4"
    """Sampling rate in frames per second, 1/60 to 240, such as 1/2 or 30000/1001."""

    size: Annotated[int, MODEL, FIRST_RUN, Range(8, 4096)] = 256
    """Side length of the square VAE input in pixels, 8 to 4096, a multiple of the VAE's downsampling factor."""

    crop: Annotated[Literal["centre", "random", "exact"], MODEL, FIRST_RUN] = "centre"
    """Square crop of the frames. centre: the largest centred square; random: a random square for each segment, whose
    side is 8/9 of the short side; exact: a random square of --size pixels for each segment, without resizing."""

    segment: Annotated[str, MODEL] = "5s"
    """Length of a segment: 5s, 500ms, or 81f for frames. The frames of a segment share one random crop. The length must
    be a whole number of frames at --fps. A video VAE encodes each segment separately, including the frame at its end:
    5s at 16 fps is 81f."""

    tail: Annotated[Literal["drop", "repeat"], MODEL, STORED_IF_CHANGED] = "drop"
    """Handling of an incomplete segment at the end of a video, for a video VAE. drop: omit the segment; repeat: repeat
    the last frame."""

    seed: Annotated[int, MODEL, SEED] = 0
    """Random seed for --crop random, --crop exact and --posterior sample, 0 or more."""

    posterior: Annotated[Literal["mean", "sample"], MODEL] = "mean"
    """Latents to store: the mean of the posterior, or a random sample from it."""

    dtype: Annotated[Literal["float16", "bfloat16"], MODEL] = "float16"
    """Data type of the stored latents."""

    compression: Annotated[Literal["none", "zstd"], MODEL, STORED_IF_CHANGED] = "none"
    """Compression of the stored latents. zstd: about a tenth smaller, lossless; training then decompresses
    latents instead of memory-mapping them."""

    precision: Annotated[Precision, MODEL] = "float32"
    """Precision of the VAE's computation."""

    tiling: Annotated[bool, MODEL, STORED_IF_CHANGED] = False
    """Encode large frames in overlapping tiles (enable_tiling in diffusers). Tiling takes less memory, but changes the
    latents."""

    slicing: Annotated[bool, MODEL, STORED_IF_CHANGED] = False
    """Encode the pictures or segments of a batch one by one (enable_slicing in diffusers)."""

    where: Annotated[str | None, MODEL, NOT_STORED] = None
    """Condition on scores and videos that selects the chunks to encode, such as 'motion > 0.2 and not duplicate'. The
    condition is not part of the recipe: a run with a different condition encodes newly selected chunks, and drops
    the latents of chunks that are no longer selected. Default: all chunks."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors about an empty --vae, invalid lengths and rates, and an invalid condition."""
        if not self.vae:
            yield UserError(
                "--vae is empty",
                hint="use a folder, a model such as stabilityai/sd-vae-ft-mse, or tiny",
                flags=("--vae",),
            )
        errors = [*errors_of(lambda: self.fps_exact)]
        yield from errors
        if not errors:
            yield from _FPS.mistakes("--fps", self.fps_exact)
            yield from errors_of(self.segment_frames, is_video=False)
        yield from errors_of(check_where, self.where)

    @property
    def fps_exact(self) -> Fraction:
        """Exact sampling rate in frames per second."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f'--fps "{self.fps}" is not a number',
                hint="use a number such as 4, 1/2 or 30000/1001",
                flags=("--fps",),
            ) from None

    def segment_frames(self, *, is_video: bool) -> int:
        """Return the number of frames in a segment.

        For a video VAE, a length in seconds includes one more frame, the frame at the end of the segment.

        Raises:
            UserError: --segment is not a length, or not a whole number of frames.
        """
        if match := _FRAMES.fullmatch(self.segment):
            return int(match[1])
        num_frames = parse_length(self.segment, flag="--segment", alternatives=", or 81f for frames") * self.fps_exact
        if num_frames.denominator != 1:
            raise UserError(
                f"a segment of {self.segment} at {self.fps} fps has {float(num_frames):g} frames, which is not a whole "
                "number",
                hint="use a --segment and an --fps that give a whole number of frames per segment, such as "
                "--segment 5s --fps 4",
                flags=("--segment", "--fps"),
            )
        return int(num_frames) + is_video


@dataclass(frozen=True)
class Encoding:
    """The settings of `prep latents` and the selected VAE, and the shapes that follow from them."""

    settings: LatentsSettings
    vae: Vae

    @classmethod
    def from_recipe(cls, recipe: Recipe[LatentsSettings]) -> "Encoding":
        """Return the encoding of a recipe, without searching for the weights."""
        return cls(recipe.settings, vae_of(recipe.values, source=recipe.settings.vae))

    @property
    def is_video(self) -> bool:
        """True if the VAE encodes segments; False if it encodes single pictures."""
        return self.vae.temporal_factor is not None

    @property
    def segment_frames(self) -> int:
        """Number of frames in a segment."""
        return self.settings.segment_frames(is_video=self.is_video)

    @property
    def segment_step(self) -> int:
        """Number of frames between the starts of two segments; consecutive segments of a video VAE share a frame."""
        return self.segment_frames - self.is_video

    @property
    def latent_frames(self) -> int | None:
        """Number of latent frames of a segment, T'; None for an image VAE."""
        factor = self.vae.temporal_factor
        return None if factor is None else self.segment_step // factor + 1

    @property
    def latent_fps(self) -> Fraction:
        """Number of latent frames per second."""
        fps = self.settings.fps_exact
        return fps if self.latent_frames is None else fps * self.latent_frames / self.segment_step

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of the latents of a frame, [C, h, w], or of a segment, [C, T', h, w]."""
        side = self.settings.size // self.vae.factor
        frames = () if self.latent_frames is None else (self.latent_frames,)
        return (self.vae.channels, *frames, side, side)

    def units_per_batch(self, batch: int) -> int:
        """Return how many frames, or segments for a video VAE, fit in a batch of `batch` frames; at least 1."""
        return batch if self.latent_frames is None else max(1, batch // self.segment_frames)

    def require_consistency(self) -> None:
        """Check that the VAE supports the settings: segment length, tiling, sampling from the posterior, and size.

        Raises:
            UserError: The VAE does not support the settings, or lacks the statistics to normalise segments this long.
        """
        if self.is_video:
            num_frames, step, vae = self.segment_frames, self.vae.frames_step, self.vae
            steps = ((num_frames - 1) // step, -(-(num_frames - 1) // step))
            lower, upper = (max(1, count) * step + 1 for count in steps)
            if num_frames != lower:
                fps, lengths = self.settings.fps_exact, dict.fromkeys((lower, upper))
                suggestions = [f"--segment {length}f ({float((length - 1) / fps):g}s)" for length in lengths]
                per_chunk = dict.fromkeys(str(15 * fps // (length - 1)) for length in lengths)
                raise UserError(
                    f"{vae.kind} encodes segments of {step}k + 1 frames, but --segment {self.settings.segment} at"
                    f" {self.settings.fps} fps has {count_noun(num_frames, 'frame')}",
                    hint=f"use {' or '.join(suggestions)}; a chunk of 15 s holds {' or '.join(per_chunk)} of them",
                )
            num_entries = len(vae.latents_mean or ()) // vae.channels
            if num_entries > 1 and (self.latent_frames or 0) > num_entries and vae.temporal_factor is not None:
                raise UserError(
                    f"{vae.name} has statistics for {num_entries} latent frames, but --segment {self.settings.segment}"
                    f" has {self.latent_frames}",
                    hint=f"use --segment {(num_entries - 1) * vae.temporal_factor + 1}f or less",
                )
        if self.settings.tiling and not self.vae.row.can_tile:
            raise UserError(f"{self.vae.kind} does not support tiling", hint="omit --tiling, or use a smaller --size")
        if self.settings.posterior == "sample" and not self.vae.row.has_posterior:
            raise UserError(
                f"{self.vae.kind} has no posterior to sample: it is deterministic", hint="omit --posterior sample"
            )
        if self.settings.size % self.vae.factor:
            raise UserError(
                f"--size {self.settings.size} is not a multiple of the VAE's downsampling factor, {self.vae.factor}",
                hint=f"use --size {self.settings.size // self.vae.factor * self.vae.factor or self.vae.factor}",
            )


def resolve(settings: LatentsSettings) -> tuple[LatentsSettings, dict[str, Any]]:
    """Find the VAE; return the settings with the VAE's `source`, and the values to add to the recipe.

    If a setting cannot affect the bytes, its value is null; for example, the seed is null if nothing is random.

    Raises:
        UserError: The VAE does not exist, or does not support the settings.
    """
    vae = find_vae(settings.vae)
    settings = replace(settings, vae=vae.source)
    encoding = Encoding(settings, vae)
    encoding.require_consistency()
    is_random = settings.crop != "centre"
    values = {
        "fps": str(settings.fps_exact),
        "segment": settings.segment if is_random else None,
        "seed": settings.seed if is_random or settings.posterior == "sample" else None,
        "vae": vae.name,
        "vae_sha256": vae.sha256,
        **{name: getattr(vae, name) for name in _VAE},
    }
    if not encoding.is_video:
        return replace(settings, tail="drop"), values
    values |= {"segment": f"{encoding.segment_frames}f", "tail": settings.tail, "latent_frames": encoding.latent_frames}
    values |= {"kind": vae.kind, "temporal_factor": vae.temporal_factor}
    for name in _STATISTICS:
        statistics = getattr(vae, name)
        values[name] = None if statistics is None else list(statistics)
    return settings, values


def local_weights(recipe: Recipe[LatentsSettings]) -> str | None:
    """Return the absolute path of the VAE if --vae is a folder on this machine; None otherwise."""
    source = recipe.settings.vae
    return source if source != recipe.values["vae"] else None


def variant_name(recipe: Recipe[LatentsSettings]) -> str:
    """Return the readable part of the variant's name: the name of the VAE and the main settings."""
    settings = recipe.settings
    vae = _INVALID_CHARACTERS.sub("-", recipe.values["vae"].rpartition("/")[2]).strip("-.") or "vae"
    fps = settings.fps.replace("/", "-")
    return f"{vae}-{settings.size}px-{fps}fps-{settings.crop}-{settings.posterior}"


def vae_of(values: Mapping[str, Any], *, source: str) -> Vae:
    """Return the VAE that a recipe describes, without its folder.

    Args:
        values: Content of recipe.json.
        source: Name or folder of the VAE.

    Raises:
        UserError: The recipe lacks a value.
    """
    optional = ("kind", "temporal_factor", *_STATISTICS)
    try:
        vae_values = {name: values[name] for name in _VAE} | {name: values[name] for name in optional if name in values}
        vae_values |= {name: tuple(vae_values[name]) for name in _STATISTICS if vae_values.get(name) is not None}
        return Vae(name=values["vae"], source=source, directory=None, sha256=values["vae_sha256"], **vae_values)
    except KeyError as error:
        raise UserError(f"the recipe lacks {error}", hint="run `prep latents` again to rewrite the recipe") from None
