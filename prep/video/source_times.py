"""The proof of an encoder pass: which source frame each output frame shows, as ffmpeg wrote it down."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np

from prep.core.failures import FailureCode, SourceFailure
from prep.video.spans import Span

TIMES_FORMAT = "{ptsi} {tbi}"  # of -stats_enc_pre: the source frame's time and its unit
_ROUNDING_S = 2e-6  # ffmpeg seeks in whole microseconds


def read_source_times(path: Path, *, offset_s: Fraction) -> np.ndarray:
    """Source time of each output frame in seconds from the start of the video: float64 [frames].

    Args:
        path: a line in TIMES_FORMAT for each output frame.
        offset_s: where the pass began to read; ffmpeg counts from there.

    Raises:
        SourceFailure: io_error, when a line is cut off.
    """
    lines = path.read_text().splitlines()
    if not lines:
        return np.zeros(0)
    try:
        unit_s = Fraction(lines[0].split()[1])  # one stream, hence one unit
        counts = np.array([line.split()[0] for line in lines], np.int64)
    except (ValueError, IndexError):
        raise SourceFailure(FailureCode.IO_ERROR, "ffmpeg's list of frame times was not written whole") from None
    return counts * unit_s.numerator / unit_s.denominator + float(offset_s)


def check_source_times(times_s: np.ndarray, *, span: Span, fps: Fraction, source_frame_s: float) -> None:
    """Compares the source frames that were encoded with the span's plan.

    Every output frame must show the source frame that was on show at its time: one that begins at most half an
    output frame later. Only the first frames of a video that begins with a gap may show what comes after. The last
    span may end earlier than its header promised by two frames or one source frame, whichever is longer.

    Args:
        times_s: float64 [frames], from `read_source_times`.

    Raises:
        SourceFailure: source_truncated, or frames_differ.
    """
    slack_frames = max(2, math.ceil(source_frame_s * fps) + 1) if span.is_last else 0
    if len(times_s) < span.num_frames - slack_frames or not len(times_s):
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"span {span.index} has {len(times_s)} of {span.num_frames} frames: the source ends before its header says",
        )
    due_s = (span.first_frame + np.arange(len(times_s))) * fps.denominator / fps.numerator
    is_late = times_s > due_s + float(1 / (2 * fps)) + _ROUNDING_S
    if span.index == 0:
        is_late &= times_s != times_s[0]
    if is_late.any():
        first = int(np.argmax(is_late))
        raise SourceFailure(
            FailureCode.FRAMES_DIFFER,
            f"output frame {span.first_frame + first} shows source time {times_s[first]:.4f} s,"
            f" due is {due_s[first]:.4f} s",
        )
