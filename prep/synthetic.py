"""Synthetic videos: a dataset of moving shapes for demos, and videos whose pixels encode the frame number for tests.

PyAV encodes the videos in this process, so no ffmpeg program is needed. Each video is encoded with one thread, so that
its bytes are reproducible.

The index, seed, length and mode of a video determine its pixels and its file name. Files are published atomically, so
an existing file is complete, and is not encoded again; adding videos to a dataset leaves the others unchanged. Every
fifth video is in the split `val`. A video is a sequence of scenes of 3 to 6 s each; the last scene is longer if the
rest would be too short for a scene. Each scene has a caption, with colour, shape and motion as labels. The background
is plain and dark; its brightness and tint differ between videos.
"""

import hashlib
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cache
from itertools import accumulate, cycle, islice, product
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.manifests.adapters.annotations import TRAIN, VAL
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_atomically, remove_temporaries

# Timestamps are in quarters of a frame, so that variable frame rates are exact in the time base of the container.
TICKS_PER_FRAME = 4
_UNITY, _UNITY_W = 1 << 16, 1 << 30  # the number 1 in a display matrix: 16.16 and 2.30 fixed point


@dataclass(frozen=True, kw_only=True)
class VideoTrack:
    """Parameters of a video track: frame rate, coded resolution in pixels, and encoder."""

    fps: Fraction
    width: int
    height: int
    codec: str = "libx264"
    pixel_format: str = "yuv420p"
    options: Mapping[str, str] = field(default_factory=dict)


def encode_video(
    path: Path, track: VideoTrack, *, pictures: Iterable[np.ndarray], ticks: Iterable[int], picture_format: str
) -> None:
    """Write a file with one video track.

    Args:
        pictures: Picture of each frame.
        ticks: Presentation timestamp of each frame in units of 1 / (TICKS_PER_FRAME x fps) seconds, in ascending order.
        picture_format: FFmpeg pixel format of the pictures, such as gray or yuv420p.
    """
    import av

    # Use a single thread, so that the bytes do not depend on the machine. For small pictures, threads are not faster.
    with av.open(str(path), "w") as container:
        stream = container.add_stream(track.codec, rate=track.fps, options={"threads": "1", **track.options})
        if not isinstance(stream, av.VideoStream):
            raise ValueError(f"{track.codec!r} is not a video codec")
        stream.width, stream.height, stream.pix_fmt = track.width, track.height, track.pixel_format
        time_base = 1 / (track.fps * TICKS_PER_FRAME)
        stream.time_base = stream.codec_context.time_base = time_base
        for picture, tick in zip(pictures, ticks, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format=picture_format)
            frame.pts, frame.time_base = tick, time_base
            container.mux(stream.encode(frame.reformat(format=track.pixel_format, threads=1)))
        container.mux(stream.encode(None))


def set_rotation(path: Path, *, degrees: int, width: int, height: int) -> None:
    """Set the display matrix of the first track of an MP4 file, so that players rotate its pictures.

    The muxer has no option for this, so the matrix is written into the track header box (ISO 14496-12, 8.3.2).

    Args:
        degrees: Clockwise rotation: 90, 180 or 270.
        width, height: Coded resolution of the pictures in pixels.
    """
    matrices = {
        90: (0, _UNITY, 0, -_UNITY, 0, 0, height * _UNITY, 0, _UNITY_W),
        180: (-_UNITY, 0, 0, 0, -_UNITY, 0, width * _UNITY, height * _UNITY, _UNITY_W),
        270: (0, -_UNITY, 0, _UNITY, 0, 0, 0, width * _UNITY, _UNITY_W),
    }
    content = bytearray(path.read_bytes())
    box = content.index(b"tkhd") - 4
    if content[box + 8] != 0:
        raise ValueError(f"{path}: the track header has version {content[box + 8]} instead of 0")
    struct.pack_into(">9i", content, box + 48, *matrices[degrees])
    path.write_bytes(content)


