import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.shards.commits import Commit, ShardFiles, write_commit
from clipmill.shards.npy import npy_bytes
from clipmill.shards.writer import Sample, ShardWriter

EXTENSIONS = ("mp4", "json", "latents.npy")
FIELDS = [pa.field("start_ms", pa.int64(), nullable=False), pa.field("packet_size", pa.list_(pa.uint32()))]


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    def make(num_samples: int = 5, *, video_id: str = "video", seed: int = 0) -> list[Sample]:
        noise = random.Random(seed)
        return [
            Sample(
                key=f"{video_id}_{number * 15000:09d}",
                members={
                    # Sizes around tar's block: one byte less, exactly one block, one byte more, and empty.
                    "mp4": noise.randbytes((511, 512, 513, 0, 5000)[number % 5]),
                    "json": b'{"number": %d}' % number,
                    "latents.npy": npy_bytes(np.full((2, 3), number, dtype=np.float16)),
                },
                fields={"start_ms": number * 15000, "packet_size": list(range(number))},
            )
            for number in range(num_samples)
        ]

    return make


@pytest.fixture
def write_shard() -> Callable[..., ShardFiles]:
    def write(directory: Path, samples: list[Sample], *, shard_id: int = 0, fingerprint: str = "0" * 64) -> ShardFiles:
        directory.mkdir(parents=True, exist_ok=True)
        with ShardWriter(directory, shard_id=shard_id, extensions=EXTENSIONS, fields=FIELDS) as writer:
            for sample in samples:
                writer.add(sample)
            return writer.publish(fingerprint)

    return write


@pytest.fixture
def commit_shard(write_shard: Callable[..., ShardFiles]) -> Callable[..., Commit]:
    def commit(directory: Path, samples: list[Sample], *, shard_id: int = 0, split: str = "train") -> Commit:
        files = write_shard(directory, samples, shard_id=shard_id)
        record = Commit("video", shard_id, split, "ab" * 32, files, ())
        write_commit(directory, record)
        return record

    return commit


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    """Return a function that changes one byte of a file in place."""

    def change(path: Path, offset: int) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x40]))

    return change
