"""Speech or not, by WebRTC's voice activity detector on the audio track of a chunk."""

from fractions import Fraction
from io import BytesIO

import av
import av.error
import webrtcvad

from prep.core.failures import FailureCode, SourceFailure

_RATE_HZ = 16_000
_WINDOW_MS = 30
_AGGRESSIVENESS = 3  # of 0 to 3: the fewest false alarms
_WINDOW_BYTES = _RATE_HZ * _WINDOW_MS // 1000 * 2


def speech_s(content: bytes) -> Fraction | None:
    """Return how many seconds of a chunk's audio the detector takes for speech; None if there is no audio.

    Raises:
        SourceFailure: decode_errors.
    """
    detector, samples = webrtcvad.Vad(_AGGRESSIVENESS), bytearray()
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            resampler = av.AudioResampler(format="s16", layout="mono", rate=_RATE_HZ)
            for frame in [*container.decode(stream), None]:
                for resampled in resampler.resample(frame):
                    samples += resampled.to_ndarray().tobytes()
    except av.error.FFmpegError as error:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"the audio cannot be decoded: {error}") from None
    if not samples:
        return None
    windows = range(0, len(samples) - _WINDOW_BYTES + 1, _WINDOW_BYTES)
    num_speech = sum(detector.is_speech(bytes(samples[at : at + _WINDOW_BYTES]), _RATE_HZ) for at in windows)
    return Fraction(num_speech * _WINDOW_MS, 1000)
