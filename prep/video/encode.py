"""One encoder pass over a span: the filter graph, the arguments, the process, and the check of the encoded frames.

ffmpeg seeks to a point shortly before the span. The fps filter then drops everything before the span's first frame; a
seek alone could miss the source frame that is visible at that moment. The segment muxer cuts at forced key frames, one
per chunk. Frames between two chunks that belong to none are encoded too, into a segment that is not kept. ffmpeg also
records the source timestamp of every encoded frame (`-stats_enc_pre`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import ffmpeg
import numpy as np

from prep.core.failures import FailureCode, SourceFailure
from prep.sources.probe import DEMUXERS, PROTOCOLS, SourceFacts
from prep.video.codecs import codec_named
from prep.video.ffmpeg import run
from prep.video.ffmpeg_errors import require_success
from prep.video.recipe import ResolvedRecipe
from prep.video.settings import ChunkSettings
from prep.video.spans import Span

_TIMES_FILE = "times.txt"
_PROGRESS_FILE = "progress.txt"
_MIN_LIMIT_S = 120.0
_LIMIT_PER_VIDEO_S = 60.0  # a pass slower than 1/60 of real time is considered stuck


@dataclass(frozen=True)
class EncodedSpan:
    """Output of an encoder pass.

    Attributes:
        segments: files of the span's pieces, in order: its chunks, and what was left out between them.
        source_times_s: float64 [frames]: timestamp in seconds of the source frame shown by each output frame
            (`read_source_times`).
        cpu_s: user and system CPU time of the encoder in seconds.
    """

    segments: list[Path]
    source_times_s: np.ndarray
    cpu_s: float


def output_size(source: SourceFacts, *, short_side: int) -> tuple[int, int]:
    """Return (width, height) of the chunks in pixels, both even; the short side is `short_side`, but never upscaled."""
    scale = min(1.0, short_side / min(source.width, source.height))
    return _even(source.width * scale), _even(source.height * scale)


def _even(pixels: float) -> int:
    return max(2, 2 * math.floor(pixels / 2 + 0.5))


def encode_span(
    source_path: Path,
    *,
    source: SourceFacts,
    span: Span,
    recipe: ResolvedRecipe,
    program: str,
    folder: Path,
    on_frames: Callable[[int], None] = lambda frames: None,
) -> EncodedSpan:
    """Encode the chunks of `span` into `folder` and check their frames.

    Args:
        on_frames: called periodically with the number of frames encoded so far.

    Raises:
        SourceFailure: the pass failed, or its frames are not those of the span.
    """
    fps = recipe.settings.fps_exact
    arguments = span_arguments(source_path, source=source, span=span, recipe=recipe, program=program)
    limit_s = max(_MIN_LIMIT_S, _LIMIT_PER_VIDEO_S * float(span.num_frames / fps))
    outcome = run(
        arguments, folder=folder, limit_s=limit_s, on_poll=lambda: on_frames(_encoded_frames(folder / _PROGRESS_FILE))
    )
    require_success(outcome, limit_s=limit_s)
    times_s = read_source_times(folder / _TIMES_FILE, offset_s=_seek_s(span, fps=fps, source=source))
    check_source_times(times_s, span=span, fps=fps, source_frame_s=1 / source.fps if source.fps else 0.0)
    return EncodedSpan(segments=sorted(folder.glob("[0-9]*.mp4")), source_times_s=times_s, cpu_s=outcome.cpu_s)


def span_arguments(
    source_path: Path, *, source: SourceFacts, span: Span, recipe: ResolvedRecipe, program: str
) -> list[str]:
    """Return the ffmpeg command for one span; run it in an empty folder."""
    settings, codec = recipe.settings, codec_named(recipe.settings.codec)
    stream, video = scaled_frames(source_path, source=source, span=span, settings=settings)
    margin_s = _margin_s(span, fps=settings.fps_exact, source=source)
    length_s = _microseconds(span.num_frames / settings.fps_exact)
    streams = [video]
    options: dict[str, str | int | None] = {"an": None}
    if settings.audio == "keep":
        streams.append(stream["a:0?"])
        options = {
            "c:a": "aac",
            "b:a": "128k",
            "ac": 2,
            "ar": 48000,
            "af": f"atrim=start={_microseconds(margin_s)},asetpts=PTS-{margin_s}/TB,aresample=async=1:first_pts=0",
        }
    options |= {
        "c:v": codec.encoder,
        "threads:v": 1,
        **_rate_control(settings, codec.crf_argument),
        **codec.gop_arguments(settings.gop, settings.keyint),
        **dict(codec.fixed_arguments),
    }
    if settings.preset and codec.preset_argument:
        options[codec.preset_argument] = settings.preset
    borders = list(accumulate(frames for frames, _ in span.pieces()))[:-1]
    options |= {
        "frames:v": span.num_frames,
        "t": length_s,
        "fps_mode": "passthrough",
        "force_key_frames": _key_frames(settings, borders),
        "map_metadata": -1,
        "map_chapters": -1,
        "fflags": "+bitexact",
        "flags": "+bitexact",
        # With B frames, decoding timestamps begin below zero; muxers would otherwise shift the presentation timestamps.
        "avoid_negative_ts": "disabled",
        "stats_enc_pre:v": _TIMES_FILE,
        "stats_enc_pre_fmt:v": TIMES_FORMAT,
        "format": "segment",
        "segment_frames": ",".join(map(str, borders)) or str(span.num_frames),
        "reset_timestamps": 1,
        "segment_format": "mp4",
        "segment_format_options": "movflags=+faststart:fflags=+bitexact:avoid_negative_ts=disabled",
    }
    output = ffmpeg.output(*streams, "%06d.mp4", **options)
    general = ["-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"]
    return output.global_args(*general, "-progress", _PROGRESS_FILE).compile(cmd=program)


def _key_frames(settings: ChunkSettings, borders: list[int]) -> str:
    """Return the value of `-force_key_frames` for a pass whose pieces begin at frame 0 and at `borders`."""
    if settings.cut == "even":
        return f"expr:not(mod(n,{settings.chunk_frames}))"
    return "expr:" + "+".join(f"eq(n,{frame})" for frame in (0, *borders))


def scaled_frames(source_path: Path, *, source: SourceFacts, span: Span, settings: ChunkSettings) -> tuple[Any, Any]:
    """Return (source stream, frames that the encoder of `span` receives) as streams of ffmpeg-python.

    The frames have the size and frame rate of the chunks and begin at time 0. The output options limit their number.
    """
    fps = settings.fps_exact
    width, height = output_size(source, short_side=settings.short_side)
    seek_s = _seek_s(span, fps=fps, source=source)
    margin_s = _margin_s(span, fps=fps, source=source)
    input_options = {"ss": _microseconds(seek_s)} if seek_s else {}
    stream = ffmpeg.input(
        f"file:{source_path}",
        threads=1,
        protocol_whitelist=PROTOCOLS,
        format_whitelist=DEMUXERS,
        **input_options,
    )
    resize = [width, height]
    resize_options = {"flags": f"{settings.scaler}+accurate_rnd+bitexact", "out_range": "tv"}
    rate_options = {"fps": settings.fps, "start_time": _microseconds(margin_s), "round": "near"}
    video = stream["V:0"]
    # The cheaper order: resize before frames are duplicated, or after frames are dropped. The result is the same.
    if source.fps <= fps:
        video = video.filter("scale", *resize, **resize_options).filter("fps", **rate_options)
    else:
        video = video.filter("fps", **rate_options).filter("scale", *resize, **resize_options)
    return stream, video.filter("format", "yuv420p").filter("setsar", "1").filter("setpts", f"PTS-{margin_s}/TB")


def _seek_s(span: Span, *, fps: Fraction, source: SourceFacts) -> Fraction:
    """Return the time at which the pass starts reading, on the grid of output frames.

    It is one second and one key frame interval before the span.
    """
    return Fraction(max(0, span.first_frame - math.ceil((1 + Fraction(source.key_gap_s)) * fps))) / fps


def _margin_s(span: Span, *, fps: Fraction, source: SourceFacts) -> Fraction:
    """Return how many seconds before the span the pass starts reading."""
    return Fraction(span.first_frame) / fps - _seek_s(span, fps=fps, source=source)


def _microseconds(seconds: Fraction) -> str:
    whole, rest = divmod(round(seconds * 1_000_000), 1_000_000)
    return f"{whole}.{rest:06d}"


def _rate_control(settings: ChunkSettings, crf_argument: str) -> dict[str, str | int]:
    if settings.bitrate is not None:
        return {"b:v": settings.bitrate}
    assert settings.crf is not None, "a resolved recipe has one of crf and bitrate"
    rate: dict[str, str | int] = {crf_argument: settings.crf}
    if crf_argument == "crf" and settings.codec == "vp9":
        rate["b:v"] = 0  # otherwise libvpx also applies its default bitrate
    return rate


def _encoded_frames(progress: Path) -> int:
    """Return the number of frames encoded so far, from the end of ffmpeg's progress file."""
    try:
        with progress.open("rb") as file:
            file.seek(max(0, progress.stat().st_size - 1000))
            lines = file.read().decode("ascii", "replace").splitlines()
    except OSError:
        return 0
    counts = [line.removeprefix("frame=").strip() for line in lines if line.startswith("frame=")]
    return int(counts[-1]) if counts and counts[-1].isdigit() else 0


