"""clipmill's LatentLoader on clipmill's columns, with its settings as they are by default."""

from pathlib import Path

from benchmarks.latent_peers.contestant import Batches, NothingToClose, Way, serve
from benchmarks.latent_peers.latent_data import SPLIT, write_columns
from benchmarks.latent_peers.segment_set import SegmentSet


class OurLoader(NothingToClose):
    """Its batches have no end, so an epoch ends within one: what belongs to the next is cut off."""

    def __init__(self, data: Path, batch: int) -> None:
        from train.data.latents.loader import LatentLoader

        self._loader, self._batch = LatentLoader(data, split=SPLIT, batch=batch), batch

    def epoch(self, number: int) -> Batches:
        """As `Way.epoch`."""
        left = len(self._loader)
        for loaded in self._loader.batches(position=number * left):
            latents, text = loaded.batch["latents"], loaded.batch["text"]
            if left <= self._batch:
                yield latents[:left], text[:left]
                return
            yield latents, text
            left -= self._batch


def make(segments: SegmentSet, folder: Path) -> None:
    """Writes the columns."""
    write_columns(folder, segments)


def open_way(folder: Path, segments: SegmentSet, batch: int) -> Way:
    """Opens the columns."""
    return OurLoader(folder, batch)


if __name__ == "__main__":
    serve(make, open_way)
