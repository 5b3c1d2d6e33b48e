"""Cost of reading a shard set: bytes per second of video or latents, the ranges that clips need, and disk speed."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard

_MAX_SHARDS = 64  # number of shards sampled, spread over the set
_CHUNKS_PER_SHARD, _CLIPS_PER_CHUNK, _CLIP_FRAMES = 8, 4, 4
_CLIP_S = (1.0, 4.0)  # shortest and longest length of a clip in seconds
SEGMENT_S = 5.0  # train's default for --segment
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
    """Return the bytes of the chunk files, or of their latents, per second of video."""
    size_bytes = sum(int(shard.index[f"{_extension(shard)}_size"].to_numpy().sum()) for shard in shards)
    return size_bytes / sum(_seconds(shard) for shard in shards)


def mean_chunk_s(shards: Sequence[CommittedShard]) -> float:
    """Return the mean length of a chunk in seconds, for chunks of different lengths."""
    return sum(_seconds(shard) for shard in shards) / sum(shard.num_samples for shard in shards)


@dataclass(frozen=True)
class ClipRead:
    """The byte ranges (offset, size) of a tar that a clip needs."""

    shard: CommittedShard
    ranges: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.ranges)


def clip_bytes(shards: Sequence[CommittedShard]) -> tuple[float, int]:
    """Return (mean bytes read per clip of four frames if only its packets are read, number of clips)."""
    reads = clip_reads(shards)
    return float(np.mean([read.num_bytes for read in reads])), len(reads)


def clip_reads(shards: Sequence[CommittedShard], *, gap_bytes: int | None = None) -> list[ClipRead]:
    """Return what clips of four frames read if only their packets are read.

    The clips are those of a training set without long captions: 1 to 4 s, anywhere in a chunk.

    Args:
        gap_bytes: gaps between packets up to this size are read along; None for those of the shards' storage.
    """
    choose, reads = Random(0), []
    for shard in shards:
        for row in sorted(choose.sample(range(shard.num_samples), min(_CHUNKS_PER_SHARD, shard.num_samples))):
            table = shard.packet_tables.of_row(row)
            offset, _ = shard.packet_tables.payload(row)
            fps = shard.index["fps_num"][row].as_py() / shard.index["fps_den"][row].as_py()
            for _ in range(_CLIPS_PER_CHUNK):
                length = min(choose.uniform(*_CLIP_S) * fps, len(table.frame))
                begin = choose.uniform(0, len(table.frame) - length)
                frames = [int(begin + (part + 0.5) * length / _CLIP_FRAMES) for part in range(_CLIP_FRAMES)]
                found = packet_ranges(table, frames, gap_bytes=shard.gap_bytes if gap_bytes is None else gap_bytes)
                reads.append(ClipRead(shard, tuple((offset + begin, size) for begin, size in found)))
    return reads


def member_reads(shards: Sequence[CommittedShard]) -> list[ClipRead]:
    """Return the reads of some whole members, such as the latents of chunks."""
    choose, reads = Random(0), []
    for shard in shards:
        rows = choose.sample(range(shard.num_samples), min(_CHUNKS_PER_SHARD, shard.num_samples))
        reads += [ClipRead(shard, (shard.member_range(row, _extension(shard)),)) for row in rows]
    return reads


def bytes_read(table: PacketTable, frames: Sequence[int], *, gap_bytes: int) -> int:
    """Return the bytes of `packet_ranges`."""
    return sum(size for _, size in packet_ranges(table, frames, gap_bytes=gap_bytes))


def packet_ranges(table: PacketTable, frames: Sequence[int], *, gap_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges (offset, size) of a chunk that are read for `frames`: packets, and gaps up to `gap_bytes`.

    A chunk with open GOPs is read as a whole.
    """
    if not table.has_closed_gops:
        return [(0, int(table.offset.max() + table.size[table.offset.argmax()]))]
    needed = table.needed_for(frames)
    begins = table.offset[needed].tolist()
    ends = (table.offset[needed].astype(np.int64) + table.size[needed]).tolist()
    ranges: list[tuple[int, int]] = []
    for begin, end in zip(begins, ends, strict=True):
        if ranges and 0 <= begin - sum(ranges[-1]) <= gap_bytes:
            ranges[-1] = (ranges[-1][0], end - ranges[-1][0])
        else:
            ranges.append((begin, end - begin))
    return ranges


def segment_bytes(shards: Sequence[CommittedShard]) -> tuple[float, int]:
    """Return (mean bytes of a segment of latents of train's default length, number of chunks).

    A compressed array is read as a whole.
    """
    counts: list[float] = []
    for shard in shards:
        extension = _extension(shard)
        sizes = np.asarray(shard.index[f"{extension}_size"], np.float64)
        parts = np.minimum(1.0, SEGMENT_S / _chunk_seconds(shard))
        counts += (sizes if extension.endswith(".zst") else sizes * parts).tolist()
    return float(np.mean(counts)), len(counts)


def segments_per_chunk(shards: Sequence[CommittedShard]) -> float:
    """Return the mean number of whole segments in the latents of a chunk."""
    return float(np.mean([np.floor(_chunk_seconds(shard) / SEGMENT_S + 1e-6).mean() for shard in shards]))


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
        offset, size = shard.member_range(row, _extension(shard))
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


def _extension(shard: CommittedShard) -> str:
    """Extension of the member that training reads: the chunk, or its latents."""
    return shard.extensions[0]


def _seconds(shard: CommittedShard) -> float:
    return float(_chunk_seconds(shard).sum())


def _chunk_seconds(shard: CommittedShard) -> NDArray[np.float64]:
    frames, fps_num, fps_den = (
        np.asarray(shard.index[name], np.float64) for name in ("num_frames", "fps_num", "fps_den")
    )
    return frames * fps_den / fps_num
