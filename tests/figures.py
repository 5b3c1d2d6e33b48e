"""Figures of pages, encoded once: tests evaluate many runs on the same few clips.

The pictures and small clips of a result took a quarter of the time of an evaluation.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.shards.pages import figures

if TYPE_CHECKING:
    import av


@contextmanager
def encoded_once() -> Iterator[None]:
    """Meanwhile, return the same bytes for the same pixels."""
    encode_picture, encode_clip = figures._encode_picture, figures.small_clip
    known: dict[object, bytes] = {}

    def remember(key: object, encode: Callable[[], bytes]) -> bytes:
        if key not in known:
            known[key] = encode()
        return known[key]

    def picture(frame: NDArray[np.uint8], *, codec: Any, **options: Any) -> bytes:
        digest = hashlib.blake2b(np.ascontiguousarray(frame), digest_size=16).digest()
        return remember((frame.shape, codec, digest), lambda: encode_picture(frame, codec=codec, **options))

    def small_clip(frames: "Iterable[av.VideoFrame]", *, fps: Fraction) -> bytes:
        frames, pixels = list(frames), hashlib.blake2b(digest_size=16)
        for frame in frames:
            pixels.update(np.ascontiguousarray(frame.to_ndarray()))
        sizes = tuple((frame.width, frame.height, frame.format.name) for frame in frames)
        return remember((fps, sizes, pixels.digest()), lambda: encode_clip(frames, fps=fps))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_encode_picture", picture)
        patch.setattr("clipmill.train.evaluation.player.small_clip", small_clip)
        yield
