"""Videos with numbered frames and the irregularities of real files.

These are start offsets, variable frame rates, rotation and open GOPs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, cycle, islice
from pathlib import Path

import numpy as np

from clipmill.manifests.publish import publish_atomically
from clipmill.prep.synthetic.encode import TICKS_PER_FRAME, VideoTrack, encode_video, set_rotation
from clipmill.prep.synthetic.frame_code import draw_frame_number

# Frame durations of a variable-frame-rate video in ticks, repeated; their mean is TICKS_PER_FRAME.
VARIABLE_DURATIONS = (4, 4, 6, 2, 8, 3, 1, 4)


@dataclass(frozen=True, kw_only=True)
class FrameNumberVideo:
    """A video whose n-th frame shows the number `first_number` + n (`read_frame_number`).

    Attributes:
        width: display width, after rotation; likewise height. Odd sizes need a pixel format without chroma subsampling
            (yuv444p), or a codec that supports them (mpeg4, mjpeg).
        start_offset_s: presentation time of the first frame, rounded to a quarter of a frame.
        variable_rate: use the frame durations VARIABLE_DURATIONS; the mean frame rate is `fps`.
        rotation_degrees: 0, 90, 180 or 270 clockwise, stored in the display matrix; pictures are coded rotated back.
        open_gop: allow frames after a key frame to depend on the previous GOP (libx264 and libx265).
    """

    num_frames: int
    fps: Fraction
    width: int
    height: int
    codec: str = "libx264"
    pixel_format: str = "yuv420p"
    start_offset_s: float = 0.0
    variable_rate: bool = False
    rotation_degrees: int = 0
    open_gop: bool = False
    gop: int = 250
    first_number: int = 0

    def write(self, path: Path) -> None:
        """Encode the video and publish it."""
        turned = self.rotation_degrees in {90, 270}
        width, height = (self.height, self.width) if turned else (self.width, self.height)
        track = VideoTrack(
            fps=self.fps,
            width=width,
            height=height,
            codec=self.codec,
            pixel_format=self.pixel_format,
            options=_encoder_options(self.codec, gop=self.gop, open_gop=self.open_gop),
        )
        ticks = frame_ticks(
            self.num_frames, fps=self.fps, start_offset_s=self.start_offset_s, variable_rate=self.variable_rate
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with publish_atomically(path) as temporary:
            encode_video(temporary, track, pictures=self._pictures(), ticks=ticks, picture_format="gray")
            if self.rotation_degrees:
                set_rotation(temporary, degrees=self.rotation_degrees, width=width, height=height)

    def _pictures(self) -> Iterator[np.ndarray]:
        for number in range(self.first_number, self.first_number + self.num_frames):
            picture = draw_frame_number(number, width=self.width, height=self.height)
            yield np.ascontiguousarray(np.rot90(picture, self.rotation_degrees // 90))


def frame_times_s(
    num_frames: int, *, fps: Fraction, start_offset_s: float = 0.0, variable_rate: bool = False
) -> np.ndarray:
    """Return the presentation time of each frame in the file, float64[num_frames].

    Subtract the first value to obtain the times shown by a player.
    """
    ticks = frame_ticks(num_frames, fps=fps, start_offset_s=start_offset_s, variable_rate=variable_rate)
    return np.array([float(tick / (fps * TICKS_PER_FRAME)) for tick in ticks])


def frame_ticks(num_frames: int, *, fps: Fraction, start_offset_s: float, variable_rate: bool) -> list[int]:
    """Return the presentation timestamp of each frame in units of 1 / (TICKS_PER_FRAME x fps) seconds."""
    durations = VARIABLE_DURATIONS if variable_rate else (TICKS_PER_FRAME,)
    first = round(Fraction(start_offset_s) * fps * TICKS_PER_FRAME)
    return list(islice(accumulate(cycle(durations), initial=first), num_frames))


def _encoder_options(codec: str, *, gop: int, open_gop: bool) -> dict[str, str]:
    options = {"g": str(gop)}
    if codec in {"libx264", "libx265"}:
        parameters = f"open-gop={int(open_gop)}:scenecut=0:bframes=2"
        if codec == "libx265":
            parameters += ":log-level=error"
        options |= {"preset": "veryfast", "crf": "20", f"{codec.removeprefix('lib')}-params": parameters}
    return options
