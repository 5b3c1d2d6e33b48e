"""Sources whose frames carry their number, and the source frames that each output frame may show."""

from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np

from clipmill.prep.synthetic import TICKS_PER_FRAME, FrameNumberVideo, frame_ticks, read_frame_number


def frame_times_s(
    num_frames: int, *, fps: Fraction, start_offset_s: float = 0.0, variable_rate: bool = False
) -> np.ndarray:
    """Return the presentation time of each frame in the file, float64[num_frames].

    Subtract the first value to obtain the times shown by a player.
    """
    ticks = frame_ticks(num_frames, fps=fps, start_offset_s=start_offset_s, variable_rate=variable_rate)
    return np.array([float(tick / (fps * TICKS_PER_FRAME)) for tick in ticks])


@dataclass(frozen=True)
class Source:
    """Source to be written.

    Attributes:
        tick_s: Resolution of the container's timestamps in seconds; a frame this near to the boundary between two
            output frames may belong to either of them.
    """

    name: str
    fps: Fraction = Fraction(30)
    num_frames: int = 0
    width: int = 160
    height: int = 120
    tick_s: float = 1e-6
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the video."""
        path = folder / self.name
        FrameNumberVideo(
            num_frames=self.num_frames, fps=self.fps, width=self.width, height=self.height, **self.options
        ).write(path)
        return path

    def times_s(self) -> np.ndarray:
        """Return the start times of the frames, in seconds from the start of the video."""
        times = {name: self.options[name] for name in ("start_offset_s", "variable_rate") if name in self.options}
        times_s = frame_times_s(self.num_frames, fps=self.fps, **times)
        return times_s - times_s[0]


def due_frames(times_s: np.ndarray, *, output_frame: int, fps: Fraction, tick_s: float) -> range:
    """Return the numbers of the source frames that an output frame may show.

    A source frame belongs to the output frame nearest to its time (a tie goes to the later one), and an output
    frame shows the last one that belongs to it or to an earlier one. So the shown frame is the last that begins
    less than half an output frame after the output frame's own time.
    """
    border_s = (output_frame + 0.5) / float(fps)
    surely = int(np.searchsorted(times_s, border_s - tick_s, side="left"))
    perhaps = int(np.searchsorted(times_s, border_s + tick_s, side="left"))
    return range(max(surely - 1, 0), max(perhaps, 1))


def frame_numbers(content: bytes) -> list[int]:
    """Decode the numbers in all frames of a chunk, in presentation order."""
    with av.open(BytesIO(content), "r") as container:
        return [read_frame_number(frame.to_ndarray(format="gray", threads=1)) for frame in container.decode(video=0)]
