"""The bytes of each segment read from the dataset's file by one `preadv` into a ring of buffers, in shuffled order.

What a loader would do that maps no files: an error of the file is then an error of the call. Nothing is verified; the
texts are copied as in `memcpy`.
"""

import os
from pathlib import Path

from benchmarks.latent_peers.memcpy import Memcpy, make
from benchmarks.latent_peers.segment_set import SEGMENT_BYTES, SegmentSet
from benchmarks.latent_peers.server import Batches, PeerLoader, serve


class Preadv(Memcpy):
    """One call per segment, and NumPy's gathering of the texts."""

    def __init__(self, segments: SegmentSet, batch: int) -> None:
        super().__init__(segments, batch)
        self._file = os.open(segments.latents.filename, os.O_RDONLY)  # type: ignore[attr-defined]
        rows = self._latents.view("u1").reshape(len(self._latents), batch, SEGMENT_BYTES)
        self._views = [[memoryview(row) for row in of_batch] for of_batch in rows]

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        ids, file, preadv = self._segments.shuffled(number), self._file, os.preadv
        sources = (self._segments.latents.offset + ids * SEGMENT_BYTES).tolist()  # type: ignore[attr-defined]
        for turn, begin in enumerate(range(0, len(ids), self._batch)):
            ring = turn % len(self._latents)
            chosen = ids[begin : begin + self._batch]
            for view, source in zip(self._views[ring], sources[begin : begin + self._batch], strict=False):
                preadv(file, [view], source)
            self._text[ring, : len(chosen)] = self._segments.text[self._segments.video_of_segment[chosen]]
            yield self._latents[ring, : len(chosen)], self._text[ring, : len(chosen)]


def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
    """Open the file and allocate the ring."""
    return Preadv(segments, batch)


if __name__ == "__main__":
    serve(make, open_loader)
