"""What training reads of a column, from some of its shards, and how fast the disk or the bucket delivers it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.shards.columns import VIDEO
from clipmill.shards.disk_speed import ReadSpeed, drop_cache, read_speed
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard, Variant

READERS = 32  # threads by which a process of train reads clips of a bucket ahead
SEGMENT_S = 5.0  # train's default for --segment
_MAX_THREADS, _NUM_LATENCIES = 128, 25
_MAX_SHARDS = 64  # number of shards sampled, spread over the set
_CHUNKS_PER_SHARD, _CLIPS_PER_CHUNK, _CLIP_FRAMES = 8, 4, 4
_CLIP_S = (1.0, 4.0)  # shortest and longest length of a clip in seconds

Ranges = Sequence[tuple[int, int]]  # (offset, size) in a tar


@dataclass(frozen=True, kw_only=True)
class Column:
    """What training reads of the current variant of a column.

    Attributes:
        bytes_per_s: bytes of chunks, or of their latents, per second of video.
        chunk_s: median length of a chunk.
        clip_bytes, requests_per_clip: bytes and ranges of a clip whose packets alone are read, or of a segment.
        clips_per_epoch: chunks, or segments of latents.
        clips: in words, of which clips these are means.
        set_bytes: size of all tars.
        sampled: shards that were looked at, of `num_shards`.
        reads: of these clips.
    """

    name: str
    variant: str
    bytes_per_s: float
    chunk_s: float
    clip_bytes: float
    requests_per_clip: float
    clips_per_epoch: int
    clips: str
    set_bytes: int
    num_shards: int
    sampled: list[CommittedShard]
    reads: list[tuple[CommittedShard, Ranges]]


def open_column(variant: Variant, name: str) -> Column:
    """Find out what clips of a column read.

    Args:
        name: VIDEO or LATENTS.

    Raises:
        UserError: there are no shards.
        Damaged, OSError: their indexes cannot be read.
    """
    shards = variant.shards()
    if not shards:
        raise UserError(
            "the current variant has no chunks: all of them failed", hint="run `prep status` for the reasons"
        )
    sampled = shards[:: -(-len(shards) // _MAX_SHARDS)]
    seconds = np.concatenate([_chunk_seconds(one) for one in sampled])
    sizes = np.concatenate([np.asarray(one.index[f"{_extension(one)}_size"], np.float64) for one in sampled])
    num_chunks = sum(one.num_samples for one in shards)
    if name == VIDEO:
        reads = clip_reads(sampled)
        clip_bytes = float(np.mean([sum(size for _, size in ranges) for _, ranges in reads]))
        requests, num_clips = float(np.mean([len(ranges) for _, ranges in reads])), num_chunks
        clips = f"mean of {len(reads)} clips with {_CLIP_FRAMES} frames, 1 to 4 s long"
    else:
        reads = chunk_reads(sampled)
        # A compressed array is read as a whole.
        share = 1.0 if _extension(sampled[0]).endswith(".zst") else np.minimum(1.0, SEGMENT_S / seconds)
        clip_bytes, requests = float(np.mean(sizes * share)), 1.0
        num_clips = max(1, round(num_chunks * float(np.floor(seconds / SEGMENT_S + 1e-6).mean())))
        clips = f"segments of {SEGMENT_S:g} s, mean over {count_noun(len(sizes), 'chunk')}"
    return Column(
        name=name,
        variant=variant.directory.name,
        bytes_per_s=float(sizes.sum() / seconds.sum()),
        chunk_s=float(np.median(seconds)),
        clip_bytes=clip_bytes,
        requests_per_clip=requests,
        clips_per_epoch=num_clips,
        clips=clips,
        set_bytes=sum(one.tar_bytes for one in shards),
        num_shards=len(shards),
        sampled=list(sampled),
        reads=reads,
    )


def clip_reads(shards: Sequence[CommittedShard]) -> list[tuple[CommittedShard, Ranges]]:
    """Return what clips of four frames read if only their packets are read.

    The clips are those of a training set without long captions: 1 to 4 s, anywhere in a chunk.
    """
    choose, reads = Random(0), list[tuple[CommittedShard, Ranges]]()
    for shard in shards:
        for row in sorted(choose.sample(range(shard.num_samples), min(_CHUNKS_PER_SHARD, shard.num_samples))):
            table = shard.packet_tables.of_row(row)
            offset, _ = shard.packet_tables.payload(row)
            fps = shard.index["fps_num"][row].as_py() / shard.index["fps_den"][row].as_py()
            for _ in range(_CLIPS_PER_CHUNK):
                length = min(choose.uniform(*_CLIP_S) * fps, len(table.frame))
                begin = choose.uniform(0, len(table.frame) - length)
                frames = [int(begin + (part + 0.5) * length / _CLIP_FRAMES) for part in range(_CLIP_FRAMES)]
                found = packet_ranges(table, frames, gap_bytes=shard.gap_bytes)
                reads.append((shard, [(offset + begin, size) for begin, size in found]))
    return reads


def chunk_reads(shards: Sequence[CommittedShard]) -> list[tuple[CommittedShard, Ranges]]:
    """Return the reads of all whole chunks, or of their latents, in random order."""
    members = [(shard, row) for shard in shards for row in range(shard.num_samples)]
    Random(0).shuffle(members)
    return [(shard, [shard.member_range(row, _extension(shard))]) for shard, row in members]


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


def disk_speed(column: Column) -> tuple[ReadSpeed, str]:
    """Measure the disk by whole chunks in random order, one at a time; return the speed, and how it was measured.

    Raises:
        Damaged, OSError: a tar cannot be read.
    """
    for shard in column.sampled:
        drop_cache(shard.tar_path)
    speed = read_speed([partial(_read, shard, ranges) for shard, ranges in chunk_reads(column.sampled)])
    how = f"measured on {count_noun(speed.num_reads, 'chunk')} in random order, one at a time, page cache dropped"
    return speed, how


def bucket_speed(column: Column, *, num_processes: int) -> tuple[ReadSpeed, ReadSpeed, str]:
    """Read clips from a bucket, one request after another, and then as processes of train would read them together.

    Returns:
        What one request takes, the speed of all threads, and how it was measured.

    Raises:
        Damaged, Inaccessible, OSError: an object cannot be read.
    """
    reads = list(column.reads)
    Random(0).shuffle(reads)
    num_threads = min(READERS * num_processes, _MAX_THREADS)
    alone = read_speed([partial(_read, shard, ranges[:1]) for shard, ranges in reads[:_NUM_LATENCIES]], seconds=10.0)
    clips = [partial(_read, shard, ranges) for shard, ranges in reads]
    together = read_speed(clips, num_threads=num_threads, repeats=True)
    how = (
        f"measured from this machine on {count_noun(together.num_reads, 'clip')}, {num_threads} at a time; one request "
        f"alone takes {alone.read_s * 1000:.0f} ms, 95th percentile {alone.slow_read_s * 1000:.0f} ms"
    )
    return alone, together, how


def _read(shard: CommittedShard, ranges: Ranges) -> int:
    return sum(map(len, shard.read_ranges(ranges)))


def _extension(shard: CommittedShard) -> str:
    """Extension of the member that training reads: the chunk, or its latents."""
    return shard.extensions[0]


def _chunk_seconds(shard: CommittedShard) -> np.ndarray:
    frames, fps_num, fps_den = (
        np.asarray(shard.index[name], np.float64) for name in ("num_frames", "fps_num", "fps_den")
    )
    return frames * fps_den / fps_num
