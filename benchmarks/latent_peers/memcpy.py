"""Lower bound: memcpy of the C library copies the same bytes into a ring of buffers, by segment in shuffled order.

The source is the memory-mapped dataset with all pages in memory, and one thread copies it. The ring has as many buffers
as the ring of the LatentLoader, so that both benefit equally from CPU caches.
"""

import ctypes
from pathlib import Path

import numpy as np

from benchmarks.latent_peers.segment_set import SEGMENT_BYTES, SEGMENT_SHAPE, TEXT_WIDTH, SegmentSet
from benchmarks.latent_peers.server import Batches, NothingToClose, PeerLoader, serve

RING_BATCHES = 2
_TEXT_BYTES = 2 * TEXT_WIDTH


class Memcpy(NothingToClose):
    """Loader with one call of memcpy per segment, and one for its text."""

    def __init__(self, segments: SegmentSet, batch: int) -> None:
        self._segments, self._batch = segments, batch
        self._latents = np.empty((RING_BATCHES, batch, *SEGMENT_SHAPE), np.float16)
        self._text = np.empty((RING_BATCHES, batch, TEXT_WIDTH), np.float16)

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        memcpy = ctypes.CDLL(None).memcpy
        memcpy.argtypes, memcpy.restype = [ctypes.c_size_t] * 3, None
        ids = self._segments.shuffled(number)
        sources = (address_of(self._segments.latents) + ids * SEGMENT_BYTES).tolist()
        videos = self._segments.video_of_segment[ids]
        text_sources = (address_of(self._segments.text) + videos * _TEXT_BYTES).tolist()
        for turn, begin in enumerate(range(0, len(ids), self._batch)):
            latents, text = self._latents[turn % RING_BATCHES], self._text[turn % RING_BATCHES]
            size = min(self._batch, len(ids) - begin)
            target, text_target = address_of(latents), address_of(text)
            for place in range(begin, begin + size):
                memcpy(target, sources[place], SEGMENT_BYTES)
                memcpy(text_target, text_sources[place], _TEXT_BYTES)
                target += SEGMENT_BYTES
                text_target += _TEXT_BYTES
            yield latents[:size], text[:size]


def address_of(array: np.ndarray) -> int:
    """Return the address of the first byte of an array."""
    return array.__array_interface__["data"][0]


def make(segments: SegmentSet, folder: Path) -> None:
    """Do nothing: the file of the dataset is the source."""


def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
    """Allocate the ring of buffers."""
    return Memcpy(segments, batch)


if __name__ == "__main__":
    serve(make, open_loader)
