"""The settings of `prep chunk` with all values filled in, as used by the planner, the encoder and the fingerprint.

A task carries them to its worker, which therefore loads nothing of the command line (`clipmill.prep.video.recipe`).
"""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from clipmill.manifests.errors import UserError
from clipmill.manifests.units import parse_bitrate, parse_length
from clipmill.prep.video.codecs import INTRA, MAX_CONSECUTIVE_B_FRAMES, STAR, changed_arguments, codec_named

if TYPE_CHECKING:
    from clipmill.prep.sources.detector import Detector, DetectorName

RECIPE_SCHEMA = 4  # incremented when the same settings begin to produce different bytes
SPAN_CHUNKS = 20  # chunks per encoder pass: five minutes of video at 15 s per chunk

Gop = Literal["comb", "star", "closed", "intra"]
Tail = Literal["keep", "drop", "merge"]
Audio = Literal["drop", "keep"]
Scaler = Literal["bicubic", "area", "bilinear", "lanczos"]
Cut = Literal["even", "shots"]
SHOT_SETTINGS = ("detector", "threshold", "min_scene_len", "min_len")  # None unless `cut` is shots


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """Every setting that affects the bytes of chunks; see `clipmill.prep.video.recipe.Recipe` for their meaning.

    Attributes:
        crf: None if `bitrate` is given.
        preset: None if the encoder has no presets.
        detector, threshold, min_scene_len, min_len: None unless `cut` is shots.

    Raises:
        UserError: the codec does not support a value, or two settings exclude each other.
    """

    len: str
    codec: str
    crf: int | None
    bitrate: str | None
    preset: str | None
    gop: Gop
    keyint: int
    fps: str
    short_side: int
    scaler: Scaler
    tail: Tail
    audio: Audio
    cut: Cut = "even"
    detector: "DetectorName | None" = None
    threshold: float | None = None
    min_scene_len: str | None = None
    min_len: str | None = None

    def __post_init__(self) -> None:
        codec = codec_named(self.codec)
        low, high = codec.crf_range
        if self.crf is not None and not low <= self.crf <= high:
            raise UserError(
                f"--crf {self.crf} is out of range", hint=f"give {low} (best quality) to {high} for {self.codec}"
            )
        if self.bitrate is not None:
            parse_bitrate(self.bitrate, flag="--bitrate")  # raises UserError if it is invalid
        if self.preset is not None and self.preset not in codec.presets:
            hint = f"use one of {', '.join(codec.presets)}" if codec.presets else "omit --preset"
            raise UserError(f'{self.codec} has no preset "{self.preset}"', hint=hint)
        if self.gop not in codec.gops:
            raise UserError(
                f"{self.codec} does not support --gop {self.gop}", hint=f"use --gop {' or '.join(codec.gops)}"
            )
        self._check_keyint()
        if not 16 <= self.short_side <= 4320 or self.short_side % 2:
            raise UserError(f"--short-side {self.short_side} is invalid", hint="give an even number from 16 to 4320")
        if not 1 <= self.fps_exact <= 240:
            raise UserError(f"--fps {self.fps} is out of range", hint="give 1 to 240 frames per second")
        if (self.len_s * self.fps_exact).denominator != 1:
            raise UserError(
                f"a chunk of {self.len} at {self.fps} fps has {float(self.len_s * self.fps_exact):g} frames",
                hint="choose --len and --fps for a whole number of frames per chunk, for example --len 15s --fps 30",
            )
        if self.len_s > 3600:
            raise UserError(f'--len "{self.len}" is too long', hint="give at most 3600s, for example 15s")
        self._check_shots()

    def _check_shots(self) -> None:
        given = [name for name in SHOT_SETTINGS if getattr(self, name) is not None]
        if self.cut == "even":
            if given:
                flag = f"--{given[0].replace('_', '-')}"
                raise UserError(f"{flag} requires --cut shots", hint=f"add --cut shots, or omit {flag}")
            return
        if self.tail != "keep":
            raise UserError(
                f"--tail {self.tail} has no effect with --cut shots",
                hint="omit --tail; --min-len determines which shots are too short",
            )
        assert self.threshold is not None, "the settings of --cut shots have values"
        if not 0 < self.threshold <= 255:
            raise UserError(
                f"--threshold {self.threshold:g} is out of range",
                hint="give a number above 0 and up to 255, such as 3 for --detector adaptive or 27 for content",
            )
        if self.min_frames > -(-self.chunk_frames // 2):
            raise UserError(
                f"--min-len {self.min_len} is longer than half of --len {self.len}",
                hint="longer shots are divided into equal chunks: give at most half of --len",
            )

    def _check_keyint(self) -> None:
        if not 1 <= self.keyint <= 600:
            raise UserError(f"--keyint {self.keyint} is out of range", hint="give 1 to 600 frames")
        if self.gop == INTRA and self.keyint != 1:
            raise UserError(
                f"--keyint {self.keyint} is incompatible with --gop intra, in which every frame is a key frame",
                hint="omit --keyint, or give another --gop",
            )
        if self.gop == STAR and not 3 <= self.keyint <= MAX_CONSECUTIVE_B_FRAMES + 2:
            raise UserError(
                f"--keyint {self.keyint} is incompatible with --gop star", hint="give 3 to 18 frames, or use --gop comb"
            )
        if self.gop == "comb" and self.keyint < 3:
            raise UserError(
                f"--keyint {self.keyint} is incompatible with --gop comb",
                hint="give 3 frames or more, or use --gop intra",
            )

    @property
    def len_s(self) -> Fraction:
        """Length of a full chunk in seconds, exact."""
        return _seconds("--len", self.len)

    @property
    def fps_exact(self) -> Fraction:
        """Frame rate in frames per second, exact."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(f'--fps "{self.fps}" is not a frame rate', hint="write 30, 25 or 30000/1001") from None

    @property
    def chunk_frames(self) -> int:
        """Number of frames in a full chunk."""
        return int(self.len_s * self.fps_exact)

    @property
    def min_frames(self) -> int:
        """Minimum number of frames in a chunk of --cut shots."""
        assert self.min_len is not None
        return math.ceil(_seconds("--min-len", self.min_len) * self.fps_exact)

    @property
    def shot_detector(self) -> "Detector":
        """Detector of --cut shots."""
        from clipmill.prep.sources.detector import Detector

        assert self.detector is not None and self.threshold is not None and self.min_scene_len is not None
        return Detector(
            name=self.detector,
            threshold=self.threshold,
            min_scene_frames=math.ceil(_seconds("--min-scene-len", self.min_scene_len) * self.fps_exact),
            fps=self.fps_exact,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with all values filled in, and the ffmpeg version."""

    settings: ChunkSettings
    ffmpeg: str  # version line of the program: another build may produce other bytes
    scenedetect: str | None = None  # version of PySceneDetect if `cut` is shots: another one may find other cuts

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of `as_dict` as canonical JSON."""
        from clipmill.prep.core.recipe import recipe_fingerprint

        return recipe_fingerprint(self.as_dict())

    @property
    def variant(self) -> str:
        """Folder name of the recipe's variant: a readable part and the first 8 digits of the fingerprint."""
        settings = self.settings
        rate = f"crf{settings.crf}" if settings.bitrate is None else settings.bitrate
        gop = INTRA if settings.gop == INTRA else f"{settings.gop}{settings.keyint}"
        fps = settings.fps.replace("/", "-")
        cut = settings.len if settings.cut == "even" else f"{settings.len}-{settings.cut}"
        return f"{settings.codec}-{settings.short_side}p{fps}-{rate}-{gop}-{cut}-{self.fingerprint[:8]}"

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        changed = changed_arguments(self.settings.codec, self.settings.gop)
        settings = asdict(self.settings)
        if self.settings.cut == "even":  # the only way of cutting when schema 1 began
            for name in ("cut", *SHOT_SETTINGS):
                del settings[name]
        return {
            "schema": RECIPE_SCHEMA,
            "ffmpeg": self.ffmpeg,
            "span_chunks": SPAN_CHUNKS,
            "threads": 1,
            **settings,
            **({} if self.scenedetect is None else {"scenedetect": self.scenedetect}),
            **({} if changed is None else {"arguments": changed}),
        }


def _seconds(flag: str, length: str) -> Fraction:
    """Return a length such as 15s or 500ms in seconds, exact.

    Raises:
        UserError: it is not a length, or not a whole number of milliseconds.
    """
    seconds = parse_length(length, flag=flag)
    if (seconds * 1000).denominator != 1:
        raise UserError(
            f'{flag} "{length}" is not a whole number of milliseconds', hint="round it to milliseconds: 500ms"
        )
    return seconds


def canonical_length(flag: str, length: str) -> str:
    """Return the canonical form of a length: whole seconds as 15s, others in milliseconds.

    Raises:
        UserError: it is not a length, or not a whole number of milliseconds.
    """
    length_s = _seconds(flag, length)
    return f"{length_s}s" if length_s.denominator == 1 else f"{int(length_s * 1000)}ms"


def default_min_len(length: str) -> str:
    """Return the default of `--min-len` for chunks of up to `length`: 2 s, or half of it if that is less."""
    half_ms = int(_seconds("--len", length) * 1000) // 2
    return f"{min(2000, half_ms)}ms"
