"""One encoder pass over a span: the filter graph, the arguments, the process, and the check of the encoded frames.

ffmpeg seeks to a point shortly before the span. The fps filter then drops everything before the span's first frame; a
seek alone could miss the source frame that is visible at that moment. If that frame began before the point, as in
slides and screen recordings, the seek has dropped it too: the pass is stopped at its first frame, and another one seeks
to an earlier point. The segment muxer cuts at forced key frames, one
per chunk. Frames between two chunks that belong to none are encoded too, into a segment that is not kept. ffmpeg also
records the source timestamp of every encoded frame (`-stats_enc_pre`).
"""

import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import ffmpeg
import numpy as np

from clipmill.prep.sources.probe import DEMUXERS, PROTOCOLS, SourceFacts
from clipmill.prep.video.codecs import codec_named
from clipmill.prep.video.ffmpeg import run
from clipmill.prep.video.ffmpeg_errors import require_success
from clipmill.prep.video.recipe import ResolvedRecipe
from clipmill.prep.video.settings import ChunkSettings
from clipmill.prep.video.source_times import TIMES_FORMAT, check_source_times, is_late, source_times
from clipmill.prep.video.spans import Span

_TIMES_FILE = "times.txt"
_PROGRESS_FILE = "progress.txt"
_MIN_LIMIT_S = 120.0
_FURTHER = 32  # times as far before the span, each time that its first source frame began even earlier
_LIMIT_PER_VIDEO_S = 60.0  # a pass slower than 1/60 of real time is considered stuck


@dataclass(frozen=True)
class EncodedSpan:
    """Output of an encoder pass.

    Attributes:
        segments: files of the span's pieces, in order: its chunks, and what was left out between them.
        source_times_s: float64 [frames]: timestamp in seconds of the source frame shown by each output frame
            (`source_times`).
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
    """Encode the chunks of `span` into a new folder below `folder`, and check their frames.

    Args:
        on_frames: called periodically with the number of frames encoded so far.

    Raises:
        SourceFailure: the pass failed, or its frames are not those of the span.
    """
    fps = recipe.settings.fps_exact
    limit_s = max(_MIN_LIMIT_S, _LIMIT_PER_VIDEO_S * float(span.num_frames / fps))

    def encode(folder: Path, *, reach: int) -> EncodedSpan:
        times_file, seek_s = folder / _TIMES_FILE, _seek_s(span, fps=fps, source=source, reach=reach)

        def require_first(times_s: np.ndarray) -> None:
            if seek_s and is_late(times_s[:1], span=span, fps=fps).any():
                raise _FirstFrameDropped

        def poll() -> None:
            with suppress(FileNotFoundError), times_file.open() as file:
                if (line := file.readline()).endswith("\n"):
                    require_first(source_times([line], offset_s=seek_s))
            on_frames(_encoded_frames(folder / _PROGRESS_FILE))

        arguments = span_arguments(source_path, source=source, span=span, recipe=recipe, program=program, reach=reach)
        outcome = run(arguments, folder=folder, limit_s=limit_s, on_poll=poll)
        require_success(outcome, limit_s=limit_s)
        times_s = source_times(times_file.read_text().splitlines(), offset_s=seek_s)
        require_first(times_s if len(times_s) else np.full(1, np.inf))
        check_source_times(times_s, span=span, fps=fps, source_frame_s=1 / source.fps if source.fps else 0.0)
        return EncodedSpan(segments=sorted(folder.glob("[0-9]*.mp4")), source_times_s=times_s, cpu_s=outcome.cpu_s)

    for number in count():
        try:
            return encode(Path(tempfile.mkdtemp(dir=folder)), reach=_FURTHER**number)
        except _FirstFrameDropped:
            continue
    raise AssertionError("a pass that begins with the source has its first frame")


class _FirstFrameDropped(Exception):
    """The source frame that the first output frame has to show begins before the point to which ffmpeg seeks."""


def span_arguments(
    source_path: Path, *, source: SourceFacts, span: Span, recipe: ResolvedRecipe, program: str, reach: int = 1
) -> list[str]:
    """Return the ffmpeg command for one span; run it in an empty folder.

    Args:
        reach: how much further before the span than usual the pass starts reading, as a factor.
    """
    settings, codec = recipe.settings, codec_named(recipe.settings.codec)
    stream, video = scaled_frames(source_path, source=source, span=span, settings=settings, reach=reach)
    margin_s = _margin_s(span, fps=settings.fps_exact, source=source, reach=reach)
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


def scaled_frames(
    source_path: Path, *, source: SourceFacts, span: Span, settings: ChunkSettings, reach: int = 1
) -> tuple[Any, Any]:
    """Return (source stream, frames that the encoder of `span` receives) as streams of ffmpeg-python.

    The frames have the size and frame rate of the chunks and begin at time 0. The output options limit their number.
    """
    fps = settings.fps_exact
    width, height = output_size(source, short_side=settings.short_side)
    seek_s = _seek_s(span, fps=fps, source=source, reach=reach)
    margin_s = _margin_s(span, fps=fps, source=source, reach=reach)
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
    return stream, video.filter("format", "yuv420p").filter("setsar", "1").filter("setpts", _minus(margin_s, fps=fps))


def _minus(margin_s: Fraction, *, fps: Fraction) -> str:
    """Return the expression that subtracts a margin from timestamps in output frames.

    ffmpeg computes with doubles and truncates the result. Where `margin_s / TB` is not exact (31/30 s at 30 fps), the
    second frame would become the first.
    """
    frames = margin_s * fps
    is_exact = margin_s.numerator / margin_s.denominator / (fps.denominator / fps.numerator) == frames
    return f"PTS-{margin_s}/TB" if is_exact else f"PTS-{frames}"


def _seek_s(span: Span, *, fps: Fraction, source: SourceFacts, reach: int) -> Fraction:
    """Return the time at which the pass starts reading, on the grid of output frames.

    It is `reach` times one second and one key frame interval before the span.
    """
    return Fraction(max(0, span.first_frame - reach * math.ceil((1 + Fraction(source.key_gap_s)) * fps))) / fps


def _margin_s(span: Span, *, fps: Fraction, source: SourceFacts, reach: int) -> Fraction:
    """Return how many seconds before the span the pass starts reading."""
    return Fraction(span.first_frame) / fps - _seek_s(span, fps=fps, source=source, reach=reach)


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
