"""The recipe of the `latents` column: the settings of `prep latents`, the VAE's weights, and the variant of `video`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.quoting import count_noun
from clipmill.manifests.settings import Checked, Range, errors_of
from clipmill.manifests.units import parse_length
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.latents.weights import Vae, find_vae
from clipmill.shards.where_flag import check_where

LATENTS = "latents"
Precision = Literal["float32", "float16", "bfloat16"]
MODEL = Parameter(group=Group("Latents", sort_key=1))
LATENTS_SCHEMA = 2  # incremented when the same settings begin to produce different bytes
SEED = Range(0, (1 << 63) - 1, hint="use a whole number from 0 to 2^63 - 1")
_FPS = Range(Fraction(1, 60), 240, hint="--fps must be from 1/60 to 240")  # type: ignore[arg-type]
_FRAMES = re.compile(r"([1-9]\d{0,5})f", re.ASCII)
_VAE = ("channels", "factor", "scaling_factor", "shift_factor")
_VIDEO_VAE = ("kind", "temporal_factor", "latents_mean", "latents_std")
_OF_VIDEO_VAES = (*_VIDEO_VAE, "latent_frames", "tail")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, kw_only=True)
class LatentsSettings(Checked):
    """Settings of `prep latents` that affect the bytes of the latents."""

    vae: Annotated[str, MODEL, FIRST_RUN]
    """VAE: folder or Hugging Face name of a diffusers VAE of images (AutoencoderKL) or videos (Wan, LTXVideo,
    HunyuanVideo, HunyuanVideo15, CogVideoX, Cosmos), or tiny (small, random weights, for trials)."""

    fps: Annotated[str, MODEL, FIRST_RUN] = "4"
    """Sampling rate in frames per second, 1/60 to 240, such as 1/2 or 30000/1001."""

    size: Annotated[int, MODEL, FIRST_RUN, Range(8, 4096)] = 256
    """Side of the square VAE input in pixels, 8 to 4096, a multiple of the VAE's downsampling factor."""

    crop: Annotated[Literal["centre", "random", "exact"], MODEL, FIRST_RUN] = "centre"
    """Square crop of the frames. centre: the largest square; random: a random square per segment, with 8/9 of the short
    side; exact: a random square per segment of --size pixels, which is not resized."""

    segment: Annotated[str, MODEL] = "5s"
    """Length of a segment, whose frames share one random crop: 5s, 500ms, or 81f for frames. It must be a whole number
    of frames at --fps. A VAE of videos encodes each segment by itself, with the frame at its end: 5s at 16 fps are
    81f."""

    tail: Annotated[Literal["drop", "repeat"], MODEL] = "drop"
    """Segments of a VAE of videos that lack frames at the end of a video. drop: they are left out; repeat: the last
    frame is repeated."""

    seed: Annotated[int, MODEL, SEED] = 0
    """Random seed of --crop random, --crop exact and --posterior sample, 0 or more."""

    posterior: Annotated[Literal["mean", "sample"], MODEL] = "mean"
    """Latents to store: the mean of the posterior, or a sample."""

    dtype: Annotated[Literal["float16", "bfloat16"], MODEL] = "float16"
    """Data type of the stored latents."""

    compression: Annotated[Literal["none", "zstd"], MODEL] = "none"
    """Compression of the stored latents. zstd: about a tenth smaller, lossless; training then decompresses chunks
    instead of mapping them."""

    precision: Annotated[Precision, MODEL] = "float32"
    """Precision of the VAE's computation."""

    tiling: Annotated[bool, MODEL] = False
    """Encode large frames in overlapping tiles, as diffusers does with enable_tiling. It takes less memory, and changes
    values."""

    slicing: Annotated[bool, MODEL] = False
    """Encode the pictures or segments of a batch one by one, as diffusers does with enable_slicing."""

    where: Annotated[str | None, MODEL] = None
    """Condition that selects the chunks to encode, on their scores and videos, such as 'motion > 0.2 and not
    duplicate'. It is not part of the variant: another condition encodes what is missing, and drops what it does not
    select. Default: all chunks."""

    def rules(self) -> Iterator[UserError]:
        """Yield an empty VAE, wrong lengths and rates, and an invalid condition."""
        if not self.vae:
            yield UserError(
                "--vae is empty",
                hint="give a folder, a model such as stabilityai/sd-vae-ft-mse, or tiny",
                flags=("--vae",),
            )
        wrong = [*errors_of(lambda: self.fps_exact)]
        yield from wrong
        if not wrong:
            yield from _FPS.mistakes("--fps", self.fps_exact)
            yield from errors_of(self.segment_frames, is_video=False)
        yield from errors_of(check_where, self.where)

    @property
    def fps_exact(self) -> Fraction:
        """Sampling rate in frames per second, exact."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f'--fps "{self.fps}" is not a number', hint="write 4, 1/2 or 30000/1001", flags=("--fps",)
            ) from None

    def segment_frames(self, *, is_video: bool) -> int:
        """Return the number of frames in a segment; a length in seconds includes the frame at its end for a video VAE.

        Raises:
            UserError: --segment is not a length, or not a whole number of frames.
        """
        if match := _FRAMES.fullmatch(self.segment):
            return int(match[1])
        num_frames = parse_length(self.segment, flag="--segment", also=", or 81f for frames") * self.fps_exact
        if num_frames.denominator != 1:
            raise UserError(
                f"a segment of {self.segment} at {self.fps} fps has {float(num_frames):g} frames",
                hint="choose --segment and --fps for a whole number of frames per segment, for example "
                "--segment 5s --fps 4",
                flags=("--segment", "--fps"),
            )
        return int(num_frames) + is_video


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
        if self.vae.temporal_factor is not None:
            self._require_segments()
        if self.settings.tiling and not self.vae.row.can_tile:
            raise UserError(f"{self.vae.kind} does not encode in tiles", hint="omit --tiling, or use a smaller --size")
        if self.settings.posterior == "sample" and not self.vae.row.has_posterior:
            raise UserError(
                f"{self.vae.kind} has no posterior to sample: it is deterministic", hint="omit --posterior sample"
            )
        if self.settings.size % self.vae.factor:
            raise UserError(
                f"--size {self.settings.size} is not a multiple of the VAE's downsampling factor, {self.vae.factor}",
                hint=f"use {self.settings.size // self.vae.factor * self.vae.factor or self.vae.factor}",
            )

    @property
    def weights(self) -> str | None:
        """Absolute path of the folder of a VAE on this machine, which is not part of the recipe; None for another."""
        return self.vae.source if self.vae.source != self.vae.name else None

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
    def segment_frames(self) -> int:
        """Number of frames in a segment."""
        return self.settings.segment_frames(is_video=self.vae.temporal_factor is not None)

    @property
    def segment_step(self) -> int:
        """Number of frames from the beginning of a segment to that of the next, which shares a video VAE's last one."""
        return self.segment_frames - (self.vae.temporal_factor is not None)

    @property
    def latent_frames(self) -> int | None:
        """T', the number of latent frames of a segment; None for a VAE of images."""
        factor = self.vae.temporal_factor
        return None if factor is None else self.segment_step // factor + 1

    @property
    def latent_fps(self) -> Fraction:
        """Latent frames per second."""
        fps = self.settings.fps_exact
        return fps if self.latent_frames is None else fps * self.latent_frames / self.segment_step

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of what the VAE makes of a frame, [C, h, w], or of a segment, [C, T', h, w]."""
        side = self.settings.size // self.vae.factor
        frames = () if self.latent_frames is None else (self.latent_frames,)
        return (self.vae.channels, *frames, side, side)

    def units_per_batch(self, batch: int) -> int:
        """Return how many frames, or segments of a VAE of videos, are encoded at once for `batch` frames; 1 or more."""
        return batch if self.latent_frames is None else max(1, batch // self.segment_frames)

    def _require_segments(self) -> None:
        """Raise UserError unless the VAE encodes all frames of a segment, and has the statistics to normalise them."""
        num_frames, step, vae = self.segment_frames, self.vae.frames_step, self.vae
        lower, upper = (max(1, count) * step + 1 for count in ((num_frames - 1) // step, -(-(num_frames - 1) // step)))
        if num_frames != lower:
            fps = self.settings.fps_exact
            near = dict.fromkeys(f"--segment {one}f ({float((one - 1) / fps):g}s)" for one in (lower, upper))
            raise UserError(
                f"{vae.kind} encodes segments of {step}k + 1 frames; --segment {self.settings.segment} at"
                f" {self.settings.fps} fps has {count_noun(num_frames, 'frame')}",
                hint=f"use {' or '.join(near)}; a chunk of 15 s holds"
                f" {' or '.join(str(15 * fps // (one - 1)) for one in dict.fromkeys((lower, upper)))} of them",
            )
        known = len(vae.latents_mean or ()) // vae.channels
        if known > 1 and (self.latent_frames or 0) > known and vae.temporal_factor is not None:
            raise UserError(
                f"{vae.name} has statistics of {known} latent frames; --segment {self.settings.segment} has"
                f" {self.latent_frames}",
                hint=f"use --segment {(known - 1) * vae.temporal_factor + 1}f or less",
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values.

        Settings that cannot affect the bytes are null, such as the seed if nothing is random, or left out if a VAE of
        images knows nothing of them.
        """
        settings = asdict(self.settings)
        del settings["where"]  # selects chunks, whose latents do not depend on it
        is_random, is_video = settings["crop"] != "centre", self.latent_frames is not None
        settings["segment"] = f"{self.segment_frames}f" if is_video else self.settings.segment if is_random else None
        settings["seed"] = self.settings.seed if is_random or settings["posterior"] == "sample" else None
        settings["fps"] = str(self.settings.fps_exact)
        for name, plain in (("compression", "none"), ("tiling", False), ("slicing", False)):
            if settings[name] == plain:
                del settings[name]  # latents have been stored so since before the setting
        found = {
            **settings,
            "schema": LATENTS_SCHEMA,
            "column": LATENTS,
            "video": self.video,
            "vae": self.vae.name,
            "vae_sha256": self.vae.sha256,
            "latent_frames": self.latent_frames,
            **{name: getattr(self.vae, name) for name in (*_VAE, *_VIDEO_VAE)},
        }
        return found if is_video else {name: value for name, value in found.items() if name not in _OF_VIDEO_VAES}


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
    try:
        of_vae: dict[str, Any] = {name: stored[name] for name in _VAE}
        of_vae |= {name: stored[name] for name in _VIDEO_VAE if name in stored}
        for name in ("latents_mean", "latents_std"):
            of_vae[name] = None if of_vae.get(name) is None else tuple(of_vae[name])
        vae = Vae(
            name=stored["vae"],
            source=stored["vae"],
            directory=None,
            sha256=stored["vae_sha256"],
            **of_vae,
        )
        return LatentsRecipe(settings=LatentsSettings(**settings), vae=vae, video=stored["video"])
    except KeyError as error:
        raise UserError(f"the recipe lacks {error}", hint="run `prep latents` again to rewrite it") from None
