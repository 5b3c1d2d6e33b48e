"""Detect the shots of a source: PySceneDetect compares all output frames at low resolution.

Output frames have the constant frame rate of the chunks. A cut is the index of an output frame. Output frame `n` shows
the last source frame whose time, rounded to output frames, is at most `n`; before the first source frame, it shows the
first source frame. This is the rule of ffmpeg's fps filter, which selects the frames of the chunks.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import IO, cast

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from clipmill.manifests.storage.urls import Location
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import as_failure, open_source
from clipmill.prep.sources.detector import PICTURE_PX, Detector
from clipmill.prep.sources.probe import open_video
from clipmill.shards.timeline.model import Timeline, find_track
from clipmill.shards.timeline.pictures import displayed_frames
from clipmill.shards.timeline.reading import read_timeline

# Bit-exact scaling, so that all machines compare the same pixels.
_SCALER = Interpolation.AREA | Interpolation.ACCURATE_RND | Interpolation.BITEXACT


def detect_cuts(location: Location, *, timeline: Timeline, num_frames: int, detector: Detector) -> list[int]:
    """Return the first frame of each shot except the first shot, in ascending order, from 1 to `num_frames` - 1.

    Damaged frames are skipped here. The damage is reported when the frames are encoded.

    Args:
        timeline: Timeline of the source.
        num_frames: Number of frames of the video at the detector's frame rate.

    Raises:
        SourceFailure: source_unreadable, source_truncated, no_video, decode_errors or out_of_memory.
    """
    from scenedetect.common import FrameTimecode

    scene_detector, cuts = detector.open(), set[int]()
    frame_index = 0
    for picture_BGR, count in _output_pictures(location, timeline, num_frames=num_frames, fps=detector.fps):
        for _ in range(count):
            time = FrameTimecode(frame_index, detector.fps)
            cuts.update(cut.frame_num for cut in scene_detector.process_frame(time, picture_BGR))
            frame_index += 1
    if not frame_index:
        raise SourceFailure(FailureCode.DECODE_ERRORS, "no frame can be decoded to detect shots")
    cuts.update(cut.frame_num for cut in scene_detector.post_process(FrameTimecode(frame_index - 1, detector.fps)))
    return sorted(cut for cut in cuts if 0 < cut < num_frames)


def output_index(time_s: Fraction, *, fps: Fraction) -> int:
    """Return the output frame nearest to a time. Ties are rounded away from zero, as in ffmpeg (AV_ROUND_NEAR_INF)."""
    position = 2 * abs(time_s) * fps + 1
    index = position.numerator // (2 * position.denominator)
    return index if time_s >= 0 else -index


def _output_pictures(
    location: Location, timeline: Timeline, *, num_frames: int, fps: Fraction
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (picture, uint8 [H, W, 3], BGR; number of output frames that show it). The numbers sum to `num_frames`."""
    with open_source(location) as source:
        packets = None
        if not timeline.is_continuous:
            with (
                open_video(source) as container,
                as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"),
            ):
                _, packets = read_timeline(container, file=cast("IO[bytes]", source.file))
        with (
            open_video(source) as container,
            as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"),
        ):
            find_track(container, timeline.track).codec_context.thread_count = 1  # videos are decoded in parallel
            scaler = _Scaler()
            last_frame, next_index = None, 0
            for time_s, frame in displayed_frames(container, timeline, packets, skips_damage=True):
                index = min(output_index(time_s, fps=fps), num_frames)
                if last_frame is not None and index > next_index:
                    yield scaler.scale(last_frame), index - next_index
                    next_index = index
                last_frame = frame
                if next_index == num_frames:
                    return
            if last_frame is not None and next_index < num_frames:
                yield scaler.scale(last_frame), num_frames - next_index


class _Scaler:
    """Scaler for the frames of a video. All pictures get the resolution of the first picture."""

    def __init__(self) -> None:
        self._scaler = VideoReformatter()  # reuses its tables for all frames
        self._size: dict[str, int] = {}

    def scale(self, frame: VideoFrame) -> np.ndarray:
        """Scale a frame and return it as uint8 [H, W, 3], BGR.

        Raises:
            SourceFailure: decode_errors or out_of_memory.
        """
        if not self._size:
            scale = min(1.0, PICTURE_PX / max(frame.width, frame.height))
            sides = {"width": frame.width, "height": frame.height}
            self._size = {name: max(1, round(side * scale)) for name, side in sides.items()}
        with as_failure(FailureCode.DECODE_ERRORS, "a frame cannot be converted"):
            picture = self._scaler.reformat(frame, **self._size, format="bgr24", interpolation=_SCALER, threads=1)
            return picture.to_ndarray()
