"""Independent player: decodes a source, and the frames of its chunks, without code of the product."""

import io
import json
import tarfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.torture.numbered_pictures import Reading, read_number
from tests.torture.source_files import Source


@dataclass(frozen=True)
class Showing:
    """Frames that a player shows, with their times.

    Attributes:
        begins_s: Start of each frame, in seconds from the start of the container.
        numbers: Number of each frame.
        end_s: End of the last frame in seconds.
        border_s: Maximum error of these times in seconds.
        ratio: Width of the first frame on the screen divided by its height.
    """

    begins_s: Sequence[float]
    numbers: Sequence[int]
    end_s: float
    border_s: float
    ratio: float

    def due(self, begin_s: float, end_s: float) -> set[int]:
        """Return the numbers of the frames that are shown at some time between `begin_s` and `end_s`."""
        first = max(0, bisect_right(self.begins_s, begin_s - self.border_s) - 1)
        last = max(first + 1, bisect_left(self.begins_s, end_s + self.border_s))
        return set(self.numbers[first:last])


def decode(path: Path, source: Source) -> Showing:
    """Decode a source with PyAV. Parts whose timestamps restart follow each other."""
    with av.open(str(path), metadata_errors="ignore") as container:
        start_s = Fraction(container.start_time or 0, av.time_base)
        videos = list(container.streams.video)
        stream = videos[1 if {"default-second", "still-first"} & source.options.keys() else 0]
        width, height = source.crop_and_turn(np.zeros((stream.height, stream.width, 1))).shape[1::-1]
        aspect = stream.sample_aspect_ratio or Fraction(1)
        aspect = 1 / aspect if source.options.get("turn", 0) % 180 else aspect
        begins_s: list[Fraction] = []
        numbers: list[int] = []
        shift_s, last_s, step_s = -start_s, None, 1 / source.fps
        for frame in container.decode(stream):
            number = read_number(source.crop_and_turn(_rgb(frame))).number
            unit = frame.time_base or Fraction(1)
            begin_s = begins_s[-1] - shift_s + step_s if frame.pts is None else frame.pts * unit
            if last_s is not None and begin_s <= last_s:  # the timestamps restart
                shift_s = begins_s[-1] + step_s - begin_s
            last_s = begin_s
            lasting_s = frame.duration * unit or step_s
            begins_s.append(begin_s + shift_s)
            numbers.append(number)
    if source.container == "mpg":
        begins_s = _correct_times(begins_s, numbers, source)
    end_s = begins_s[-1] + min(lasting_s, step_s)  # at most the mean duration, less if the container says so
    if "tail" in source.options:
        end_s = min(end_s, begins_s[0] + source.options["tail"])
    return Showing(
        [float(begin_s) for begin_s in begins_s],
        numbers,
        end_s=float(end_s),
        border_s=source.kind.tick_s + (0.03 + float(step_s) if "restart" in source.options else 0),
        ratio=float(Fraction(width, height) * aspect),
    )


def _correct_times(begins_s: list[Fraction], numbers: list[int], source: Source) -> list[Fraction]:
    """Return the frame times of a program stream, which has timestamps for only some frames.

    libav interpolates the other timestamps. Where the header of a picture is split across two packets, its result is
    one frame late: libav gives that picture the timestamp of the next one.
    """
    zero_s = begins_s[0] - source.begins_s[numbers[0]]
    drawn_s = [zero_s + source.begins_s[number] for number in numbers]
    return [
        drawn if 0 < (read - drawn) * source.fps < 1.5 else read for read, drawn in zip(begins_s, drawn_s, strict=True)
    ]


@dataclass(frozen=True)
class Chunk:
    """Chunk of a data folder.

    Attributes:
        about: Content of its json member.
        readings: Values read from each frame; sizes are measured on a screen with square pixels.
        sound: Audio samples; None if the chunk has no audio.
    """

    about: dict[str, Any]
    readings: list[Reading]
    sound: np.ndarray | None

    @property
    def begin_s(self) -> Fraction:
        return Fraction(*self.about["begin_s"])

    @property
    def end_s(self) -> Fraction:
        return Fraction(*self.about["end_s"])


def read_chunks(data: Path) -> list[Chunk]:
    """Return the chunks in the tars of a data folder, ordered by time."""
    members: dict[str, dict[str, bytes]] = {}
    for path in data.glob("video/*/*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                file = tar.extractfile(member)
                if file is not None:
                    members.setdefault(key, {})[extension] = file.read()
    chunks = [_chunk(json.loads(parts["json"]), parts["mp4"]) for parts in members.values() if "mp4" in parts]
    return sorted(chunks, key=lambda chunk: chunk.begin_s)


def _chunk(about: dict[str, Any], content: bytes) -> Chunk:
    with av.open(io.BytesIO(content), "r") as container:
        video = container.streams.video[0]
        readings = [read_number(_rgb(frame)) for frame in container.decode(video)]
        aspect = video.sample_aspect_ratio or Fraction(1)
    if aspect != 1:
        readings = [replace(reading, width=round(reading.width * aspect)) for reading in readings]
    sound = None
    with av.open(io.BytesIO(content), "r") as container:
        if container.streams.audio:
            frames = [frame.to_ndarray().mean(axis=0) for frame in container.decode(container.streams.audio[0])]
            sound = np.concatenate(frames) if frames else np.zeros(0)
    return Chunk(about, readings, sound)


def _rgb(frame: av.VideoFrame) -> np.ndarray:
    """Convert a frame to RGB with its own color matrix, as a player does, or with BT.601 if it has none."""
    space = 1 if frame.colorspace == 1 else 5
    return frame.to_ndarray(format="rgb24", src_colorspace=space)
