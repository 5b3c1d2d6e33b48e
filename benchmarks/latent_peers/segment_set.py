"""The set that every way loads: segments of latents, one text embedding a video, and which video a segment is of.

It follows the set that the first loader of this kind was measured on: 5000 segments of 20 x 4 x 32 x 32 float16, 100
videos, 512 numbers of text. It lies in a folder as three `.npy` files, from which each way makes its own format. Needs
NumPy only, because the other ways' Python has no clipmill.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEGMENT_SHAPE = (20, 4, 32, 32)
SEGMENT_BYTES = 2 * 20 * 4 * 32 * 32
TEXT_WIDTH = 512
VALUES = ("normal", "ar1")
_LATENTS_FILE, _TEXT_FILE, _VIDEOS_FILE = "latents.npy", "text.npy", "video_of_segment.npy"
_AR1 = 0.9  # correlation of a value with the one at its place in the frame before


@dataclass(frozen=True)
class SegmentSet:
    """The set, mapped from its files.

    Attributes:
        latents: float16 [segments, *SEGMENT_SHAPE]; segments of a video are adjacent, in their order.
        text: float16 [videos, TEXT_WIDTH], rows of unit length.
        video_of_segment: int64 [segments].
    """

    latents: np.ndarray
    text: np.ndarray
    video_of_segment: np.ndarray

    def __len__(self) -> int:
        return len(self.latents)

    def shuffled(self, epoch: int) -> np.ndarray:
        """The segments in the order of an epoch, for ways that have no order of their own."""
        return np.random.default_rng(epoch).permutation(len(self))


def make_segment_set(folder: Path, *, num_segments: int, num_videos: int, values: str) -> None:
    """Writes the set's files; videos have equal numbers of segments, give or take one.

    Args:
        values: `normal`, or `ar1`: normal too, but each frame is like the one before it.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    latents = np.lib.format.open_memmap(
        folder / _LATENTS_FILE, mode="w+", dtype=np.float16, shape=(num_segments, *SEGMENT_SHAPE)
    )
    for segment in range(num_segments):
        drawn = random.standard_normal(SEGMENT_SHAPE, dtype=np.float32)
        if values == "ar1":
            for frame in range(1, SEGMENT_SHAPE[0]):
                drawn[frame] = _AR1 * drawn[frame - 1] + (1 - _AR1**2) ** 0.5 * drawn[frame]
        latents[segment] = drawn
    latents.flush()
    text = random.standard_normal((num_videos, TEXT_WIDTH), dtype=np.float32)
    np.save(folder / _TEXT_FILE, (text / np.linalg.norm(text, axis=1, keepdims=True)).astype(np.float16))
    np.save(folder / _VIDEOS_FILE, np.arange(num_segments) * num_videos // num_segments)


def open_segment_set(folder: Path) -> SegmentSet:
    """Maps the latents, reads the rest."""
    return SegmentSet(
        latents=np.load(folder / _LATENTS_FILE, mmap_mode="r"),
        text=np.load(folder / _TEXT_FILE),
        video_of_segment=np.load(folder / _VIDEOS_FILE),
    )


def digest(batches: Iterable[tuple[Any, Any]]) -> tuple[int, str]:
    """How many different segments the batches hold, and a digest of their bytes, whatever their order.

    Each segment is hashed together with its text embedding, so that a wrong map from segments to videos shows.
    """
    digests: set[int] = set()
    for latents, text in batches:
        for segment, embedding in zip(np.asarray(latents), np.asarray(text), strict=True):
            if segment.shape != SEGMENT_SHAPE or segment.dtype != np.float16 or embedding.dtype != np.float16:
                raise ValueError(f"a segment of {segment.dtype} {segment.shape}, text of {embedding.dtype}")
            whole = hashlib.blake2b(np.ascontiguousarray(segment).data, digest_size=8)
            whole.update(np.ascontiguousarray(embedding).data)
            digests.add(int.from_bytes(whole.digest(), "little"))
    return len(digests), f"{sum(digests) % 2**64:016x}"
