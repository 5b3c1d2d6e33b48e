"""Encode one span of a video in a single ffmpeg pass, and check that the output shows the correct source frames.

ffmpeg keeps the timestamps of the source (`-copyts`), and seeks to a point shortly before the span. The fps filter then
drops every frame before the span. A seek to the exact start could miss the source frame that is visible there. If that
frame begins before the seek point, as is common in slides and screen recordings, ffmpeg still misses it. In this case
the pass is stopped at its first frame, and a new pass seeks to an earlier point. The segment muxer cuts at forced
key frames, one per chunk. Frames between two chunks that belong to neither chunk form a separate segment, which is
discarded. ffmpeg also records the source timestamp of every encoded frame (`-stats_enc_pre`), and `check_frames`
compares these timestamps with the packets of the source.

ffmpeg builds the filter graph only once, because a second graph would restart its clock. If the frame shape changes
within a source, the scaler therefore fits every frame into the resolution of the chunks.

The division of a video into chunks and spans is pure arithmetic on frame counts. With `--cut even`, a video of `F`
output frames (at the recipe's frame rate) has full chunks of `n` frames and, if `F` is not a multiple of `n`, a tail.
With `--cut shots`, chunks begin and end at shot boundaries (`clipmill.prep.video.spans`). A span consists of up to
`span_chunks` consecutive chunks that one encoder pass makes. Its bytes depend on its first frame, so spans never move:
span `s` begins with chunk `s * span_chunks`, regardless of the length of the video.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import SourceFacts, as_failure
from clipmill.prep.video.codecs import find_codec
from clipmill.prep.video.ffmpeg import has_version, require_success, run
from clipmill.prep.video.settings import ChunkSettings, ResolvedRecipe
from clipmill.shards.opening import FILE_PROTOCOLS
from clipmill.shards.timeline.model import CONTINUOUS_FORMAT, DEMUXERS, Filter, Timeline, frame_times

TIMES_FORMAT = "{ptsi} {tbi}"  # for -stats_enc_pre: timestamp and time base of the source frame
_ROUNDING_S = 2e-6  # ffmpeg seeks with microsecond precision
_MAX_HIDDEN = 2  # maximum number of consecutive packets that show no frame of their own: second fields, hidden frames
_TIMES_FILE = "times.txt"
_UNKNOWN_COLOR = 2
_CONTAINER_CROPS = (7, 1)  # first ffmpeg version that applies the crop stored in the container
_PROGRESS_FILE = "progress.txt"
_MIN_LIMIT_S = 120.0
_REACH_FACTOR = 32  # factor by which each repetition of a pass seeks further back (`_FirstFrameDropped`)
_LIMIT_PER_VIDEO_S = 60.0  # time limit per second of video: a pass slower than 1/60 of real time is considered stuck
_MAX_TICKS_PER_S = 1_000_000  # resolution of ffmpeg's option values
_SAME_SHAPE = 0.02  # relative difference in aspect ratio below which a frame is stretched to the chunk's resolution
_OFFSET_S = 0.0005  # time by which a change of the aspect ratio precedes its first frame; less than half a frame


@dataclass(frozen=True)
class Span:
    """Consecutive chunks of a video that one encoder pass makes.

    Attributes:
        index: Index of the span within its video.
        first_frame: First frame of the first chunk, in output frames from the start of the video.
        chunk_frames: Number of frames in each chunk, in order.
        is_last: True for the last span of a video.
        gaps: Number of frames omitted before each chunk, 0 for the first; empty if no frame is omitted.
    """

    index: int
    first_frame: int
    chunk_frames: tuple[int, ...]
    is_last: bool
    gaps: tuple[int, ...] = ()

    @property
    def num_frames(self) -> int:
        """Number of frames in the encoder pass, from the start of the first chunk to the end of the last."""
        return sum(self.chunk_frames) + sum(self.gaps)

    def segment_lengths(self) -> list[tuple[int, bool]]:
        """Return (number of frames, True if the segment is a chunk) for each segment of the encoder pass."""
        gaps = self.gaps or (0,) * len(self.chunk_frames)
        pairs = zip(gaps, self.chunk_frames, strict=True)
        return [segment for gap, frames in pairs for segment in ((gap, False), (frames, True)) if segment[0]]

    def chunk_starts(self) -> list[int]:
        """Return the first frame of each chunk, counted from the start of the video."""
        starts, position = [], self.first_frame
        for frames, is_chunk in self.segment_lengths():
            if is_chunk:
                starts.append(position)
            position += frames
        return starts


@dataclass(frozen=True)
class PacketFacts:
    """Properties of a chunk, named like the fields of the index. The packet lists are in decoding order.

    Attributes:
        packet_offset: Byte offset of each packet in the chunk's file; for an indexed chunk, relative to the chunk's
            first byte in the source file.
        packet_size: Size of each packet in bytes.
        packet_frame: Presentation index of each packet; 0 is the first frame shown.
        packet_flags: PACKET_KEY and PACKET_REFERENCE flags (clipmill.shards.format) of each packet.
        packet_crc32: CRC-32 of each packet's bytes.
    """

    codec: str
    width: int
    height: int
    extradata: bytes
    packet_offset: list[int]
    packet_size: list[int]
    packet_frame: list[int]
    packet_flags: list[int]
    packet_crc32: list[int]


@dataclass(frozen=True)
class SpanPlan:
    """One span of a plan: its video, its chunks, and the fingerprint of its encoder pass."""

    video_id: str
    source_id: str
    dataset: str
    path: str
    source: SourceFacts
    span: Span
    fingerprint: str


def num_output_frames(end_s: np.ndarray, *, fps: Fraction) -> np.ndarray:
    """Return the number of output frames of videos that end at `end_s` seconds: int64, same shape, at least 1."""
    return np.maximum(1, np.rint(end_s * float(fps))).astype(np.int64)


def num_chunks_of(num_frames: np.ndarray, *, chunk_frames: int, tail: str) -> np.ndarray:
    """Return the number of chunks that `chunks_of` returns for each video: int64, same shape as `num_frames`."""
    num_full, rest = np.divmod(num_frames, chunk_frames)
    has_tail = {"keep": rest > 0, "drop": np.zeros_like(rest, bool), "merge": (rest > 0) & (num_full == 0)}
    return num_full + has_tail[tail]


def chunks_of(num_frames: int, *, chunk_frames: int, tail: str) -> list[int]:
    """Return the number of frames in each chunk of a video of `num_frames` frames.

    Args:
        num_frames: Number of frames of the complete video.
        chunk_frames: Number of frames of a full chunk.
        tail: Handling of the remainder: `keep` makes it a chunk, `drop` discards it, `merge` appends it to the previous
            chunk (a video shorter than one chunk becomes a chunk).
    """
    num_full, rest = divmod(num_frames, chunk_frames)
    chunks = [chunk_frames] * num_full
    if rest and tail == "merge" and num_full:
        chunks[-1] += rest
    elif rest and tail != "drop":
        chunks.append(rest)
    return chunks


def span_of(chunks: list[int], *, index: int, span_chunks: int) -> Span:
    """Return span `index` of a video; `chunks` holds the number of frames in each of its chunks."""
    first_chunk = index * span_chunks
    return Span(
        index=index,
        first_frame=sum(chunks[:first_chunk]),
        chunk_frames=tuple(chunks[first_chunk : first_chunk + span_chunks]),
        is_last=first_chunk + span_chunks >= len(chunks),
    )


def start_ms(first_frame: int, *, fps: Fraction) -> int:
    """Return the start of a chunk in milliseconds.

    The value is exact with `--cut even`, because chunk lengths are whole milliseconds. With `--cut shots`, it is
    rounded to the nearest millisecond. No two frames have the same value, because a frame lasts more than 4 ms.
    """
    return round(first_frame / fps * 1000)


@dataclass(frozen=True)
class EncodedSpan:
    """Output of an encoder pass.

    Attributes:
        segments: Files of the span's segments, in order: its chunks, and the gaps between them.
        source_times_s: Time of the source frame that each output frame shows, in seconds from the start of the video:
            float64 [frames].
        cpu_s: User and system CPU time of the encoder in seconds.
    """

    segments: list[Path]
    source_times_s: np.ndarray
    cpu_s: float


def output_size(source: SourceFacts, *, short_side: int) -> tuple[int, int]:
    """Return (width, height) of the chunks in pixels, both even: scaled to `short_side`, but never upscaled."""
    scale = min(1.0, short_side / min(source.width, source.height))
    width, height = (max(2, 2 * math.floor(side * scale / 2 + 0.5)) for side in (source.width, source.height))
    return width, height


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
    """Encode the chunks of `span` into a new folder under `folder`, and check their frames.

    Args:
        on_frames: Function to call periodically with the number of frames encoded so far.

    Raises:
        SourceFailure: The pass failed, or its frames differ from the plan of the span.
    """
    fps, timeline = recipe.settings.fps_exact, Timeline.from_json(source.timeline)
    limit_s = max(_MIN_LIMIT_S, _LIMIT_PER_VIDEO_S * float(span.num_frames / fps))

    def encode(folder: Path, *, reach: int) -> EncodedSpan:
        times_file, seek_s = folder / _TIMES_FILE, _seek_s(span, fps=fps, source=source, reach=reach)

        def require_first(times_s: np.ndarray) -> None:
            if seek_s and is_late(times_s[:1], span=span, fps=fps).any():
                raise _FirstFrameDropped

        def poll() -> None:
            # Stop a long pass early if its first frame is wrong, because the pass has to be repeated anyway.
            with suppress(FileNotFoundError), times_file.open() as file:
                if (line := file.readline()).endswith("\n"):
                    require_first(source_times([line], start=timeline.start))
            on_frames(_encoded_frames(folder / _PROGRESS_FILE))

        arguments = span_arguments(source_path, source=source, span=span, recipe=recipe, program=program, reach=reach)
        outcome = run(arguments, folder=folder, limit_s=limit_s, on_poll=poll)
        require_success(outcome, limit_s=limit_s)
        times_s = source_times(times_file.read_text().splitlines(), start=timeline.start)
        require_first(times_s if len(times_s) else np.full(1, np.inf))
        end_s = (span.first_frame + span.num_frames) / fps
        with as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"):
            packets_s = frame_times(source_path, timeline, begin=seek_s, end=Fraction(end_s))
        check_frames(times_s, packets_s, span=span, fps=fps)
        return EncodedSpan(segments=sorted(folder.glob("[0-9]*.mp4")), source_times_s=times_s, cpu_s=outcome.cpu_s)

    for attempt in count():
        try:
            return encode(Path(tempfile.mkdtemp(dir=folder)), reach=_REACH_FACTOR**attempt)
        except _FirstFrameDropped:
            continue
    raise AssertionError("a pass that reads the source from its start includes the first frame")


class _FirstFrameDropped(Exception):
    """Exception raised if the source frame that the first output frame must show begins before the seek point."""


def span_arguments(
    source_path: Path, *, source: SourceFacts, span: Span, recipe: ResolvedRecipe, program: str, reach: int = 1
) -> list[str]:
    """Return the ffmpeg command for one span. The command must run in an empty folder.

    Args:
        reach: Factor by which the pass starts reading further before the span; usually 1.
    """
    import ffmpeg

    settings, codec = recipe.settings, find_codec(recipe.settings.codec)
    timeline = Timeline.from_json(source.timeline)
    stream, video = _scaled_frames(source_path, source=source, span=span, recipe=recipe, reach=reach)
    begin_s = timeline.start + span.first_frame / settings.fps_exact
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
            "af": f"atrim=start={_microseconds(begin_s)},asetpts=PTS-{begin_s}/TB,aresample=async=1:first_pts=0",
        }
    # Values of ISO/IEC 23091-2, in which 2 means "unknown". The scaler passes on only the matrix and the range.
    options |= {"color_trc": timeline.transfer} if timeline.transfer != _UNKNOWN_COLOR else {}
    options |= {"color_primaries": timeline.primaries} if timeline.primaries != _UNKNOWN_COLOR else {}
    if settings.bitrate is not None:
        rate: dict[str, str | int] = {"b:v": settings.bitrate}
    else:
        assert settings.crf is not None, "a resolved recipe has either crf or bitrate"
        rate = {codec.crf_argument: settings.crf}
        if codec.crf_argument == "crf" and settings.codec == "vp9":
            rate["b:v"] = 0  # otherwise libvpx also applies its default bitrate
    options |= {
        "c:v": codec.encoder,
        "threads:v": 1,
        **rate,
        **codec.gop_arguments(settings.gop, settings.keyint),
        **dict(codec.fixed_arguments),
    }
    if settings.preset and codec.preset_argument:
        options[codec.preset_argument] = settings.preset
    boundaries = list(accumulate(frames for frames, _ in span.segment_lengths()))[:-1]
    if settings.cut == "even":
        key_frames = f"not(mod(n,{settings.chunk_frames}))"
    else:
        key_frames = "+".join(f"eq(n,{frame})" for frame in (0, *boundaries))
    options |= {
        "frames:v": span.num_frames,
        "t": length_s,
        "fps_mode": "passthrough",
        "force_key_frames": f"expr:{key_frames}",
        "map_metadata": -1,
        "map_chapters": -1,
        "fflags": "+bitexact",
        "flags": "+bitexact",
        # With B frames, the first decoding timestamps are negative. By default, muxers would then shift all timestamps.
        "avoid_negative_ts": "disabled",
        # Before ffmpeg 8, setpts removes the frame rate, and with it the durations, so the edit list of each chunk
        # would end before the last frame.
        "bsf:v": f"setts=pts=PTS:dts=DTS:duration=round({1 / settings.fps_exact}/TB)",
        "stats_enc_pre:v": _TIMES_FILE,
        "stats_enc_pre_fmt:v": TIMES_FORMAT,
        "format": "segment",
        "segment_frames": ",".join(map(str, boundaries)) or str(span.num_frames),
        "reset_timestamps": 1,
        "segment_format": "mp4",
        "segment_format_options": "movflags=+faststart:fflags=+bitexact:avoid_negative_ts=disabled",
    }
    output = ffmpeg.output(*streams, "%06d.mp4", **options)
    general = ["-copyts", "-hide_banner", "-nostdin", "-loglevel", "error", "-xerror", "-nostats"]
    return output.global_args(*general, "-progress", _PROGRESS_FILE).compile(cmd=program)


def _scaled_frames(
    source_path: Path, *, source: SourceFacts, span: Span, recipe: ResolvedRecipe, reach: int
) -> tuple[Any, Any]:
    """Return (source stream, frames that the encoder of `span` receives) as ffmpeg-python streams.

    The frames have the resolution and frame rate of the chunks and start at time 0. The output options limit their
    number.
    """
    import ffmpeg

    settings, timeline = recipe.settings, Timeline.from_json(source.timeline)
    fps, shape = settings.fps_exact, timeline.shape
    seek_s = _seek_s(span, fps=fps, source=source, reach=reach)
    input_options: dict[str, Any] = {"fflags": "+genpts"}  # as in PyAV, because MPEG-PS has few presentation timestamps
    if seek_s:
        seek_start = timeline.start if timeline.seek_start is None else timeline.seek_start
        input_options["ss"] = _microseconds(max(Fraction(0), seek_s + timeline.start - seek_start))
    if any(shape.crop):
        if has_version(recipe.values["ffmpeg"], _CONTAINER_CROPS):
            input_options["apply_cropping"] = "codec"
    else:
        input_options["reinit_filter"] = 0
    if shape.orientation_filters():
        input_options["noautorotate"] = None
    stream = ffmpeg.input(
        f"file:{source_path}",
        threads=1,
        protocol_whitelist=FILE_PROTOCOLS,
        format_whitelist=f"{DEMUXERS},{CONTINUOUS_FORMAT}",
        **input_options,
    )
    # This time base represents the midpoints of output frames exactly. It is no finer than a microsecond, the precision
    # of `begin_s`.
    unit = f"1/{2 * fps.numerator * max(1, _MAX_TICKS_PER_S // (2 * fps.numerator))}"
    begin_s = timeline.start + span.first_frame / fps
    rate: list[Filter] = [
        # Repeat the last frame until the end of the span. Otherwise the fps filter may drop this frame.
        ("tpad", {"stop": "-1", "stop_mode": "clone"}),
        ("fps", {"fps": settings.fps, "start_time": _microseconds(begin_s), "round": "near"}),
    ]
    resize, rotate = _resize_filters(source, timeline, settings=settings), shape.orientation_filters()
    filters = [
        *shape.crop_filters(),
        ("settb", {"expr": unit}),
        # Resizing is cheaper before frames are duplicated, or after frames are dropped. Both orders give the same
        # result unless the shape depends on the time, which the fps filter rounds.
        *([*resize, *rate] if source.fps <= fps or len(timeline.aspects) > 1 else [*rate, *resize]),
        *([*rotate, ("sidedata", {"mode": "delete", "type": "DISPLAYMATRIX"})] if rotate else []),
        ("setsar", {"sar": "1"}),
        ("setpts", {"expr": "N"}),
    ]
    video = stream[str(timeline.track)]
    for name, options in filters:
        video = video.filter(name, **options)
    return stream, video


def _resize_filters(source: SourceFacts, timeline: Timeline, *, settings: ChunkSettings) -> list[Filter]:
    """Return the filters that scale every frame to the resolution of the chunks, before it is rotated upright.

    A frame with the aspect ratio of the first frame fills this resolution. A later frame with a different aspect ratio
    is scaled to fit into it and padded.
    """
    width, height = output_size(source, short_side=settings.short_side)
    first_ratio = Fraction(source.width, source.height)
    if timeline.shape.is_transposed:
        width, height, first_ratio = height, width, 1 / first_ratio
    aspect = str(float(timeline.aspects[0][1]))
    for time, next_aspect in timeline.aspects[1:]:
        # Switch at a time between two frames, because times are compared as floating-point numbers.
        aspect = f"if(lt(t,{float(time + timeline.start) - _OFFSET_S:.6f}),{aspect},{float(next_aspect)})"
    ratio = f"(iw*{aspect}/ih)"
    is_same = f"lt(abs({ratio}/{float(first_ratio)}-1),{_SAME_SHAPE})"
    return [
        (
            "scale",
            {
                "w": f"if({is_same},{width},min({width},max(2,2*round({height}*{ratio}/2))))",
                "h": f"if({is_same},{height},min({height},max(2,2*round({width}/{ratio}/2))))",
                "eval": "frame",
                "flags": f"{settings.scaler}+accurate_rnd+bitexact",
                "out_range": "tv",
            },
        ),
        ("format", {"pix_fmts": "yuv420p"}),
        ("pad", {"w": str(width), "h": str(height), "x": "(ow-iw)/2", "y": "(oh-ih)/2", "eval": "frame"}),
    ]


def _seek_s(span: Span, *, fps: Fraction, source: SourceFacts, reach: int) -> Fraction:
    """Return the time at which the pass starts reading, on the grid of output frames.

    This time is `reach` times (one second plus one key frame interval) before the span.
    """
    return Fraction(max(0, span.first_frame - reach * math.ceil((1 + Fraction(source.key_gap_s)) * fps))) / fps


def _microseconds(seconds: Fraction) -> str:
    whole_s, rest = divmod(round(seconds * 1_000_000), 1_000_000)
    return f"{whole_s}.{rest:06d}"


def _encoded_frames(progress: Path) -> int:
    """Return the number of frames encoded so far, read from the end of ffmpeg's progress file."""
    try:
        with progress.open("rb") as file:
            file.seek(max(0, progress.stat().st_size - 1000))
            lines = file.read().decode("ascii", "replace").splitlines()
    except OSError:
        return 0
    counts = [line.removeprefix("frame=").strip() for line in lines if line.startswith("frame=")]
    return int(counts[-1]) if counts and counts[-1].isdigit() else 0


