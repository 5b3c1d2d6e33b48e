"""Videos of scenes with known cuts, whose frames carry their number in a corner, and functions that chunk them."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.prep.synthetic import (
    VideoTrack,
    draw_frame_number,
    encode_video,
    frame_ticks,
    read_frame_number,
    set_rotation,
)
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.ffmpeg import find_ffmpeg
from tests.prep.here import Here
from tests.prep.running import prep_here

WIDTH, HEIGHT = 160, 120
_CODE_WIDTH, _CODE_HEIGHT = 80, 40
SETTINGS = ("--cut", "shots", "--detector", "content", "--len", "2s", "--min-len", "1s", "--min-scene-len", "500ms")
QUICK = ("--preset", "ultrafast", "--short-side", "96")
RECIPE = resolve(
    Recipe(cut="shots", detector="content", len="2s", min_len="1s", preset="ultrafast", short_side=96),
    ffmpeg_version=find_ffmpeg().version,
)
_COLOURS = ((240, 60, 60), (10, 10, 60), (60, 230, 60), (50, 10, 50))  # alternately light and dark


def scene_pictures(scenes: list[int]) -> np.ndarray:
    """Return the frames of scenes in one plain colour each; `scenes` are numbers of frames.

    The array is uint8 [frames, HEIGHT, WIDTH, 3], RGB.
    """
    pictures = np.empty((sum(scenes), HEIGHT, WIDTH, 3), np.uint8)
    first = 0
    for scene, frames in enumerate(scenes):
        pictures[first : first + frames] = _COLOURS[scene % len(_COLOURS)]
        first += frames
    for number, picture in enumerate(pictures):
        picture[:_CODE_HEIGHT, :_CODE_WIDTH] = draw_frame_number(number, width=_CODE_WIDTH, height=_CODE_HEIGHT)[
            :, :, None
        ]
    return pictures


def write_scenes(
    path: Path,
    scenes: list[int],
    *,
    fps: Fraction = Fraction(30),
    start_offset_s: float = 0.0,
    variable_rate: bool = False,
    rotation_degrees: int = 0,
) -> Path:
    """Write a video of scenes with `scenes` frames each; a turned video is 120 pixels wide."""
    pictures = scene_pictures(scenes)
    turned = [np.ascontiguousarray(np.rot90(picture, rotation_degrees // 90)) for picture in pictures]
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = turned[0].shape[:2]
    encode_video(
        path,
        VideoTrack(fps=fps, width=width, height=height, options={"preset": "ultrafast", "crf": "20", "g": "50"}),
        pictures=turned,
        ticks=frame_ticks(len(pictures), fps=fps, start_offset_s=start_offset_s, variable_rate=variable_rate),
        picture_format="rgb24",
    )
    if rotation_degrees:
        set_rotation(path, degrees=rotation_degrees, width=width, height=height)
    return path


def scene_number(picture: np.ndarray) -> int:
    """Return the number in a decoded frame, gray [H, W] at any resolution."""
    height, width = picture.shape
    return read_frame_number(picture[: round(height * _CODE_HEIGHT / HEIGHT), : round(width * _CODE_WIDTH / WIDTH)])


def run_here(data: Path, *settings: str) -> dict[str, Any]:
    """Run `prep chunk --json` without workers; return its summary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.prep.engines.choice.open_engine", lambda *names, **given: Here())
        return prep_here("chunk", "--data", data, "--json", *SETTINGS, *QUICK, *settings).summary
