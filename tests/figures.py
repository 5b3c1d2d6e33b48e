"""Figures of pages, encoded once: tests evaluate many runs on the same few clips.

The images and small clips of a result took a quarter of the time of an evaluation.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.shards.pages.figures import jpeg_uri, small_clip

if TYPE_CHECKING:
    import av


@contextmanager
def encoded_once() -> Iterator[None]:
    """Meanwhile, return the same images and clips for the same pixels, to the pages of evaluations."""
    images: dict[object, str] = {}
    clips: dict[object, bytes] = {}

    def encode_image(frame: NDArray[np.uint8]) -> str:
        key = frame.shape, hashlib.sha256(frame.tobytes()).digest()
        if key not in images:
            images[key] = jpeg_uri(frame)
        return images[key]

    def encode_clip(frames: "Iterable[av.VideoFrame]", *, fps: Fraction) -> bytes:
        frames, pixels = list(frames), hashlib.sha256()
        for frame in frames:
            pixels.update(frame.to_ndarray().tobytes())
        shapes = tuple((frame.width, frame.height, frame.format.name) for frame in frames)
        key: Any = fps, shapes, pixels.digest()
        if key not in clips:
            clips[key] = small_clip(frames, fps=fps)
        return clips[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.train.evaluation.player.jpeg_uri", encode_image)
        patch.setattr("clipmill.train.evaluation.player.small_clip", encode_clip)
        yield
