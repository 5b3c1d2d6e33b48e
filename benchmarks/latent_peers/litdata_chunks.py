"""litdata: its chunks, shuffling and data loader, without worker processes."""

import os
from pathlib import Path
from typing import Any

from benchmarks.latent_peers.segment_set import SegmentSet, open_segment_set
from benchmarks.latent_peers.server import Batches, NothingToClose, PeerLoader, serve


class LitdataChunks(NothingToClose):
    """StreamingDataLoader. Every pass over it is an epoch with a new order."""

    def __init__(self, folder: Path, batch: int) -> None:
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(folder), shuffle=True, drop_last=False)
        self._loader = StreamingDataLoader(dataset, batch_size=batch, num_workers=0)

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        for batch in self._loader:
            yield batch["latents"], batch["text"]


class Sample:
    """Function that returns a segment. litdata calls it in a separate process."""

    def __init__(self, set_folder: Path) -> None:
        self._set_folder = set_folder
        self._segments: SegmentSet | None = None

    def __call__(self, segment: int) -> dict[str, Any]:
        import torch

        self._segments = self._segments or open_segment_set(self._set_folder)
        text = self._segments.text[self._segments.video_of_segment[segment]]
        return {"latents": torch.tensor(self._segments.latents[segment]), "text": torch.tensor(text)}


def make(segments: SegmentSet, folder: Path) -> None:
    """Write chunks of 64 MB, which is litdata's default."""
    from litdata import optimize

    set_folder = Path(segments.latents.filename).parent  # type: ignore[attr-defined]
    optimize(
        fn=Sample(set_folder),
        inputs=list(range(len(segments))),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
    )


def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
    """Open the chunks."""
    return LitdataChunks(folder, batch)


if __name__ == "__main__":
    os.environ.setdefault("DO_NOT_TRACK", "1")
    serve(make, open_loader)
