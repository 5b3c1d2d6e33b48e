"""The recipe of the `video` column: every setting that changes its bytes, and nothing else.

A recipe as the user states it (`Recipe`) leaves some choices to the codec; `resolve` fills them in and adds the ffmpeg
build. The resolved recipe is what is fingerprinted, stored beside the shards and compared when a run is repeated.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from prep.codecs import MAX_CONSECUTIVE_B_FRAMES, STAR, codec_named

RECIPE_SCHEMA = 1  # goes up when the same settings begin to give other bytes
SPAN_CHUNKS = 20  # chunks of one encoder pass: five minutes of video at 15 s
_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|ms)", re.ASCII)
_BITRATE = re.compile(r"[1-9]\d*[kM]?", re.ASCII)

Gop = Literal["star", "closed", "intra"]
Tail = Literal["keep", "drop", "merge"]
Audio = Literal["drop", "keep"]
Scaler = Literal["bicubic", "area", "bilinear", "lanczos"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of `prep chunk` that change what is made."""

    len: Annotated[str, Parameter(allow_leading_hyphen=True)] = "15s"
    """Length of a chunk, with its unit: 15s, 2.5s, 500ms."""

    codec: str = "h264"
    """h264, hevc, av1, vp9, mjpeg, h264_nvenc or hevc_nvenc."""

    crf: int | None = None
    """Constant quality, smaller is better (default: 23 for h264; MJPEG: the quantiser scale, 10)."""

    bitrate: str | None = None
    """Average bitrate instead of constant quality: 800k, 2M."""

    preset: str | None = None
    """The encoder's speed preset (default: veryfast for h264)."""

    gop: Gop | None = None
    """star (a frame costs at most three decodes), closed, or intra (default: star where the codec can)."""

    keyint: int = 16
    """Frames from one key frame to the next."""

    fps: str = "30"
    """Constant frame rate of every chunk: 30, 25, 30000/1001."""

    short_side: int = 288
    """Short side in pixels; smaller videos are not enlarged."""

    scaler: Scaler = "bicubic"
    """Filter of the resize."""

    tail: Tail = "keep"
    """What becomes of the rest that is shorter than a chunk: kept, dropped, or merged into the chunk before."""

    audio: Audio = "drop"
    """Whether chunks carry the first audio stream, as AAC."""

    def __post_init__(self) -> None:
        codec = codec_named(self.codec)
        if self.crf is not None and self.bitrate is not None:
            raise UserError("--crf and --bitrate exclude each other", hint="give the one that you mean")
        low, high = codec.crf_range
        if self.crf is not None and not low <= self.crf <= high:
            raise UserError(f"--crf {self.crf} is out of range", hint=f"{self.codec} takes {low} (best) to {high}")
        if self.bitrate is not None and not _BITRATE.fullmatch(self.bitrate):
            raise UserError(f'--bitrate "{self.bitrate}" is not a bitrate', hint="write 800k or 2M (bits per second)")
        if self.preset is not None and self.preset not in codec.presets:
            known = ", ".join(codec.presets) or "none"
            raise UserError(f'{self.codec} has no preset "{self.preset}"', hint=f"its presets: {known}")
        if self.gop is not None and self.gop not in codec.gops:
            raise UserError(f"{self.codec} cannot write --gop {self.gop}", hint=f"it can: {', '.join(codec.gops)}")
        if not 1 <= self.keyint <= 600:
            raise UserError(f"--keyint {self.keyint} is out of range", hint="give 1 to 600 frames")
        if (self.gop or codec.gops[0]) == STAR and not 3 <= self.keyint <= MAX_CONSECUTIVE_B_FRAMES + 2:
            raise UserError(
                f"--keyint {self.keyint} does not fit a star GOP", hint="give 3 to 18 frames, or use --gop closed"
            )
        if not 16 <= self.short_side <= 4320 or self.short_side % 2:
            raise UserError(f"--short-side {self.short_side} does not work", hint="give an even number from 16 to 4320")
        if not 1 <= self.fps_exact <= 240:
            raise UserError(f"--fps {self.fps} is out of range", hint="give 1 to 240 frames per second")
        if (self.len_s * self.fps_exact).denominator != 1:
            raise UserError(
                f"a chunk of {self.len} at {self.fps} fps is {float(self.len_s * self.fps_exact):g} frames",
                hint="choose --len and --fps so that their product is whole, for example --len 15s --fps 30",
            )
        if self.len_s > 3600:
            raise UserError(f"--len {self.len} is too long", hint="give an hour or less; 15s is what training wants")

    @property
    def len_s(self) -> Fraction:
        """Length of a full chunk in seconds, exact."""
        match = _LENGTH.fullmatch(self.len)
        if match is None or Fraction(match["number"]) == 0:
            raise UserError(f'--len "{self.len}" is not a length', hint="write a number with its unit: 15s or 500ms")
        seconds = Fraction(match["number"]) / (1000 if match["unit"] == "ms" else 1)
        if (seconds * 1000).denominator != 1:
            raise UserError(f'--len "{self.len}" is finer than a millisecond', hint="keys count whole milliseconds")
        return seconds

    @property
    def fps_exact(self) -> Fraction:
        """Frames per second, exact."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(f'--fps "{self.fps}" is not a rate', hint="write 30, 25 or 30000/1001") from None

    @property
    def chunk_frames(self) -> int:
        """Frames in a full chunk."""
        return int(self.len_s * self.fps_exact)


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with every choice made, and the program that carries it out."""

    settings: Recipe
    ffmpeg: str  # version line of the program: another build may write other bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical JSON of `as_dict`."""
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def variant(self) -> str:
        """Folder name of the variant that this recipe makes: a readable part and the fingerprint's first 8 digits."""
        recipe = self.settings
        rate = f"crf{recipe.crf}" if recipe.bitrate is None else recipe.bitrate
        gop = "intra" if recipe.gop == "intra" else f"{recipe.gop}{recipe.keyint}"
        fps = recipe.fps.replace("/", "-")
        return f"{recipe.codec}-{recipe.short_side}p{fps}-{rate}-{gop}-{recipe.len}-{self.fingerprint[:8]}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": RECIPE_SCHEMA,
            "ffmpeg": self.ffmpeg,
            "span_chunks": SPAN_CHUNKS,
            "threads": 1,
            **asdict(self.settings),
        }