TIMES_FORMAT = "{ptsi} {tbi}"  # for -stats_enc_pre: timestamp and time base of the source frame
_ROUNDING_S = 2e-6  # ffmpeg seeks with microsecond precision


def read_source_times(path: Path, *, offset_s: Fraction) -> np.ndarray:
    """Return the source time of each output frame in seconds from the start of the video: float64 [frames].

    Args:
        path: file with one line in TIMES_FORMAT per output frame.
        offset_s: time at which the pass started reading; ffmpeg's timestamps are relative to it.

    Raises:
        SourceFailure: io_error, if a line is truncated.
    """
    lines = path.read_text().splitlines()
    if not lines:
        return np.zeros(0)
    try:
        unit_s = Fraction(lines[0].split()[1])  # there is one stream, hence one time base
        counts = np.array([line.split()[0] for line in lines], np.int64)
    except (ValueError, IndexError):
        raise SourceFailure(FailureCode.IO_ERROR, "ffmpeg's list of frame times is truncated") from None
    return counts * unit_s.numerator / unit_s.denominator + float(offset_s)


def check_source_times(times_s: np.ndarray, *, span: Span, fps: Fraction, source_frame_s: float) -> None:
    """Compare the source frames that were encoded with the span's plan.

    Every output frame must show the source frame visible at its time: one that begins at most half an output frame
    later. If a video begins with a gap, its first output frames may show a later source frame. The last span may end
    earlier than the header announced, by two output frames or one source frame, whichever is longer.

    Args:
        times_s: float64 [frames], from `read_source_times`.

    Raises:
        SourceFailure: source_truncated, or frames_differ.
    """
    slack_frames = max(2, math.ceil(source_frame_s * fps) + 1) if span.is_last else 0
    if len(times_s) < span.num_frames - slack_frames or not len(times_s):
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"truncated: span {span.index} has {len(times_s)} of the {span.num_frames} frames that the header implies",
        )
    due_s = (span.first_frame + np.arange(len(times_s))) * fps.denominator / fps.numerator
    is_late = times_s > due_s + float(1 / (2 * fps)) + _ROUNDING_S
    if span.index == 0:
        is_late &= times_s != times_s[0]
    if is_late.any():
        first = int(np.argmax(is_late))
        raise SourceFailure(
            FailureCode.FRAMES_DIFFER,
            f"output frame {span.first_frame + first} shows the source at {times_s[first]:.4f} s,"
            f" expected {due_s[first]:.4f} s",
        )
