"""The source frames that an encoder pass shows, as ffmpeg reports them, compared with those that its span requires."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.video.spans import Span

TIMES_FORMAT = "{ptsi} {tbi}"  # for -stats_enc_pre: timestamp and time base of the source frame
_ROUNDING_S = 2e-6  # ffmpeg seeks with microsecond precision


def source_times(lines: Sequence[str], *, offset_s: Fraction) -> np.ndarray:
    """Return the source time of each output frame in seconds from the start of the video: float64 [frames].

    Args:
        lines: a line in TIMES_FORMAT for each output frame.
        offset_s: time at which the pass started reading; ffmpeg's timestamps are relative to it.

    Raises:
        SourceFailure: io_error, if a line is truncated.
    """
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
        times_s: float64 [frames], from `source_times`.

    Raises:
        SourceFailure: source_truncated, or frames_differ.
    """
    slack_frames = max(2, math.ceil(source_frame_s * fps) + 1) if span.is_last else 0
    if len(times_s) < span.num_frames - slack_frames or not len(times_s):
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"truncated: span {span.index} has {len(times_s)} of the {span.num_frames} frames that the header implies",
        )
    due_s, late = _due_s(times_s, span=span, fps=fps), is_late(times_s, span=span, fps=fps)
    if span.index == 0:
        late &= times_s != times_s[0]
    if late.any():
        first = int(np.argmax(late))
        raise SourceFailure(
            FailureCode.FRAMES_DIFFER,
            f"output frame {span.first_frame + first} shows the source at {times_s[first]:.4f} s,"
            f" expected {due_s[first]:.4f} s",
        )


def is_late(times_s: np.ndarray, *, span: Span, fps: Fraction) -> np.ndarray:
    """Whether each of the first frames of a span shows a source frame that begins after it: bool, as `times_s`."""
    return times_s > _due_s(times_s, span=span, fps=fps) + float(1 / (2 * fps)) + _ROUNDING_S


def _due_s(times_s: np.ndarray, *, span: Span, fps: Fraction) -> np.ndarray:
    return (span.first_frame + np.arange(len(times_s))) * fps.denominator / fps.numerator
