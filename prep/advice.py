"""Whether a disk or a bucket keeps up with training: one inequality, for each way of reading a clip.

    B x b <= S_r x delta                  b = rho x T for whole chunks: AVION, arXiv 2309.16669, equation 3

B is the batch size in clips, b the bytes that are read of a clip, rho the bytes per second of video, T the chunk length
in seconds, S_r the read speed of the disk in bytes per second, and delta the time of a training step in seconds without
waiting for data. The bytes of a clip's packets, or of a segment of latents, do not depend on the chunk length.

If N nodes read one disk, B is the batch of all of them, and S_r is what the disk delivers to all of them together. One
node alone measures at most that, and perhaps only what its network link lets through: S_r is between the speed that
one node measures and N times that speed.

A bucket answers many requests at once, each after tens of milliseconds:

    requests in flight = requests per second x latency        (Little's law: Little 1961, Operations Research 9)
    reading ranges:           E x C x b / N  bytes per node   for E epochs of C clips
    whole tars into a cache:  D              bytes per node, if the cache holds them; less from E = N x D / (C x b) on
"""

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import count_noun
from clipmill.manifests.units import size_text
from clipmill.shards.columns import VIDEO
from clipmill.shards.disk_speed import ReadSpeed, drop_cache, read_speed
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard, Variant

