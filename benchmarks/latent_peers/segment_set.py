"""The dataset that every loader reads: segments of latents, the video of each segment, and a text embedding per video.

The dataset has the dimensions with which the predecessor of clipmill's loader was measured: 5000 segments of
20 x 4 x 32 x 32 float16, 100 videos, text embeddings of width 512. It is stored as three `.npy` files in a folder, from
which each loader creates its format. This module needs only NumPy, because clipmill is not installed in the environment
of `make peers`.
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
_AR1 = 0.9  # correlation of a value with the value at the same position in the previous frame


@dataclass(frozen=True)
class SegmentSet:
    """Dataset, memory-mapped from its files.

    Attributes:
        latents: Latents, float16 [segments, *SEGMENT_SHAPE]. The segments of a video are adjacent and in order.
        text: Text embeddings of unit length, float16 [videos, TEXT_WIDTH].
        video_of_segment: Index of the video of each segment, int64 [segments].
    """

    latents: np.ndarray
    text: np.ndarray
    video_of_segment: np.ndarray

    def __len__(self) -> int:
        return len(self.latents)

    def shuffled(self, epoch: int) -> np.ndarray:
        """Return the order of the segments in an epoch, for loaders that do not shuffle."""
        return np.random.default_rng(epoch).permutation(len(self))


def make_segment_set(folder: Path, *, num_segments: int, num_videos: int, values: str) -> None:
    """Write the files of the dataset. The numbers of segments per video differ by at most one.

    Args:
        values: `normal`: independent frames; `ar1`: normally distributed too, but with correlated successive frames.
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
    """Open the dataset: map the latents into memory, and read the other arrays."""
    return SegmentSet(
        latents=np.load(folder / _LATENTS_FILE, mmap_mode="r"),
        text=np.load(folder / _TEXT_FILE),
        video_of_segment=np.load(folder / _VIDEOS_FILE),
    )


def digest(batches: Iterable[tuple[Any, Any]]) -> tuple[int, str]:
    """Return the number of distinct segments in the batches, and a digest of their bytes that ignores their order.

    Each segment is hashed together with its text embedding, so that a wrong mapping from segments to videos is
    detected.
    """
    digests: set[int] = set()
    for latents, text in batches:
        for segment, embedding in zip(np.asarray(latents), np.asarray(text), strict=True):
            if segment.shape != SEGMENT_SHAPE or segment.dtype != np.float16 or embedding.dtype != np.float16:
                raise ValueError(f"unexpected segment {segment.dtype} {segment.shape} or text {embedding.dtype}")
            whole = hashlib.blake2b(np.ascontiguousarray(segment).data, digest_size=8)
            whole.update(np.ascontiguousarray(embedding).data)
            digests.add(int.from_bytes(whole.digest(), "little"))
    return len(digests), f"{sum(digests) % 2**64:016x}"
