"""The check of an encoder pass: the source frames that it shows, compared with the source's own packets."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.video.spans import Span

TIMES_FORMAT = "{ptsi} {tbi}"  # for -stats_enc_pre: timestamp and time base of the source frame
_ROUNDING_S = 2e-6  # ffmpeg seeks with microsecond precision
_MAX_HIDDEN = 2  # packets in a row without a frame of their own: second fields, and frames that are never shown


def source_times(lines: Sequence[str], *, start: Fraction) -> np.ndarray:
    """Return the source time of each output frame in seconds from the start of the video: float64 [frames].

    Args:
        lines: a line in TIMES_FORMAT for each output frame.
        start: timestamp of the start of the video in seconds.

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
    return counts * float(unit_s) - float(start)


def check_frames(times_s: np.ndarray, packets_s: np.ndarray, *, span: Span, fps: Fraction) -> None:
    """Compare the source frames that were encoded with the source's packets and the span's plan.

    Every output frame must show the source frame visible at its time: the last one that begins at most half an output
    frame later. If a video begins with a gap, its first output frames may show a later source frame.

    Args:
        times_s: times of the source frames shown, float64 [frames], in seconds from the start of the video.
        packets_s: times of the source's packets, float64 [packets], ascending, likewise.

    Raises:
        SourceFailure: source_truncated, or frames_differ.
    """
    if len(times_s) < span.num_frames:
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"truncated: span {span.index} has {len(times_s)} of the {span.num_frames} frames that the header implies",
        )
    due_s, half_s = _due_s(times_s, span=span, fps=fps), float(1 / (2 * fps))
    wrong = is_late(times_s, span=span, fps=fps)
    if span.index == 0:
        wrong &= times_s != times_s[0]
    shown = np.searchsorted(packets_s, times_s + _ROUNDING_S)
    due = np.searchsorted(packets_s, due_s + half_s - _ROUNDING_S)
    wrong |= due - shown > _MAX_HIDDEN
    if wrong.any():
        first = int(np.argmax(wrong))
        begins_s = packets_s[max(0, due[first] - 1)] if len(packets_s) else due_s[first]
        is_end = times_s[first] < begins_s and (times_s[first:] == times_s[first]).all()
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED if is_end else FailureCode.FRAMES_DIFFER,
            f"output frame {span.first_frame + first} at {due_s[first]:.4f} s shows the source frame of"
            f" {times_s[first]:.4f} s, expected the one of {begins_s:.4f} s",
        )


def is_late(times_s: np.ndarray, *, span: Span, fps: Fraction) -> np.ndarray:
    """Whether each of the first frames of a span shows a source frame that begins after it: bool, as `times_s`."""
    return times_s > _due_s(times_s, span=span, fps=fps) + float(1 / (2 * fps)) + _ROUNDING_S


def _due_s(times_s: np.ndarray, *, span: Span, fps: Fraction) -> np.ndarray:
    return (span.first_frame + np.arange(len(times_s))) * fps.denominator / fps.numerator
