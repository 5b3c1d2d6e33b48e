"""webdataset on ten tars with one sample per segment, without worker processes.

The library shuffles the tars, and the segments in a buffer of 300, and decodes and batches them.
"""

from pathlib import Path

from benchmarks.latent_peers.segment_set import SegmentSet
from benchmarks.latent_peers.server import Batches, NothingToClose, PeerLoader, serve

NUM_TARS = 10
SHUFFLE_BUFFER = 300


class TarWebdataset(NothingToClose):
    """Loader with a new pipeline for each epoch."""

    def __init__(self, folder: Path, batch: int) -> None:
        self._tars, self._batch = sorted(str(path) for path in folder.iterdir()), batch

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        import webdataset

        dataset = webdataset.WebDataset(
            self._tars, shardshuffle=NUM_TARS, nodesplitter=webdataset.single_node_only, seed=number
        )
        yield from dataset.shuffle(SHUFFLE_BUFFER).decode().to_tuple("latents.npy", "text.npy").batched(self._batch)


def make(segments: SegmentSet, folder: Path) -> None:
    """Write the tars."""
    import webdataset

    folder.mkdir()
    size = -(-len(segments) // NUM_TARS)
    for number, begin in enumerate(range(0, len(segments), size)):
        with webdataset.TarWriter(str(folder / f"{number:06d}.tar")) as writer:
            for segment in range(begin, min(begin + size, len(segments))):
                text = segments.text[segments.video_of_segment[segment]]
                members = {"latents.npy": segments.latents[segment], "text.npy": text}
                writer.write({"__key__": f"{segment:09d}", **members})


def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
    """List the tars."""
    import webdataset  # noqa: F401 - import it now, so that the first epoch does not include the import

    return TarWebdataset(folder, batch)


if __name__ == "__main__":
    serve(make, open_loader)
