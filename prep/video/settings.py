"""The complete settings of `prep chunk` and `prep index`, for the planner, the encoder and the fingerprint.

A task passes these settings to its worker, so the worker does not load the flags of the commands (`column.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import parse_bitrate, parse_length
from clipmill.manifests.settings import Checked, Range, errors_of
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.video.codecs import INTRA, MAX_CONSECUTIVE_B_FRAMES, STAR, find_codec
from clipmill.shards.columns import INDEXED

if TYPE_CHECKING:
    from clipmill.prep.sources.detector import Detector

RECIPE_SCHEMA = 4  # increment this number when the same settings produce different bytes than before
SPAN_CHUNKS = 20  # chunks per encoder pass: five minutes of video at 15 s per chunk


Gop = Literal["comb", "star", "closed", "intra"]
Tail = Literal["keep", "drop", "merge"]
Audio = Literal["drop", "keep"]
Scaler = Literal["bicubic", "area", "bilinear", "lanczos"]
Cut = Literal["even", "shots"]
_FPS = Range(1, 240)
SHOT_SETTINGS = ("detector", "threshold", "min_scene_len", "min_len")  # None if `cut` is not "shots"


class ChunkTiming:
    """Length and frame rate of chunks, for the settings of `prep chunk` and `prep index`.

    The properties raise a UserError if `len` or `fps` is not a valid text.
    """

    len: str
    fps: str

    def timing_errors(self) -> Iterator[UserError]:
        """Yield errors about invalid lengths and frame rates, and about a fractional number of frames per chunk."""
        if parse_errors := [*errors_of(lambda: self.len_s), *errors_of(lambda: self.fps_exact)]:
            yield from parse_errors
            return
        range_errors = [*_FPS.mistakes("--fps", self.fps_exact)]
        if self.len_s > 3600:
            range_errors.append(
                UserError(f"--len {self.len} is longer than 1 hour", hint="use at most 3600s", flags=("--len",))
            )
        if not range_errors and (self.len_s * self.fps_exact).denominator != 1:
            yield UserError(
                f"a chunk of {self.len} at {self.fps} fps has {float(self.len_s * self.fps_exact):g} frames, which is "
                "not a whole number",
                hint="use a --len and an --fps with a whole number of frames per chunk, such as --len 15s --fps 30",
                flags=("--len", "--fps"),
            )
        yield from range_errors

    @property
    def len_s(self) -> Fraction:
        """Exact length of a full chunk in seconds."""
        return _seconds("--len", self.len)

    @property
    def fps_exact(self) -> Fraction:
        """Exact frame rate in frames per second."""
        try:
            return Fraction(self.fps)
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f'--fps "{self.fps}" is not a frame rate',
                hint="use a number such as 30, 25 or 30000/1001",
                flags=("--fps",),
            ) from None

    @property
    def chunk_frames(self) -> int:
        """Number of frames in a full chunk."""
        return int(self.len_s * self.fps_exact)


@dataclass(frozen=True, kw_only=True)
class ChunkSettings(ChunkTiming, Checked):
    """All settings that affect the bytes of chunks; see `clipmill.prep.video.column.Recipe` for their meaning.

    Attributes:
        crf: Constant rate factor; None if `bitrate` is set.
        preset: Speed preset; None if the encoder has no presets.
        detector, threshold, min_scene_len, min_len: Settings of `--cut shots`; None if `cut` is not "shots".

    Raises:
        UserError: The codec does not support a value, or two settings conflict.
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
    detector: Literal["adaptive", "content"] | None = None
    threshold: float | None = None
    min_scene_len: str | None = None
    min_len: str | None = None

    def rules(self) -> Iterator[UserError]:
        """Yield errors about values that the codec does not support, and about settings that conflict."""
        codec = find_codec(self.codec)
        low, high = codec.crf_range
        yield from Range(low, high, hint=f"use --crf {low} (best quality) to {high} for {self.codec}").mistakes(
            "--crf", self.crf
        )
        if self.bitrate is not None:
            yield from errors_of(parse_bitrate, self.bitrate, flag="--bitrate")
        if self.preset is not None and self.preset not in codec.presets:
            hint = f"use one of {', '.join(codec.presets)}" if codec.presets else "omit --preset"
            yield UserError(f'{self.codec} has no preset "{self.preset}"', hint=hint, flags=("--preset",))
        if self.gop not in codec.gops:
            yield UserError(
                f"{self.codec} does not support --gop {self.gop}",
                hint=f"use --gop {' or '.join(codec.gops)}",
                flags=("--gop",),
            )
        flags = ("--keyint", "--gop")
        if self.gop == INTRA and self.keyint != 1:
            yield UserError(
                f"--keyint {self.keyint} is incompatible with --gop intra, in which every frame is a key frame",
                hint="omit --keyint, or use a different --gop",
                flags=flags,
            )
        if self.gop == STAR and not 3 <= self.keyint <= MAX_CONSECUTIVE_B_FRAMES + 2:
            yield UserError(
                f"--keyint {self.keyint} is incompatible with --gop star",
                hint="use --keyint 3 to 18, or --gop comb",
                flags=flags,
            )
        if self.gop == "comb" and self.keyint < 3:
            yield UserError(
                f"--keyint {self.keyint} is incompatible with --gop comb",
                hint="use --keyint 3 or more, or --gop intra",
                flags=flags,
            )
        if self.short_side % 2:
            yield UserError(
                f"--short-side {self.short_side} is not an even number",
                hint="use an even number, such as 288",
                flags=("--short-side",),
            )
        length_errors = [*self.timing_errors()]
        yield from length_errors
        if self.cut == "shots" and self.tail != "keep":
            yield UserError(
                f"--tail {self.tail} has no effect with --cut shots",
                hint="omit --tail; --min-len determines which shots are too short",
                flags=("--tail",),
            )
        if not length_errors and self.cut == "shots" and self.min_frames > -(-self.chunk_frames // 2):
            yield UserError(
                f"--min-len {self.min_len} is longer than half of --len {self.len}",
                hint="use at most half of --len, because long shots are divided into equal chunks",
                flags=("--min-len",),
            )

    @property
    def min_frames(self) -> int:
        """Minimum number of frames in a chunk with `--cut shots`."""
        assert self.min_len is not None
        return math.ceil(_seconds("--min-len", self.min_len) * self.fps_exact)

    @property
    def shot_detector(self) -> "Detector":
        """Shot detector for `--cut shots`."""
        from clipmill.prep.sources.detector import Detector

        assert self.detector is not None and self.threshold is not None and self.min_scene_len is not None
        return Detector(
            name=self.detector,
            threshold=self.threshold,
            min_scene_frames=math.ceil(_seconds("--min-scene-len", self.min_scene_len) * self.fps_exact),
            fps=self.fps_exact,
        )


@dataclass(frozen=True, kw_only=True)
class IndexSettings(ChunkTiming, Checked):
    """Settings of `prep index`, which leaves the packets in the source files.

    Attributes:
        len: Length of a chunk, such as "15s".
        fps: Nominal frame rate of the chunks, at which other columns count frames.
    """

    len: str
    fps: str
    codec: ClassVar[str] = INDEXED
    cut: ClassVar[Cut] = "even"
    tail: ClassVar[Tail] = "keep"
    audio: ClassVar[Audio] = "keep"

    def rules(self) -> Iterator[UserError]:
        """Yield errors about invalid lengths and frame rates."""
        return self.timing_errors()


ResolvedRecipe = Recipe[ChunkSettings]


def _seconds(flag: str, length: str) -> Fraction:
    """Return the exact number of seconds in a length such as "15s" or "500ms".

    Raises:
        UserError: `length` is not a valid length, or not a whole number of milliseconds.
    """
    seconds = parse_length(length, flag=flag)
    if (seconds * 1000).denominator != 1:
        raise UserError(
            f'{flag} "{length}" is not a whole number of milliseconds',
            hint="use whole milliseconds, such as 500ms",
            flags=(flag,),
        )
    return seconds


def canonical_length(flag: str, length: str) -> str:
    """Return the canonical form of a length: in seconds if it is a whole number of seconds, otherwise in milliseconds.

    Raises:
        UserError: `length` is not a valid length, or not a whole number of milliseconds.
    """
    length_s = _seconds(flag, length)
    return f"{length_s}s" if length_s.denominator == 1 else f"{int(length_s * 1000)}ms"
