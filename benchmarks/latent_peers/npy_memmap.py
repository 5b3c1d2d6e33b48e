"""Memory-mapped `.npy` file: NumPy gathers each batch into a new array, by segment indices."""

from pathlib import Path

import numpy as np

from benchmarks.latent_peers.segment_set import SegmentSet
from benchmarks.latent_peers.server import Batches, NothingToClose, PeerLoader, serve


class NpyMemmap(NothingToClose):
    """Loader of batches with `latents[ids]`."""

    def __init__(self, segments: SegmentSet, batch: int) -> None:
        self._segments, self._batch = segments, batch

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        source, segments = np.asarray(self._segments.latents), self._segments
        ids = segments.shuffled(number)
        for begin in range(0, len(ids), self._batch):
            chosen = ids[begin : begin + self._batch]
            yield source[chosen], segments.text[segments.video_of_segment[chosen]]


def make(segments: SegmentSet, folder: Path) -> None:
    """Do nothing: the dataset is already such a file."""


def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
    """Memory-map the file."""
    return NpyMemmap(segments, batch)


if __name__ == "__main__":
    serve(make, open_loader)
