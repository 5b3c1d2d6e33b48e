"""Clips with known scores, as chunks of one data folder, and scores made in this process."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.prep.core.run import Summary
from clipmill.prep.scores.column import COLUMN
from clipmill.shards.columns import SCORES
from clipmill.shards.reader import Variant
from tests.prep.here import make_here
from tests.prep.running import chunk, manifest

FPS = 30
WIDTH, HEIGHT = 256, 144
PIXELS_PER_FRAME = 2  # speed of moving objects
SPEED = PIXELS_PER_FRAME * FPS / HEIGHT  # in frame heights per second
SIDE = 64  # side length of the moving square in pixels
CUTS = (7, 50, 97)  # first frames of new shots
RATE_HZ = 48_000
LEN = ("--len", "4s", "--preset", "ultrafast", "--short-side", HEIGHT, "--audio", "keep", "--crf", 18)
Picture = NDArray[np.uint8]


def make(data: Path, **settings: Any) -> Summary:
    """Make the scores of `data`."""
    return make_here(COLUMN, data, **settings)


def rows_of(data: Path) -> dict[str, dict[str, Any]]:
    """Return the index rows of the scores by key."""
    shards = Variant.open(data, column=SCORES).shards()
    return {row["key"]: row for shard in shards for row in shard.index.to_pylist()}


def texture(seed: int, *, width: int = 1024, height: int = HEIGHT, blur: float = 3) -> Picture:
    """Draw gray noise with details of about `blur` pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width)).astype(np.float32)
    smooth = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), blur), noise, 20, 235, cv2.NORM_MINMAX)
    return np.repeat(smooth.astype(np.uint8)[..., None], 3, axis=2)


def pan_pictures(frames: range, *, seed: int = 0, blur: float = 3) -> list[Picture]:
    """Draw a camera pan over a texture."""
    wide = texture(seed, blur=blur)
    return [wide[:, PIXELS_PER_FRAME * frame : PIXELS_PER_FRAME * frame + WIDTH] for frame in frames]


def _object() -> list[Picture]:
    pictures = []
    square = texture(5, width=SIDE, height=SIDE, blur=2)
    for frame in range(60):  # after 4 s, the square would leave the frame
        picture = texture(1, width=WIDTH).copy()
        picture[40 : 40 + SIDE, 10 + PIXELS_PER_FRAME * frame :][:, :SIDE] = square
        pictures.append(picture)
    return pictures


def _shots() -> list[Picture]:
    colours = ((200, 60, 40), (40, 180, 60), (60, 60, 200), (210, 200, 60))
    borders = (0, *CUTS, 123)
    return [
        picture
        for seed, (colour, begin, end) in enumerate(zip(colours, borders[:-1], borders[1:], strict=True))
        for picture in [(texture(seed, width=WIDTH) / 255 * colour).astype(np.uint8)] * (end - begin)
    ]


def _letterbox_pictures() -> list[Picture]:
    pictures = [picture.copy() for picture in pan_pictures(range(60), seed=2)]
    for picture in pictures:
        picture[:18], picture[-18:] = 0, 0
    return pictures


def _clips() -> dict[str, list[Picture]]:
    black = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    grey = np.full((HEIGHT, WIDTH, 3), 128, np.uint8)
    moving = pan_pictures(range(60), seed=3)
    return {
        "pan": pan_pictures(range(121)),  # and a chunk of one frame
        "blurred": pan_pictures(range(60), blur=8),
        "object": _object(),
        "shots": _shots(),  # and a chunk of three frames
        "dark": [black] * 45 + pan_pictures(range(75), seed=4),
        "allblack": [black] * 30,
        "frozen": [*moving, *([moving[-1]] * 60)],
        "letterbox": _letterbox_pictures(),
        "grey": [grey] * 60,
    }


def voice(seconds: float) -> NDArray[np.float64]:
    """Synthesise a vowel with four syllables per second: pulses of 120 Hz with energy around 700 and 1,200 Hz."""
    time_s = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    harmonics = np.arange(1, 30)[:, None] * 120.0
    strength = np.exp(-(((harmonics - 700) / 250) ** 2)) + 0.6 * np.exp(-(((harmonics - 1200) / 250) ** 2)) + 0.02
    sound = (strength * np.sin(2 * np.pi * harmonics * time_s)).sum(axis=0)
    return 0.4 * sound / np.abs(sound).max() * (np.sin(2 * np.pi * 4 * time_s) > -0.3)


def sounds() -> dict[str, NDArray[np.float64]]:
    """Return two seconds of each audio signal by name."""
    time_s = np.arange(2 * RATE_HZ) / RATE_HZ
    return {
        "silence": np.zeros(len(time_s)),
        "tone": 0.3 * np.sin(2 * np.pi * 440 * time_s),
        "noise": 0.1 * np.random.default_rng(0).standard_normal(len(time_s)),
        "vowel": voice(2),
    }


def write_clip(path: Path, pictures: list[Picture], *, sound: NDArray[np.float64] | None = None) -> None:
    """Write images [H, W, 3] at 30 frames per second, nearly lossless, with mono audio."""
    height, width = pictures[0].shape[:2]
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=FPS, options={"crf": "8", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        audio = None if sound is None else container.add_stream("aac", rate=RATE_HZ, layout="mono")
        for picture in pictures:
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(video.encode(None))
        if audio is not None and sound is not None:
            samples = (np.clip(sound, -1, 1) * 32767).astype(np.int16)[None]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, 0, Fraction(1, RATE_HZ)
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data folder with the chunks of all clips and their scores."""
    folder = tmp_path_factory.mktemp("clips")
    videos, data = folder / "videos", folder / "data"
    videos.mkdir()
    for name, pictures in _clips().items():
        write_clip(videos / f"{name}.mp4", pictures)
    for name, sound in sounds().items():
        write_clip(videos / f"{name}.mp4", pan_pictures(range(30)), sound=sound[:RATE_HZ] if name == "tone" else sound)
    manifest(data, videos)
    chunk(data, *LEN)
    make(data)
    return data


@pytest.fixture(scope="session")
def scores_by_key(clips: Path) -> dict[str, dict[str, Any]]:
    """Return the scores of the clips' chunks by key."""
    return rows_of(clips)