def source_times(lines: Sequence[str], *, start: Fraction) -> np.ndarray:
    """Return the source time of each output frame in seconds from the start of the video: float64 [frames].

    Args:
        lines: A line in TIMES_FORMAT for each output frame.
        start: Timestamp of the start of the video in seconds.

    Raises:
        SourceFailure: io_error, if a line is truncated.
    """
    if not lines:
        return np.zeros(0)
    try:
        unit_s = Fraction(lines[0].split()[1])  # one stream has one time base
        ticks = np.array([line.split()[0] for line in lines], np.int64)
    except (ValueError, IndexError):
        raise SourceFailure(FailureCode.IO_ERROR, "ffmpeg's list of frame times is truncated") from None
    return ticks * float(unit_s) - float(start)


def check_frames(times_s: np.ndarray, packets_s: np.ndarray, *, span: Span, fps: Fraction) -> None:
    """Check that each output frame of a span shows the correct source frame.

    An output frame must show the source frame that is visible at its time: the last source frame that begins at most
    half an output frame later. If a video begins with a gap, its first output frames may show a later source frame.

    Args:
        times_s: Time of the source frame that each output frame shows, float64 [frames], in seconds from the start of
            the video.
        packets_s: Times of all source packets in ascending order, float64 [packets], in seconds from the start of the
            video.

    Raises:
        SourceFailure: source_truncated, or frames_differ.
    """
    if len(times_s) < span.num_frames:
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"truncated: span {span.index} has {len(times_s)} of the {span.num_frames} frames that the header implies",
        )
    # An output frame is wrong if its source frame begins too late, or if a newer source frame should be visible.
    due_s, half_s = _due_s(times_s, span=span, fps=fps), float(1 / (2 * fps))
    is_wrong = is_late(times_s, span=span, fps=fps)
    if span.index == 0:
        is_wrong &= times_s != times_s[0]
    shown_packets = np.searchsorted(packets_s, times_s + _ROUNDING_S)
    due_packets = np.searchsorted(packets_s, due_s + half_s - _ROUNDING_S)
    is_wrong |= due_packets - shown_packets > _MAX_HIDDEN
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        begins_s = packets_s[max(0, due_packets[first] - 1)] if len(packets_s) else due_s[first]
        is_end = times_s[first] < begins_s and (times_s[first:] == times_s[first]).all()
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED if is_end else FailureCode.FRAMES_DIFFER,
            f"output frame {span.first_frame + first} at {due_s[first]:.4f} s shows the source frame at"
            f" {times_s[first]:.4f} s instead of the source frame at {begins_s:.4f} s",
        )


def is_late(times_s: np.ndarray, *, span: Span, fps: Fraction) -> np.ndarray:
    """Return the mask of the span's output frames whose source frame begins too late: bool [frames]."""
    return times_s > _due_s(times_s, span=span, fps=fps) + float(1 / (2 * fps)) + _ROUNDING_S


def _due_s(times_s: np.ndarray, *, span: Span, fps: Fraction) -> np.ndarray:
    return (span.first_frame + np.arange(len(times_s))) * fps.denominator / fps.numerator