def resolve(recipe: Recipe, *, ffmpeg_version: str) -> ResolvedRecipe:
    """Fills in what `recipe` leaves to the codec, so that the same bytes have one description."""
    codec = codec_named(recipe.codec)
    settings = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    if recipe.bitrate is None:
        settings["crf"] = recipe.crf if recipe.crf is not None else codec.default_crf
    settings["preset"] = recipe.preset if recipe.preset is not None else codec.default_preset or None
    settings["gop"] = recipe.gop or codec.gops[0]
    settings["len"] = _canonical_length(recipe.len_s)
    settings["fps"] = str(recipe.fps_exact)
    return ResolvedRecipe(settings=Recipe(**settings), ffmpeg=ffmpeg_version)


def recipe_from_dict(stored: dict[str, Any]) -> Recipe:
    """The recipe in a variant's recipe.json, as written by `ResolvedRecipe.as_dict`.

    Raises:
        UserError: it was written by another version of the recipe's schema.
    """
    if stored.get("schema") != RECIPE_SCHEMA:
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r}, this version writes {RECIPE_SCHEMA}",
            hint="run `prep chunk` with the settings that you want; it makes a new variant",
        )
    names = {field.name for field in fields(Recipe)}
    return Recipe(**{name: value for name, value in stored.items() if name in names})


def recipe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed between two `as_dict`s, as `name: old → new`, in the order of the new one."""
    names = [*new, *(name for name in old if name not in new)]
    return [f"{name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def _canonical_length(length_s: Fraction) -> str:
    return f"{length_s}s" if length_s.denominator == 1 else f"{int(length_s * 1000)}ms"
