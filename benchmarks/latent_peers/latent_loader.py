"""Loader of latents of clipmill, on clipmill's columns, with the default settings.

With `--first-visits`, every epoch verifies the checksums of all records, as the first epoch of a process does. With
`--video`, the same segments are stored in the layout of a video VAE, with the channels before the frames.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.latent_peers.latent_data import SPLIT, write_columns
from benchmarks.latent_peers.segment_set import SegmentSet
from benchmarks.latent_peers.server import Batches, NothingToClose, PeerLoader, serve


class OurLoader(NothingToClose):
    """Loader of endless batches, as in training: an epoch may end in the middle of a batch."""

    def __init__(self, data: Path, batch: int) -> None:
        from clipmill.train.data.latents.segments import SegmentQuery
        from clipmill.train.data.loader import LoaderSettings
        from clipmill.train.data.producers.latent_segments import open_latent_segments

        self._loader = open_latent_segments(SegmentQuery(data, split=SPLIT, loading=LoaderSettings(batch=batch)))
        self._batches = self._loader.batches(position=0)
        self._rest: tuple[Any, Any] | None = None

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`. The loader counts the epochs."""
        left = len(self._loader)
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


class FirstVisits(OurLoader):
    """Loader that starts each epoch with all records unverified, without opening the columns again."""

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        self._loader.reader.__dict__.pop("segment_reader", None)
        self._batches, self._rest = self._loader.batches(position=number * len(self._loader)), None
        yield from super().epoch(number)


def main() -> None:
    """Respond to requests, with the loader that the command line selects."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-visits", action="store_true")
    parser.add_argument("--video", action="store_true")
    arguments = parser.parse_known_args()[0]
    kind = FirstVisits if arguments.first_visits else OurLoader

    def make(segments: SegmentSet, folder: Path) -> None:
        write_columns(folder, segments, is_video=arguments.video)

    def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
        return kind(folder, batch)

    serve(make, open_loader)


if __name__ == "__main__":
    main()
