"""clipmill's LatentLoader on clipmill's columns, with its settings as they are by default."""

from pathlib import Path
from typing import Any

from benchmarks.latent_peers.contestant import Batches, NothingToClose, Way, serve
from benchmarks.latent_peers.latent_data import SPLIT, write_columns
from benchmarks.latent_peers.segment_set import SegmentSet


class OurLoader(NothingToClose):
    """Its batches go on without end, as in training: an epoch may end within one, whose rest begins the next."""

    def __init__(self, data: Path, batch: int) -> None:
        from train.data.latents.loader import LatentLoader

        loader = LatentLoader(data, split=SPLIT, batch=batch)
        self._num_segments, self._batches = len(loader), loader.batches(position=0)
        self._rest: tuple[Any, Any] | None = None

    def epoch(self, number: int) -> Batches:
        """As `Way.epoch`; the loader knows which epoch it is in."""
        left = self._num_segments
        while left:
            if self._rest is not None:
                latents, text = self._rest
                self._rest = None
            else:
                batch = next(self._batches).batch
                latents, text = batch["latents"], batch["text"]
            if latents.shape[0] > left:
                self._rest = latents[left:], text[left:]
                latents, text = latents[:left], text[:left]
            left -= latents.shape[0]
            yield latents, text


def make(segments: SegmentSet, folder: Path) -> None:
    """Writes the columns."""
    write_columns(folder, segments)


def open_way(folder: Path, segments: SegmentSet, batch: int) -> Way:
    """Opens the columns."""
    return OurLoader(folder, batch)


if __name__ == "__main__":
    serve(make, open_way)
