"""Shot cuts, by PySceneDetect's ContentDetector fed with selected frames.

The detector compares each frame with the one that it was given before. It gets all samples; between two samples whose
difference is below `REFINE_SHARE` of the threshold, it gets no other frame, and between all others every frame, so that
a cut is found at its exact frame. What this leaves out is a short shot between two samples that look alike, and a cut
between pictures that differ too little as samples but enough as neighbours.
"""

from collections.abc import Iterable, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray
from scenedetect import FrameTimecode
from scenedetect.detectors import ContentDetector
from scenedetect.scene_manager import compute_downscale_factor

REFINE_SHARE = 0.5
MIN_SHOT_FRAMES = 15  # PySceneDetect's default: cuts that are closer are merged
Picture = NDArray[np.uint8]  # [H, W, 3], BGR


def analysis_picture(picture: Picture) -> Picture:
    """Scale a picture down for the detector, as PySceneDetect does."""
    height, width = picture.shape[:2]
    factor = compute_downscale_factor(max(width, height))
    if factor <= 1:
        return picture
    size = (max(1, round(width / factor)), max(1, round(height / factor)))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR), np.uint8)


def intervals_to_refine(samples: Sequence[tuple[int, Picture]], *, threshold: float) -> list[range]:
    """Return the frames between neighbouring samples (index, picture) that may hold a cut."""
    detector = ContentDetector(threshold=REFINE_SHARE * threshold, min_scene_len=0)
    found = []
    for before, (frame, picture) in zip([0, *(frame for frame, _ in samples)], samples, strict=False):
        if detector.process_frame(_timecode(frame), picture) and frame - before > 1:
            found.append(range(before + 1, frame))
    return found


def find_cuts(frames: Iterable[tuple[int, Picture]], *, threshold: float) -> list[int]:
    """Return the first frames of new shots, ascending; `frames` are (index, picture) in order, beginning with 0."""
    detector = ContentDetector(threshold=threshold, min_scene_len=MIN_SHOT_FRAMES)
    found: list[int] = []
    for frame, picture in frames:
        # The chunk may begin in the middle of a shot, so that a cut in its first frames ends no short shot.
        shown = frame + MIN_SHOT_FRAMES if frame else 0
        found += [cut.frame_num - MIN_SHOT_FRAMES for cut in detector.process_frame(_timecode(shown), picture)]
    return found


def _timecode(frame: int) -> FrameTimecode:
    return FrameTimecode(frame, 30.0)  # the detector counts frames: the rate has no effect
