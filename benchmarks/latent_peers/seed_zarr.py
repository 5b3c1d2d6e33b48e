"""Zarr with worker processes: the predecessor of clipmill's loader of latents, rebuilt from its notes.

The store has the arrays `base_frames` (--chunk segments per Zarr chunk, Blosc with zstd), `clip_emb` and
`segment_to_video`. Each worker process opens the store, waits for batches of segment IDs on the input queue, decodes
them into preallocated blocks of shared memory, and returns the index of the block on the output queue. Batches are
prefetched, and nothing is copied between processes. A block is released when the next batch is requested.

Where the notes leave a choice, the faster option is used: one read per segment (reading a list of segments from Zarr is
five times slower), text embeddings and mapping in the memory of the workers, and batches in order of completion.
"""

import argparse
import multiprocessing
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.latent_peers.segment_set import SEGMENT_BYTES, SEGMENT_SHAPE, TEXT_WIDTH, SegmentSet
from benchmarks.latent_peers.server import Batches, PeerLoader, serve

PREFETCHED_A_WORKER = 2
_TEXT_BYTES = 2 * TEXT_WIDTH


class Block(NamedTuple):
    """Buffers of a batch in shared memory."""

    memory: SharedMemory
    latents: np.ndarray
    text: np.ndarray


def block_in(memory: SharedMemory, batch: int) -> Block:
    """Create arrays over a block of shared memory."""
    latents = np.ndarray((batch, *SEGMENT_SHAPE), np.float16, memory.buf)
    text = np.ndarray((batch, TEXT_WIDTH), np.float16, memory.buf, offset=batch * SEGMENT_BYTES)
    return Block(memory, latents, text)


class SeedZarr:
    """Loader with workers, queues and blocks for one batch size."""

    def __init__(self, store: Path, segments: SegmentSet, *, batch: int, num_workers: int) -> None:
        import zarr  # noqa: F401 - so that forked workers have the module, and an ImportError is raised here

        context = multiprocessing.get_context("fork")
        self._segments, self._batch = segments, batch
        block_bytes = batch * (SEGMENT_BYTES + _TEXT_BYTES)
        num_blocks = PREFETCHED_A_WORKER * num_workers + 1
        self._blocks = [block_in(SharedMemory(create=True, size=block_bytes), batch) for _ in range(num_blocks)]
        for block in self._blocks:
            block.latents[:] = 0  # the kernel allocates a page at the first write
        self._input: Queue[Any] = context.Queue()
        self._output: Queue[Any] = context.Queue()
        names = [block.memory.name for block in self._blocks]
        self._workers = [
            context.Process(target=work, args=(store, names, batch, self._input, self._output), daemon=True)
            for _ in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def epoch(self, number: int) -> Batches:
        """See `PeerLoader.epoch`."""
        ids = self._segments.shuffled(number)
        batches = iter([ids[begin : begin + self._batch] for begin in range(0, len(ids), self._batch)])
        num_asked = 0
        for slot, asked in zip(range(len(self._blocks)), batches, strict=False):
            self._input.put((slot, asked))
            num_asked += 1
        while num_asked:
            slot, size = self._output.get()
            num_asked -= 1
            block = self._blocks[slot]
            yield block.latents[:size], block.text[:size]
            following = next(batches, None)
            if following is not None:
                self._input.put((slot, following))
                num_asked += 1

    def close(self) -> None:
        """Stop the workers and release the blocks."""
        for _ in self._workers:
            self._input.put(None)
        for worker in self._workers:
            worker.join()
        memories = [block.memory for block in self._blocks]
        self._blocks = []
        for memory in memories:
            memory.close()
            memory.unlink()


def work(store: Path, names: list[str], batch: int, asked: "Queue[Any]", done: "Queue[Any]") -> None:
    """Run a worker process."""
    import zarr

    group: Any = zarr.open_group(str(store), mode="r")
    frames, clip_emb, segment_to_video = group["base_frames"], group["clip_emb"][:], group["segment_to_video"][:]
    blocks = [block_in(SharedMemory(name=name), batch) for name in names]
    while (job := asked.get()) is not None:
        slot, ids = job
        latents, text = blocks[slot].latents, blocks[slot].text
        for row, segment in enumerate(ids.tolist()):
            latents[row] = frames[segment]
        text[: len(ids)] = clip_emb[segment_to_video[ids]]
        done.put((slot, len(ids)))


def make(segments: SegmentSet, folder: Path, *, per_chunk: int) -> None:
    """Write the store, with settings that reproduce the size in the notes: 723 MiB for 5000 segments, one per chunk."""
    import zarr
    from numcodecs import Blosc

    group: Any = zarr.open_group(str(folder), mode="w")
    zstd = Blosc(cname="zstd", clevel=5, shuffle=Blosc.SHUFFLE)
    arrays = {"clip_emb": segments.text, "segment_to_video": segments.video_of_segment}
    for name, values in arrays.items():
        group.create_dataset(name, data=values, compressor=zstd)
    shape = segments.latents.shape
    frames = group.create_dataset(
        "base_frames", shape=shape, chunks=(per_chunk, *shape[1:]), dtype="f2", compressor=zstd
    )
    for begin in range(0, len(segments), per_chunk):
        frames[begin : begin + per_chunk] = segments.latents[begin : begin + per_chunk]


def main() -> None:
    """Respond to requests; the command line contains the numbers of workers and of segments per Zarr chunk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--chunk", type=int, default=1)
    asked = parser.parse_known_args()[0]

    def open_loader(folder: Path, segments: SegmentSet, batch: int) -> PeerLoader:
        return SeedZarr(folder, segments, batch=batch, num_workers=asked.workers)

    serve(partial(make, per_chunk=asked.chunk), open_loader)


if __name__ == "__main__":
    main()
