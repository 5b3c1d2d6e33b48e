"""Cost of reading a shard set: bytes per second of video, bytes per clip if only packets are read, and disk speed."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from manifests.errors import UserError
from manifests.storage.mirrors import mirror_of
from shards.packets import PacketTable
from shards.reader import CommittedShard

_MAX_SHARDS = 64  # number of shards sampled, spread over the set
_CHUNKS_PER_SHARD, _CLIPS_PER_CHUNK, _CLIP_FRAMES = 8, 4, 4
_CLIP_S = (1.0, 4.0)  # shortest and longest length of a clip in seconds
_READING_S, _MAX_READ_BYTES = 3.0, 4 << 30


@dataclass(frozen=True)
class ReadSpeed:
    """A measured read speed; `num_reads` reads of chunk size from `num_shards` files."""

    bytes_per_s: float
    num_reads: int
    num_shards: int


def spread(shards: Sequence[CommittedShard]) -> list[CommittedShard]:
    """Return the shards to sample: all of them, or some spread evenly over a large set.

    Raises:
        UserError: there are no shards.
    """
    if not shards:
        raise UserError(
            "the current variant has no chunks: all of them failed", hint="run `prep status` for the reasons"
        )
    step = -(-len(shards) // _MAX_SHARDS)
    return list(shards[::step])


def video_bytes_per_s(shards: Sequence[CommittedShard]) -> float:
    """Return the bytes of the chunk files per second of video."""
    size_bytes = sum(int(shard.index["mp4_size"].to_numpy().sum()) for shard in shards)
    return size_bytes / sum(_seconds(shard) for shard in shards)


def mean_chunk_s(shards: Sequence[CommittedShard]) -> float:
    """Return the mean length of a chunk in seconds, for chunks of different lengths."""
    return sum(_seconds(shard) for shard in shards) / sum(shard.num_samples for shard in shards)


def clip_bytes(shards: Sequence[CommittedShard]) -> tuple[float, int]:
    """Return (mean bytes read per clip of four frames if only its packets are read, number of clips).

    The clips are those of a training set without long captions: 1 to 4 s, anywhere in a chunk.
    """
    choose, counts = Random(0), []
    for shard in shards:
        for row in sorted(choose.sample(range(shard.num_samples), min(_CHUNKS_PER_SHARD, shard.num_samples))):
            table = shard.packet_tables.of_row(row)
            fps = shard.index["fps_num"][row].as_py() / shard.index["fps_den"][row].as_py()
            for _ in range(_CLIPS_PER_CHUNK):
                length = min(choose.uniform(*_CLIP_S) * fps, len(table.frame))
                begin = choose.uniform(0, len(table.frame) - length)
                frames = [int(begin + (part + 0.5) * length / _CLIP_FRAMES) for part in range(_CLIP_FRAMES)]
                counts.append(bytes_read(table, frames, gap_bytes=shard.gap_bytes))
    return float(np.mean(counts)), len(counts)


def bytes_read(table: PacketTable, frames: Sequence[int], *, gap_bytes: int) -> int:
    """Return the bytes read from a chunk for `frames`: their packets, and gaps of up to `gap_bytes` between them.

    A chunk with open GOPs is read as a whole.
    """
    if not table.has_closed_gops:
        return int(table.offset.max() + table.size[table.offset.argmax()])
    needed = table.needed_for(frames)
    begins = table.offset[needed].astype(np.int64)
    ends = begins + table.size[needed]
    gaps = begins[1:] - ends[:-1]
    return int((ends - begins).sum() + gaps[(gaps > 0) & (gaps <= gap_bytes)].sum())


def measure_read_speed(shards: Sequence[CommittedShard], *, limit_s: float = _READING_S) -> ReadSpeed:
    """Read whole chunks in random order, each once, one at a time, and measure the speed.

    The kernel is asked to drop each chunk from the page cache before it is read.

    Raises:
        UserError: a tar cannot be read.
    """
    samples = [(shard, row) for shard in shards for row in range(shard.num_samples)]
    Random(0).shuffle(samples)
    size_bytes = num_reads = 0
    taken_s, touched = 0.0, set()
    began_s = time.monotonic()
    for shard, row in samples:
        if num_reads and (time.monotonic() - began_s > limit_s or size_bytes > _MAX_READ_BYTES):
            break
        offset, size = shard.member_range(row, "mp4")
        try:
            taken_s += _read_cold(shard, offset, size)
        except OSError as error:
            raise UserError(
                f"{shard.tar_path} cannot be read: {error.strerror or error}",
                hint="run `prep verify` to find what is damaged",
            ) from None
        size_bytes, num_reads = size_bytes + size, num_reads + 1
        touched.add(shard.shard_id)
    return ReadSpeed(size_bytes / taken_s, num_reads, len(touched))


def _read_cold(shard: CommittedShard, offset: int, size: int) -> float:
    """Return the time in seconds for reading one byte range of a tar, from the disk or from the bucket."""
    if (mirror := mirror_of(shard.tar_path)) is not None:
        begin_s = time.perf_counter()
        mirror.read_range(shard.tar_path, offset, size)
        return time.perf_counter() - begin_s
    descriptor = os.open(shard.tar_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin_s = time.perf_counter()
        while size > 0:
            piece = os.pread(descriptor, size, offset)
            if not piece:
                raise OSError(f"truncated at byte {offset}")
            offset, size = offset + len(piece), size - len(piece)
        return time.perf_counter() - begin_s
    finally:
        os.close(descriptor)


def _seconds(shard: CommittedShard) -> float:
    frames, fps_num, fps_den = (
        np.asarray(shard.index[name], np.float64) for name in ("num_frames", "fps_num", "fps_den")
    )
    return float((frames * fps_den / fps_num).sum())
