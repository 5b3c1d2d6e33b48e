"""Speech or not, on the audio track of a chunk.

WebRTC's voice activity detector decides for each window of 30 ms whether it is loud in the bands of speech; tones and
noise are too. Speech also changes its loudness with every syllable, about four times a second (Scheirer and Slaney,
Construction and Evaluation of a Robust Multifeature Speech/Music Discriminator, ICASSP 1997). Windows therefore count
only where the loudness varies within the second around them.
"""

from fractions import Fraction
from io import BytesIO

import av
import av.error
import numpy as np
import webrtcvad
from numpy.typing import NDArray

from clipmill.prep.core.failures import FailureCode, SourceFailure

RATE_HZ = 16_000
WINDOW_MS = 30
_WINDOW = RATE_HZ * WINDOW_MS // 1000  # samples
_AGGRESSIVENESS = 3  # of 0 to 3: the fewest false alarms
_AROUND = 16  # windows before and after a window: about a second
_MIN_VARIATION_DB = 3.0  # standard deviation; a tone has 0, white noise 0.3
_FLOOR_DB = -60.0  # of full scale; below, all is silence


def speech_s(content: bytes) -> Fraction | None:
    """Return how many seconds of a chunk's audio are speech; None if there is no audio.

    Raises:
        SourceFailure: decode_errors.
    """
    samples = _decode(content)
    if samples is None:
        return None
    return Fraction(int(is_speech(samples).sum()) * WINDOW_MS, 1000)


def is_speech(samples: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return for each whole window of 30 ms whether it is speech, bool [windows].

    Args:
        samples: mono, RATE_HZ.
    """
    windows = samples[: len(samples) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    detector = webrtcvad.Vad(_AGGRESSIVENESS)
    is_voiced = np.array([detector.is_speech(window.tobytes(), RATE_HZ) for window in windows], bool)
    power = (windows.astype(np.float64) ** 2).mean(axis=1) / 2.0**30
    loudness_db = 10 * np.log10(np.maximum(power, 10 ** (_FLOOR_DB / 10)))
    return is_voiced & (_variation(loudness_db) >= _MIN_VARIATION_DB)


def _variation(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of the values around each one."""
    count = np.arange(len(values))
    begin, end = np.maximum(count - _AROUND, 0), np.minimum(count + _AROUND + 1, len(values))
    sums, squares = (np.concatenate([[0.0], np.cumsum(terms)]) for terms in (values, values**2))
    mean = (sums[end] - sums[begin]) / (end - begin)
    return np.sqrt(np.maximum((squares[end] - squares[begin]) / (end - begin) - mean**2, 0.0))


def _decode(content: bytes) -> NDArray[np.int16] | None:
    """Return the first audio track, mono at RATE_HZ; None if there is none, or it is empty."""
    parts = []
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
            for frame in [*container.decode(stream), None]:
                parts += [resampled.to_ndarray()[0] for resampled in resampler.resample(frame)]
    except av.error.FFmpegError as error:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"the audio cannot be decoded: {error}") from None
    return np.concatenate(parts).astype(np.int16, copy=False) if parts else None
