"""Making a synthetic dataset: the video files, and the reading that is written to the manifest."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.adapters.annotations import TRAIN, VAL
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_atomically, remove_temporaries
from clipmill.prep.synthetic.encode import TICKS_PER_FRAME, VideoTrack, encode_video
from clipmill.prep.synthetic.frame_numbers import FrameNumberVideo
from clipmill.prep.synthetic.shapes import HEIGHT, WIDTH, Scene, draw_scenes, plan_scenes

LABELS = {f"label_{name}": pa.string() for name in ("colour", "shape", "motion")}
# Part of every file name: increment it when the same settings produce different pictures.
GENERATION = 2
# Several, because real collections mix frame rates.
FRAME_RATES = (Fraction(30), Fraction(30000, 1001), Fraction(25), Fraction(24))
VIDEOS_PER_VAL = 5  # every fifth video is in the split val
FRAME_NUMBER_CAPTION_S = 5.0


class Mode(StrEnum):
    """Content of the videos."""

    SHAPES = "shapes"
    FRAME_NUMBERS = "frame-numbers"


@dataclass(frozen=True)
class SyntheticVideo:
    """One video to make; its file name includes everything that its pixels depend on."""

    mode: Mode
    number: int
    seed: int
    duration_s: float

    @property
    def source_id(self) -> str:
        settings = f"{GENERATION} {self.mode.value} {self.seed} {self.duration_s}"
        return f"{self.mode.value}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}-{self.number:05d}"

    @property
    def fps(self) -> Fraction:
        return FRAME_RATES[self.number % len(FRAME_RATES)]

    @property
    def num_frames(self) -> int:
        return max(1, round(self.duration_s * self.fps))

    @property
    def split(self) -> str:
        return VAL if self.number % VIDEOS_PER_VAL == VIDEOS_PER_VAL - 1 else TRAIN

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
        """Encode the video and publish it as `path`."""
        if self.mode is Mode.FRAME_NUMBERS:
            FrameNumberVideo(num_frames=self.num_frames, fps=self.fps, width=WIDTH, height=HEIGHT).write(path)
            return
        with publish_atomically(path) as temporary:
            encode_video(
                temporary,
                VideoTrack(fps=self.fps, width=WIDTH, height=HEIGHT, options={"preset": "superfast", "crf": "23"}),
                pictures=draw_scenes(
                    self._scenes(), fps=self.fps, num_frames=self.num_frames, seed=self.seed * 100_003 + self.number
                ),
                ticks=range(0, self.num_frames * TICKS_PER_FRAME, TICKS_PER_FRAME),
                picture_format="yuv420p",
            )

    def _scenes(self) -> list[Scene]:
        number = self.number // VIDEOS_PER_VAL if self.split == VAL else self.number
        return plan_scenes(duration_s=self.duration_s, seed=self.seed, split=self.split, number=number)


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
    """Make the videos that do not exist yet, and read all of them as a dataset.

    Args:
        directory: folder for the files; it is created if missing.
        minutes: length of each video in minutes.
        on_video: called after each video with the number of videos that exist.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    videos = [SyntheticVideo(mode, number, seed, minutes * 60) for number in range(num_videos)]
    paths = [directory / f"{video.source_id}.mp4" for video in videos]
    with folder_lock(directory), ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        remove_temporaries(directory, of={path.name for path in paths}.__contains__)
        # An existing file is complete and has these settings: it was published atomically, and its name includes the
        # settings.
        made = [pool.submit(video.write, path) for video, path in zip(videos, paths, strict=True) if not path.exists()]
        num_done = num_videos - len(made)
        for future in as_completed(made):
            future.result()
            num_done += 1
            on_video(num_done)
    builder = ReadingBuilder(dataset, labels=LABELS if mode is Mode.SHAPES else None)
    for video, path in zip(videos, paths, strict=True):
        number = builder.add_video(video.source_id, path=path, split=video.split)
        if number is None:
            continue
        for row, (begin_s, end_s, text, labels) in enumerate(video.captions()):
            origin = Origin(path, "synthetic", row)
            builder.add_caption(number, text, origin, begin_s=begin_s, end_s=end_s, labels=labels)
    return builder.build()