WIDTH, HEIGHT = 320, 240
SHORTEST_SCENE_S, LONGEST_SCENE_S = 3.0, 6.0
SHAPES = ("circle", "square", "triangle", "cross")
# BT.601 limited range: Y, Cb, Cr.
COLOURS = {
    "red": (81, 90, 240),
    "green": (145, 54, 34),
    "blue": (41, 240, 110),
    "yellow": (210, 16, 146),
    "white": (235, 128, 128),
    "purple": (106, 202, 222),
}
# First and last position of the centre, as fractions of width and height; first and last radius, as fractions of
# height.
MOTIONS = {
    "moves to the left": ((0.85, 0.5), (0.15, 0.5), (0.17, 0.17)),
    "moves to the right": ((0.15, 0.5), (0.85, 0.5), (0.17, 0.17)),
    "moves up": ((0.5, 0.82), (0.5, 0.18), (0.17, 0.17)),
    "moves down": ((0.5, 0.18), (0.5, 0.82), (0.17, 0.17)),
    "grows": ((0.5, 0.5), (0.5, 0.5), (0.08, 0.42)),
    "shrinks": ((0.5, 0.5), (0.5, 0.5), (0.42, 0.08)),
}
COMBINATIONS = tuple(product(COLOURS, SHAPES, MOTIONS))


@dataclass(frozen=True)
class Scene:
    """A scene with one moving shape, shown from `begin_s` to `end_s` seconds."""

    begin_s: float
    end_s: float
    colour: str
    shape: str
    motion: str
    shift: tuple[float, float]  # offset of the complete path, as fractions of width and height

    @property
    def text(self) -> str:
        return f"a {self.colour} {self.shape} {self.motion}"

    @property
    def labels(self) -> dict[str, str]:
        return {"label_colour": self.colour, "label_shape": self.shape, "label_motion": self.motion}


def plan_scenes(*, duration_s: float, seed: int, split: str, index: int) -> list[Scene]:
    """Plan the scenes of a video.

    All videos of a split draw from a shuffled deck of all combinations of colour, shape and motion, so that few
    captions repeat before most combinations have occurred. The content of a video does not depend on the number of
    videos.

    Args:
        index: Index of the video in its split.
    """
    rng = random.Random(f"{seed} {split} {index}")
    max_scenes = int(duration_s / SHORTEST_SCENE_S) + 1
    scenes: list[Scene] = []
    begin_s = 0.0
    while begin_s < duration_s:
        end_s = round(begin_s + rng.uniform(SHORTEST_SCENE_S, LONGEST_SCENE_S), 2)
        if duration_s - end_s < SHORTEST_SCENE_S:
            end_s = duration_s
        deck, position = divmod(index * max_scenes + len(scenes), len(COMBINATIONS))
        order = list(COMBINATIONS)
        random.Random(f"{seed} {split} deck {deck}").shuffle(order)
        colour, shape, motion = order[position]
        shift = (rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1))
        scenes.append(Scene(begin_s, end_s, colour, shape, motion, shift))
        begin_s = end_s
    return scenes