_SOURCE = "AVION, arXiv:2309.16669, equation 3"
_USD_PER_GET = 0.40e-6  # S3 Standard in us-east-1
_GETS_PER_S = 5_500  # that S3 serves at least for each prefix
WHOLE = "whole chunks"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What training requires from a disk or a bucket.

    Attributes:
        batch: B, clips per step, of all nodes together.
        step_s: Delta.
        read_bytes_per_s: S_r, as one node measures it or as given for all of them.
        video_bytes_per_s, chunk_s: Rho, of latents for their column, and T.
        clip_bytes: B by what is read of a clip: packets, latents.
        num_nodes, gpus_per_node: The cluster; all of its nodes read the disk.
        is_total: True if S_r is known to be what all nodes get together; else it was measured by one of them.
    """

    batch: int
    step_s: float
    read_bytes_per_s: float
    video_bytes_per_s: float
    chunk_s: float
    clip_bytes: Mapping[str, float]
    num_nodes: int = 1
    gpus_per_node: int = 1
    is_total: bool = True

    @property
    def readable_bytes(self) -> float:
        """Bytes that the disk can deliver during one step."""
        return self.read_bytes_per_s * self.step_s

    @property
    def longest_chunk_s(self) -> float:
        """T for which reading whole chunks takes exactly as long as the step."""
        return self.readable_bytes / (self.batch * self.video_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def clips_per_s(self) -> float:
        return self.batch / self.step_s

    @cached_property
    def ways(self) -> dict[str, float]:
        """Bytes per clip by what is read of it."""
        return {WHOLE: self.video_bytes_per_s * self.chunk_s, **self.clip_bytes}

    def headroom(self, way: str) -> float:
        """Number of times that a batch can be read during one step."""
        return self.readable_bytes / (self.batch * self.ways[way])


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What training asks of a bucket.

    Attributes:
        latency_s: Of a request for a range of a clip.
        requests_per_clip: Ranges, after short gaps were closed.
        set_bytes, num_shards: Of all tars of the variant.
        clips_per_epoch: C.
    """

    load: Load
    latency_s: float
    requests_per_clip: float
    set_bytes: float
    num_shards: int
    clips_per_epoch: int

    def values(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        load, found = self.load, {"latency_s": self.latency_s, "set_bytes": self.set_bytes}
        found |= {"num_shards": self.num_shards, "clips_per_epoch": self.clips_per_epoch}
        if "packets" not in load.clip_bytes:  # train fetches whole tars of other columns
            return found | {"fetch_s": self.set_bytes / load.read_bytes_per_s}
        per_s, per_epoch = load.clips_per_s * self.requests_per_clip, self.clips_per_epoch * self.requests_per_clip
        return found | {
            "requests_per_clip": self.requests_per_clip,
            "requests_per_s": per_s,
            "requests_in_flight": per_s * self.latency_s,
            "requests_in_flight_per_gpu": per_s * self.latency_s / load.num_gpus,
            "requests_per_epoch": per_epoch,
            "usd_per_epoch": per_epoch * _USD_PER_GET,
            "epochs_until_cache_pays": load.num_nodes
            * self.set_bytes
            / (self.clips_per_epoch * load.clip_bytes["packets"]),
        }

    def lines(self) -> Iterator[str]:
        """Yield what training asks of the bucket."""
        load, found = self.load, self.values()
        tars = f"{size_text(self.set_bytes)} in {count_noun(self.num_shards, 'request')} on each node"
        if "fetch_s" in found:
            yield (
                f"whole tars of latents are fetched into a cache: {tars}, which takes {found['fetch_s']:,.0f} s; an "
                f"epoch of {count_noun(self.clips_per_epoch, 'clip')} takes "
                f"{self.clips_per_epoch / load.clips_per_s:,.0f}"
                f" s. With a --cache-size below that, they are fetched again in each epoch"
            )
            return
        each, limit = found["requests_in_flight_per_gpu"], ""
        if found["requests_per_s"] > _GETS_PER_S:
            limit = f", more than the {_GETS_PER_S:,}/s that S3 promises per prefix: expect 503 answers and retries"
        yield f"requests      {found['requests_per_s']:,.0f}/s, {self.requests_per_clip:.2f} per clip{limit}"
        yield (
            f"in flight     {found['requests_per_s']:,.0f}/s x {self.latency_s * 1000:.0f} ms = "
            f"{found['requests_in_flight']:.1f} (Little's law), {each:.1f} per GPU; a process of train keeps up to "
            f"{READERS}: {'enough' if each <= READERS else 'not enough, use a closer bucket or more processes'}"
        )
        yield (
            f"cost          {found['requests_per_epoch']:,.0f} requests per epoch of "
            f"{count_noun(self.clips_per_epoch, 'clip')}, USD {found['usd_per_epoch']:.2g} at USD 0.40 per million"
        )
        yield f"local cache   {tars}; transfers less than ranges from {found['epochs_until_cache_pays']:.1f} epochs on"


def advice_values(load: Load) -> dict[str, Any]:
    """Return the figures and conclusions as JSON values."""
    values: dict[str, Any] = {
        "batch": load.batch,
        "step_s": load.step_s,
        "read_bytes_per_s": load.read_bytes_per_s,
        "video_bytes_per_s": load.video_bytes_per_s,
        "chunk_s": load.chunk_s,
        "nodes": load.num_nodes,
        "gpus_per_node": load.gpus_per_node,
        "is_read_speed_of_all_nodes": load.is_total,
        "longest_chunk_s": load.longest_chunk_s,
        "clips_per_s_per_gpu": load.clips_per_s / load.num_gpus,
    }
    for way, clip_bytes in load.ways.items():
        values[way.replace(" ", "_")] = {
            "bytes_per_clip": clip_bytes,
            "bytes_per_step": load.batch * clip_bytes,
            "bytes_per_s": load.clips_per_s * clip_bytes,
            "bytes_per_s_per_node": load.clips_per_s * clip_bytes / load.num_nodes,
            "bytes_per_s_per_gpu": load.clips_per_s * clip_bytes / load.num_gpus,
            "headroom": load.headroom(way),
            "is_fine": load.headroom(way) >= 1,
        }
    return values


def advice_text(load: Load, origin: Mapping[str, str], *, storage: str = "disk") -> str:
    """Return the figures with their origin, and the conclusions.

    Args:
        origin: Where step, read speed, bitrate and clips come from, in words.
        storage: "disk" or "bucket".
    """
    lines = [f"step          {load.step_s:.3g} s, {count_noun(load.batch, 'clip')}  ({origin['step']})"]
    if load.num_gpus > 1:
        lines.append(
            f"cluster       {count_noun(load.num_nodes, 'node')} with {count_noun(load.gpus_per_node, 'GPU')} "
            "each; per GPU "
            f"{load.batch / load.num_gpus:g} clips, {load.clips_per_s / load.num_gpus:.3g} clips/s"
        )
    lines += [
        f"read speed    {size_text(load.read_bytes_per_s)}/s  ({origin['read_speed']})",
        f"bitrate       {size_text(load.video_bytes_per_s)}/s  ({origin['bitrate']})",
        f"clips         {origin['clips']}",
        "",
        f"B x b <= S_r x delta: what a step reads, and the {size_text(load.readable_bytes)} that the {storage} "
        "delivers in its time",
    ]
    for way, clip_bytes in load.ways.items():
        lines.append(
            f"{way:<13} {load.batch:,} x {size_text(clip_bytes)} = {size_text(load.batch * clip_bytes)}, "
            f"{size_text(load.clips_per_s * clip_bytes / load.num_nodes)}/s per node: {_verdict(load, way)}"
        )
    return "\n".join(lines)


def _verdict(load: Load, way: str) -> str:
    """Whether storage is enough, with three answers where one of several nodes measured it."""
    headroom, nodes = load.headroom(way), count_noun(load.num_nodes, "node")
    longest = ""
    if way == WHOLE:
        longest = f"; the longest chunk that it sustains is {load.longest_chunk_s:.3g} s ({_SOURCE})"
    if headroom >= 1:
        least = "" if load.is_total else f", even if {nodes} together get only what this node measured"
        return f"fine, {headroom:.1f} times as much is delivered{least}{longest}"
    if load.is_total or headroom * load.num_nodes < 1:
        return f"too much, reading takes {1 / headroom:.1f} times as long as the step{longest}"
    needed = size_text(load.clips_per_s * load.ways[way])
    return f"fine only if {nodes} together get {needed}/s: give their speed with --read-speed{longest}"


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
        bytes_per_s: Bytes of chunks, or of their latents, per second of video.
        chunk_s: Median length of a chunk.
        clip_bytes, requests_per_clip: Bytes and ranges of a clip whose packets alone are read, or of a segment.
        clips_per_epoch: Chunks, or segments of latents.
        clips: In words, of which clips these are means.
        set_bytes: Size of all tars.
        sampled: Shards that were looked at, of `num_shards`.
        reads: Of these clips.
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
        UserError: There are no shards.
        Damaged, OSError: Their indexes cannot be read.
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
        Damaged, OSError: A tar cannot be read.
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
        Damaged, Inaccessible, OSError: An object cannot be read.
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


METRICS_FILE, SETTINGS_FILE, FACTS_FILE = "metrics.jsonl", "settings.yaml", "run.json"
_WARM_UP_SHARE = 0.1
_PROCESSES = re.compile(r"(\d+)(?:, \w+(?:, (\d+) x \d+ stages.*)?)?")  # as train writes them: "4, ddp, 2 x 2 stages"
_BATCH = re.compile(r"^batch: *(\d+) *$", re.MULTILINE)


@dataclass(frozen=True)
class RunSteps:
    """Step statistics of a run.

    Attributes:
        step_s: Median seconds per step without the wait for data.
        batch: Clips per step, of all processes.
        num_readers: Processes that read data: all of them, or the first stage of each pipeline.
    """

    step_s: float
    num_steps: int
    batch: int | None
    num_readers: int | None


def read_run_steps(run: Path) -> RunSteps:
    """Read `metrics.jsonl` and `settings.yaml` of a run; the first tenth, at least one step, counts as warm-up.

    Raises:
        UserError: The folder does not belong to a run, or the run has too few steps.
    """
    hint = "give a run folder written by train, or --step-time SECONDS"
    path = run / METRICS_FILE
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}", hint=hint) from None
    steps = [step for step in map(_step_s, lines) if step is not None]
    steps = steps[max(1, int(len(steps) * _WARM_UP_SHARE)) :]
    if not steps:
        raise UserError(f"{path} has no steps after the warm-up", hint=hint)
    step_s = statistics.median(steps)
    if step_s <= 0:
        raise UserError(f"the step time in {path} is {step_s:g} s without the wait for data", hint=hint)
    return RunSteps(step_s, len(steps), _batch(run / SETTINGS_FILE), _num_readers(run / FACTS_FILE))


def _step_s(line: str) -> float | None:
    """Return the seconds of one step without its wait for data; None for a line that lacks them or is truncated."""
    try:
        values: Any = json.loads(line)
        seconds = float(values["step_s"]) - float(values["data_wait_s"])
    except (ValueError, TypeError, KeyError):
        return None
    return seconds if math.isfinite(seconds) else None


def _batch(path: Path) -> int | None:
    try:
        found = _BATCH.search(path.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def _num_readers(path: Path) -> int | None:
    try:
        found = _PROCESSES.fullmatch(json.loads(path.read_bytes())["processes"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return int(found[2] or found[1]) if found else None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
