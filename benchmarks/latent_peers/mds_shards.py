"""mosaicml-streaming: local MDS shards, the library's shuffling, and torch's data loader without worker processes."""

from pathlib import Path

from benchmarks.latent_peers.segment_set import SEGMENT_SHAPE, TEXT_WIDTH, SegmentSet
from benchmarks.latent_peers.server import Batches, NothingToClose, PeerLoader, serve

COLUMNS = {
    "latents": f"ndarray:float16:{','.join(map(str, SEGMENT_SHAPE))}",
    "text": f"ndarray:float16:{TEXT_WIDTH}",
}


class MdsShards(NothingToClose):
    """DataLoader over a StreamingDataset. Every pass over it is an epoch with a new order."""

    def __init__(self, folder: Path, batch: int) -> None:
        from streaming import StreamingDataset
        from torch.utils.data import DataLoader

        dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=batch)
        self._loader = DataLoader(dataset, batch_size=batch, num_workers=0)

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        for batch in self._loader:
            yield batch["latents"], batch["text"]


def make(segments: SegmentSet, folder: Path) -> None:
    """Write shards of 64 MB, which is the library's default."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=COLUMNS) as writer:
        for segment in range(len(segments)):
            text = segments.text[segments.video_of_segment[segment]]
            writer.write({"latents": segments.latents[segment], "text": text})


def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
    """Open the shards, after removing data that a killed process left in shared memory."""
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return MdsShards(folder, batch)


if __name__ == "__main__":
    serve(make, open_loader)