def draw_scenes(scenes: list[Scene], *, fps: Fraction, num_frames: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the frames of a video in yuv420p, uint8 [HEIGHT * 3 / 2, WIDTH]."""
    # The background is uniform and dark, with a weak colour. Random texture would dominate the loss of a masked
    # autoencoder, because, unlike the texture of natural videos, it cannot be predicted from its surroundings.
    rng = np.random.default_rng(seed)
    background = np.empty((HEIGHT * 3 // 2, WIDTH), np.uint8)
    background[:HEIGHT] = rng.integers(50, 100)
    for plane in background[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2):
        plane[:] = rng.integers(122, 134)
    scene_index = 0
    for frame_index in range(num_frames):
        time_s = float(frame_index / fps)
        while time_s >= scenes[scene_index].end_s and scene_index + 1 < len(scenes):
            scene_index += 1
        frame = background.copy()
        _draw(frame, scenes[scene_index], time_s)
        yield frame


def _draw(frame: np.ndarray, scene: Scene, time_s: float) -> None:
    progress = (time_s - scene.begin_s) / (scene.end_s - scene.begin_s)
    (x0, y0), (x1, y1), (radius0, radius1) = MOTIONS[scene.motion]
    radius = HEIGHT * (radius0 + (radius1 - radius0) * progress)
    x = WIDTH * (x0 + (x1 - x0) * progress + scene.shift[0])
    y = HEIGHT * (y0 + (y1 - y0) * progress + scene.shift[1])
    # Align the bounding box of the shape to even pixels, because chroma has half the resolution.
    left, top = max(0, int(x - radius) & ~1), max(0, int(y - radius) & ~1)
    right, bottom = min(WIDTH, int(x + radius + 2) & ~1), min(HEIGHT, int(y + radius + 2) & ~1)
    if left >= right or top >= bottom:
        return
    dx, dy = np.arange(left, right)[None] - x, np.arange(top, bottom)[:, None] - y
    match scene.shape:
        case "circle":
            mask = dx * dx + dy * dy <= radius * radius
        case "square":
            mask = (abs(dx) <= 0.8 * radius) & (abs(dy) <= 0.8 * radius)
        case "triangle":
            mask = (dy <= 0.8 * radius) & (2 * abs(dx) <= dy + radius)
        case "cross":
            arm = 0.3 * radius
            mask = ((abs(dx) <= arm) & (abs(dy) <= radius)) | ((abs(dy) <= arm) & (abs(dx) <= radius))
        case _:
            raise ValueError(f"unknown shape {scene.shape!r}")
    luma, *chroma = COLOURS[scene.colour]
    frame[top:bottom, left:right][mask] = luma
    planes = frame[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2)
    for plane, level in zip(planes, chroma, strict=True):
        plane[top // 2 : bottom // 2, left // 2 : right // 2][mask[::2, ::2]] = level


LABELS = {f"label_{name}": pa.string() for name in ("colour", "shape", "motion")}
# The hash in every file name covers this number. Increment it when a code change affects the pictures.
GENERATION = 2
# Videos have different frame rates, as in real collections.
FRAME_RATES = (Fraction(30), Fraction(30000, 1001), Fraction(25), Fraction(24))
VIDEOS_PER_VAL = 5  # every fifth video is in the split val
FRAME_NUMBER_CAPTION_S = 5.0


class Mode(StrEnum):
    """Content of the videos."""

    SHAPES = "shapes"
    FRAME_NUMBERS = "frame-numbers"


@dataclass(frozen=True)
class SyntheticVideo:
    """A video of the dataset. Its source ID depends on everything that determines the pixels.

    Attributes:
        index: Index of the video in the dataset.
    """

    mode: Mode
    index: int
    seed: int
    duration_s: float

    @property
    def source_id(self) -> str:
        settings = f"{GENERATION} {self.mode.value} {self.seed} {self.duration_s}"
        return f"{self.mode.value}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}-{self.index:05d}"

    @property
    def fps(self) -> Fraction:
        return FRAME_RATES[self.index % len(FRAME_RATES)]

    @property
    def num_frames(self) -> int:
        return max(1, round(self.duration_s * self.fps))

    @property
    def split(self) -> str:
        return VAL if self.index % VIDEOS_PER_VAL == VIDEOS_PER_VAL - 1 else TRAIN

    def captions(self) -> list[tuple[float, float, str, dict[str, str]]]:
        """Return the captions as (begin_s, end_s, text, labels), in order and without gaps."""
        if self.mode is Mode.SHAPES:
            return [(scene.begin_s, scene.end_s, scene.text, scene.labels) for scene in self._scenes()]
        captions: list[tuple[float, float, str, dict[str, str]]] = []
        begin_s = 0.0
        while begin_s < self.duration_s:
            end_s = min(begin_s + FRAME_NUMBER_CAPTION_S, self.duration_s)
            first, last = (int(time_s * self.fps) for time_s in (begin_s, end_s))
            captions.append((begin_s, end_s, f"frame numbers from {first} to {max(first, last - 1)}", {}))
            begin_s = end_s
        return captions

    def write(self, path: Path) -> None:
        """Encode the video, and publish it as `path`."""
        if self.mode is Mode.FRAME_NUMBERS:
            FrameNumberVideo(num_frames=self.num_frames, fps=self.fps, width=WIDTH, height=HEIGHT).write(path)
            return
        with publish_atomically(path) as temporary:
            encode_video(
                temporary,
                VideoTrack(fps=self.fps, width=WIDTH, height=HEIGHT, options={"preset": "superfast", "crf": "23"}),
                pictures=draw_scenes(
                    self._scenes(), fps=self.fps, num_frames=self.num_frames, seed=self.seed * 100_003 + self.index
                ),
                ticks=range(0, self.num_frames * TICKS_PER_FRAME, TICKS_PER_FRAME),
                picture_format="yuv420p",
            )

    def _scenes(self) -> list[Scene]:
        index = self.index // VIDEOS_PER_VAL if self.split == VAL else self.index
        return plan_scenes(duration_s=self.duration_s, seed=self.seed, split=self.split, index=index)


def make_synthetic(
    directory: Path,
    *,
    num_videos: int,
    minutes: float,
    seed: int = 0,
    mode: Mode = Mode.SHAPES,
    dataset: str = "synthetic",
    on_video: Callable[[int], None] = lambda num_done: None,
) -> Reading:
    """Make the videos that do not exist yet; return all videos as a dataset.

    Args:
        directory: Folder of the files, which is created if it is missing.
        minutes: Length of each video in minutes.
        dataset: Name of the dataset.
        on_video: Function that is called after each video is made, with the number of videos that exist.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    videos = [SyntheticVideo(mode, index, seed, minutes * 60) for index in range(num_videos)]
    paths = [directory / f"{video.source_id}.mp4" for video in videos]
    with folder_lock(directory), ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        remove_temporaries(directory, matches={path.name for path in paths}.__contains__)
        # An existing file is complete, because it was published atomically, and has these settings, because its name
        # contains a hash of them.
        futures = [
            pool.submit(video.write, path) for video, path in zip(videos, paths, strict=True) if not path.exists()
        ]
        num_done = num_videos - len(futures)
        for future in as_completed(futures):
            future.result()
            num_done += 1
            on_video(num_done)
    builder = ReadingBuilder(dataset, labels=LABELS if mode is Mode.SHAPES else None)
    for video, path in zip(videos, paths, strict=True):
        video_index = builder.add_video(video.source_id, path=path, split=video.split)
        if video_index is None:
            continue
        for row, (begin_s, end_s, text, labels) in enumerate(video.captions()):
            origin = Origin(path, "synthetic", row)
            builder.add_caption(video_index, text, origin, begin_s=begin_s, end_s=end_s, labels=labels)
    return builder.build()


# Frame durations of a video with a variable frame rate, in ticks. The sequence repeats; its mean is TICKS_PER_FRAME.
VARIABLE_DURATIONS = (4, 4, 6, 2, 8, 3, 1, 4)


@dataclass(frozen=True, kw_only=True)
class FrameNumberVideo:
    """A video whose frame n shows the number `first_number` + n, which `read_frame_number` reads.

    The video can have the irregularities of real files: a start offset, a variable frame rate, rotation, and open GOPs.

    Attributes:
        width, height: Resolution after rotation in pixels. Odd values need a pixel format without chroma subsampling
            (yuv444p), or a codec that supports them (mpeg4, mjpeg).
        start_offset_s: Presentation time of the first frame in seconds, rounded to a quarter of a frame.
        variable_rate: True for the frame durations VARIABLE_DURATIONS. The mean frame rate is `fps`.
        rotation_degrees: Clockwise rotation in the display matrix: 0, 90, 180 or 270. The coded pictures are rotated in
            the opposite direction.
        open_gop: True for open GOPs, in which frames after a key frame may depend on the previous GOP (libx264 and
            libx265).
        gop: Number of frames in a GOP.
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
        is_transposed = self.rotation_degrees in {90, 270}
        width, height = (self.height, self.width) if is_transposed else (self.width, self.height)
        options = {"g": str(self.gop)}
        if self.codec in {"libx264", "libx265"}:
            parameters = f"open-gop={int(self.open_gop)}:scenecut=0:bframes=2"
            if self.codec == "libx265":
                parameters += ":log-level=error"
            options |= {"preset": "veryfast", "crf": "20", f"{self.codec.removeprefix('lib')}-params": parameters}
        track = VideoTrack(
            fps=self.fps,
            width=width,
            height=height,
            codec=self.codec,
            pixel_format=self.pixel_format,
            options=options,
        )
        ticks = frame_ticks(
            self.num_frames, fps=self.fps, start_offset_s=self.start_offset_s, variable_rate=self.variable_rate
        )
        numbers = range(self.first_number, self.first_number + self.num_frames)
        drawings = (draw_frame_number(number, width=self.width, height=self.height) for number in numbers)
        pictures = (np.ascontiguousarray(np.rot90(drawing, self.rotation_degrees // 90)) for drawing in drawings)
        path.parent.mkdir(parents=True, exist_ok=True)
        with publish_atomically(path) as temporary:
            encode_video(temporary, track, pictures=pictures, ticks=ticks, picture_format="gray")
            if self.rotation_degrees:
                set_rotation(temporary, degrees=self.rotation_degrees, width=width, height=height)


def frame_ticks(num_frames: int, *, fps: Fraction, start_offset_s: float, variable_rate: bool) -> list[int]:
    """Return the presentation timestamp of each frame in units of 1 / (TICKS_PER_FRAME x fps) seconds."""
    durations = VARIABLE_DURATIONS if variable_rate else (TICKS_PER_FRAME,)
    first = round(Fraction(start_offset_s) * fps * TICKS_PER_FRAME)
    return list(islice(accumulate(cycle(durations), initial=first), num_frames))


MAX_FRAME_NUMBER = (1 << 20) - 1
_COLUMNS, _ROWS = 8, 4
_CHECK_BITS = 12
_DARK_LIMIT, _LIGHT_LIMIT = 96, 160


def draw_frame_number(number: int, *, width: int, height: int) -> np.ndarray:
    """Draw a number as a picture that remains readable after scaling and compression.

    The picture is a grid of 8 x 4 black or white cells: 20 bits of the number and 12 bits of its CRC-32, row by row,
    most significant bit first. Each cell is read as the mean of its central region, so any resolution from about 32 x
    16 pixels works. Blending two frames produces grey cells, which `read_frame_number` rejects.

    Returns:
        Picture with values 0 and 255, uint8 [height, width].

    Raises:
        ValueError: `number` is not in [0, MAX_FRAME_NUMBER].
    """
    if not 0 <= number <= MAX_FRAME_NUMBER:
        raise ValueError(f"frame number {number} is not in [0, {MAX_FRAME_NUMBER}]")
    code = (number << _CHECK_BITS) | _check_bits(number)
    shifts = np.arange(_COLUMNS * _ROWS - 1, -1, -1)
    cells = (((code >> shifts) & 1) * 255).astype(np.uint8).reshape(_ROWS, _COLUMNS)
    rows = np.arange(height) * _ROWS // height
    columns = np.arange(width) * _COLUMNS // width
    return cells[rows][:, columns]


def read_frame_number(picture: np.ndarray) -> int:
    """Read the number in a picture of any resolution.

    Args:
        picture: Grey [H, W] or RGB [H, W, 3] picture with values from 0 to 255.

    Raises:
        ValueError: A cell is neither black nor white, or the check bits do not match.
    """
    grey = picture.astype(np.float32)
    if grey.ndim == 3:
        grey = grey.mean(axis=2)
    height, width = grey.shape
    # Two matrix products are ten times as fast as a mean for each region, which matters because tests read many frames.
    levels = _region_weights(_ROWS, height) @ grey @ _region_weights(_COLUMNS, width).T
    code = 0
    for cell, level in enumerate(levels.ravel().tolist()):
        if _DARK_LIMIT <= level <= _LIGHT_LIMIT:
            row, column = divmod(cell, _COLUMNS)
            raise ValueError(f"cell {row},{column} of the frame code has level {level:.0f}, neither black nor white")
        code = code << 1 | (level > _LIGHT_LIMIT)
    number = code >> _CHECK_BITS
    if code & ((1 << _CHECK_BITS) - 1) != _check_bits(number):
        raise ValueError(f"the frame code is {number}, but its check bits do not match")
    return number


@cache
def _region_weights(num_cells: int, length: int) -> np.ndarray:
    """Return the weight of each pixel in the mean over the centre of each cell, float32 [num_cells, length]."""
    weights = np.zeros((num_cells, length), np.float32)
    for index in range(num_cells):
        first, last = index * length / num_cells, (index + 1) * length / num_cells
        quarter = (last - first) / 4
        start = int(first + quarter)
        end = max(int(last - quarter), start + 1)
        weights[index, start:end] = 1 / (end - start)
    return weights


def _check_bits(number: int) -> int:
    return zlib.crc32(number.to_bytes(4, "big")) & ((1 << _CHECK_BITS) - 1)
