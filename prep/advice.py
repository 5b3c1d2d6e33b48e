"""Estimate whether a disk or a bucket keeps up with training, for `prep advise`.

The estimate is an inequality, which is evaluated for each way of reading a clip:

    B x b <= S_r x delta                  b = rho x T for whole chunks: AVION, arXiv 2309.16669, equation 3

B is the batch size in clips, b the number of bytes read for a clip, rho the bytes per second of video, T the chunk
length in seconds, S_r the read speed of the disk in bytes per second, and delta the duration of a training step in
seconds, excluding the wait for data. The size of a clip's packets, or of a segment of latents, does not depend on T.

If N nodes read the same disk, B is the total batch size of all nodes, and S_r is the total speed that the disk delivers
to all nodes. A single node may measure less than this speed, for example because of its network link. S_r is therefore
between the measured speed and N times the measured speed.

The read speed is measured on a sample of shards (`open_column`, `measure_disk`, `measure_bucket`). Step times come from
the files in the folder of a training run (`read_run_steps`), because prep does not import train.

A bucket serves many requests in parallel, each with a latency of tens of milliseconds:

    requests in flight = requests per second x latency        (Little's law: Little 1961, Operations Research 9)

E epochs of C clips transfer E x C x b / N bytes to each node if ranges are read. If complete tars are copied into a
cache that can hold them, their D bytes are transferred to each node once. The cache transfers less if E exceeds
N x D / (C x b).
"""

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.shards.columns import VIDEO
from clipmill.shards.disk_speed import ReadSpeed, drop_cache, measure_reads
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard, Variant

_SOURCE = "AVION, arXiv:2309.16669, equation 3"
_USD_PER_GET = 0.40e-6  # S3 Standard in us-east-1
_GETS_PER_S = 5_500  # minimum request rate that S3 supports per prefix
WHOLE_CHUNKS = "whole chunks"  # one of the ways of reading a clip


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load that training puts on a disk or a bucket.

    Attributes:
        batch: Total number of clips per step on all nodes (B).
        step_s: Duration of a step in seconds, excluding the wait for data (delta).
        read_bytes_per_s: Read speed in bytes per second (S_r), measured by one node or specified for all nodes.
        video_bytes_per_s: Bytes of chunks per second of video (rho), or bytes of latents if training reads latents.
        chunk_s: Chunk length in seconds (T).
        clip_bytes: Bytes read for a clip (b), keyed by "packets" or "latents".
        num_nodes, gpus_per_node: Size of the cluster. All nodes read the same disk.
        is_total: True if S_r is the total speed of all nodes; False if one node measured it.
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
        """Chunk length in seconds at which reading complete chunks takes exactly as long as the step."""
        return self.readable_bytes / (self.batch * self.video_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def clips_per_s(self) -> float:
        return self.batch / self.step_s

    @cached_property
    def ways(self) -> dict[str, float]:
        """Bytes per clip for each way in which a clip can be read."""
        return {WHOLE_CHUNKS: self.video_bytes_per_s * self.chunk_s, **self.clip_bytes}

    def headroom(self, way: str) -> float:
        """Return the number of times that a batch can be read during one step."""
        return self.readable_bytes / (self.batch * self.ways[way])


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Requests that training sends to a bucket.

    Attributes:
        latency_s: Latency of a request for one range of a clip, in seconds.
        requests_per_clip: Mean number of ranges per clip. Ranges with a short gap between them are merged.
        set_bytes: Total size of the variant's tars in bytes.
        num_shards: Number of shards of the variant. Each shard has one tar.
        clips_per_epoch: Clips per epoch (C).
    """

    load: Load
    latency_s: float
    requests_per_clip: float
    set_bytes: float
    num_shards: int
    clips_per_epoch: int

    def values(self) -> dict[str, Any]:
        """Return the figures as a JSON-serialisable dict."""
        load, values = self.load, {"latency_s": self.latency_s, "set_bytes": self.set_bytes}
        values |= {"num_shards": self.num_shards, "clips_per_epoch": self.clips_per_epoch}
        if "packets" not in load.clip_bytes:  # for columns other than video, train fetches complete tars
            return values | {"fetch_s": self.set_bytes / load.read_bytes_per_s}
        per_s, per_epoch = load.clips_per_s * self.requests_per_clip, self.clips_per_epoch * self.requests_per_clip
        return values | {
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
        """Yield lines of text about the requests."""
        load, values = self.load, self.values()
        tars = f"{size_text(self.set_bytes)} in {count_noun(self.num_shards, 'request')} on each node"
        if "fetch_s" in values:
            yield (
                f"complete tars of latents are fetched into a cache: {tars}, which takes {values['fetch_s']:,.0f} s; "
                f"an epoch of {count_noun(self.clips_per_epoch, 'clip')} takes "
                f"{self.clips_per_epoch / load.clips_per_s:,.0f}"
                f" s. With a --cache-size below {size_text(self.set_bytes)}, tars are fetched again in each epoch"
            )
            return
        per_gpu, warning = values["requests_in_flight_per_gpu"], ""
        verdict = "enough" if per_gpu <= READERS else "not enough; use a closer bucket or more processes"
        if values["requests_per_s"] > _GETS_PER_S:
            warning = (
                f", more than the {_GETS_PER_S:,}/s that S3 guarantees per prefix: expect 503 responses and retries"
            )
        yield f"requests      {values['requests_per_s']:,.0f}/s, {self.requests_per_clip:.2f} per clip{warning}"
        yield (
            f"in flight     {values['requests_per_s']:,.0f}/s x {self.latency_s * 1000:.0f} ms = "
            f"{values['requests_in_flight']:.1f} (Little's law), {per_gpu:.1f} per GPU; a train process sends up "
            f"to {READERS} at a time: {verdict}"
        )
        yield (
            f"cost          {values['requests_per_epoch']:,.0f} requests per epoch of "
            f"{count_noun(self.clips_per_epoch, 'clip')}, USD {values['usd_per_epoch']:.2g} at USD 0.40 per million"
        )
        yield (
            f"local cache   {tars}; transfers less than range reads after "
            f"{values['epochs_until_cache_pays']:.1f} epochs"
        )


def advice_values(load: Load) -> dict[str, Any]:
    """Return the figures and conclusions as a JSON-serialisable dict."""
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


def advice_text(load: Load, sources: Mapping[str, str], *, storage: str = "disk") -> str:
    """Return the figures, their sources, and the conclusions as lines of text.

    Args:
        sources: Description of the source of each figure: step, read_speed, bitrate, clips.
        storage: "disk" or "bucket".
    """
    lines = [f"step          {load.step_s:.3g} s, {count_noun(load.batch, 'clip')}  ({sources['step']})"]
    if load.num_gpus > 1:
        lines.append(
            f"cluster       {count_noun(load.num_nodes, 'node')} with {count_noun(load.gpus_per_node, 'GPU')} "
            "each; per GPU "
            f"{load.batch / load.num_gpus:g} clips, {load.clips_per_s / load.num_gpus:.3g} clips/s"
        )
    lines += [
        f"read speed    {size_text(load.read_bytes_per_s)}/s  ({sources['read_speed']})",
        f"bitrate       {size_text(load.video_bytes_per_s)}/s  ({sources['bitrate']})",
        f"clips         {sources['clips']}",
        "",
        f"B x b <= S_r x delta: the bytes that a step reads, compared with the {size_text(load.readable_bytes)} that "
        f"the {storage} delivers during the step",
    ]
    for way, clip_bytes in load.ways.items():
        headroom, nodes, chunk_limit = load.headroom(way), count_noun(load.num_nodes, "node"), ""
        if way == WHOLE_CHUNKS:
            chunk_limit = f"; chunks may be up to {load.longest_chunk_s:.3g} s long ({_SOURCE})"
        # If one of several nodes measured the speed, the total speed of all nodes is at least the measured speed and at
        # most this speed times the number of nodes. There are therefore three possible verdicts.
        if headroom >= 1:
            condition = (
                "" if load.is_total else f", even if {nodes} together get only the speed that this node measured"
            )
            verdict = f"fine, {headroom:.1f} times as much is delivered{condition}"
        elif load.is_total or headroom * load.num_nodes < 1:
            verdict = f"too much; reading takes {1 / headroom:.1f} times as long as the step"
        else:
            required_speed = size_text(load.clips_per_s * clip_bytes)
            verdict = f"fine only if {nodes} together get {required_speed}/s: pass their speed with --read-speed"
        lines.append(
            f"{way:<13} {load.batch:,} x {size_text(clip_bytes)} = {size_text(load.batch * clip_bytes)}, "
            f"{size_text(load.clips_per_s * clip_bytes / load.num_nodes)}/s per node: {verdict}{chunk_limit}"
        )
    return "\n".join(lines)


READERS = 32  # number of threads with which a train process prefetches clips from a bucket
SEGMENT_S = 5.0  # default of train's --segment for latents of an image VAE
_MAX_THREADS, _NUM_LATENCIES = 128, 25
_MAX_SHARDS = 64  # maximum number of sampled shards, spread evenly over the variant
_CHUNKS_PER_SHARD, _CLIPS_PER_CHUNK, _CLIP_FRAMES = 8, 4, 4
_CLIP_S = (1.0, 4.0)  # shortest and longest length of a clip in seconds

Ranges = Sequence[tuple[int, int]]  # (offset, size) in a tar


@dataclass(frozen=True, kw_only=True)
class Column:
    """Statistics of how training reads the current variant of a column, computed on a sample of its shards.

    Attributes:
        bytes_per_s: Bytes of chunks, or of their latents, per second of video.
        chunk_s: Median length of a chunk in seconds.
        clip_bytes, requests_per_clip: Mean number of bytes and of ranges that are read for a clip, or for a segment of
            latents. Only the packets of a clip are read.
        clips_per_epoch: Number of chunks, or of segments of latents, in the variant.
        clips: Description of the clips or segments over which the means are taken.
        set_bytes: Total size of the tars in bytes.
        num_shards: Number of shards in the variant.
        sampled_shards: Shards in the sample.
        reads: (shard, ranges) of each sampled clip, or of the latents of each chunk, in the sampled shards.
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
    sampled_shards: list[CommittedShard]
    reads: list[tuple[CommittedShard, Ranges]]


def open_column(variant: Variant, name: str) -> Column:
    """Compute the statistics of how training reads a variant, on a sample of its shards.

    Args:
        name: Name of the variant's column, VIDEO or LATENTS.

    Raises:
        UserError: The variant has no shards.
        Damaged, OSError: An index cannot be read.
    """
    shards = variant.shards()
    if not shards:
        raise UserError(
            "the current variant contains no samples, because all of them failed",
            hint="run `prep status` for the reasons",
        )
    sample = shards[:: -(-len(shards) // _MAX_SHARDS)]
    times = pa.concat_tables([shard.index.select(["num_frames", "fps_num", "fps_den"]) for shard in sample])
    frames, fps_num, fps_den = (np.asarray(times[name], np.float64) for name in times.column_names)
    seconds = frames * fps_den / fps_num
    # The first extension is the member that training reads: the chunk, or its latents.
    sizes = np.concatenate([np.asarray(shard.index[f"{shard.extensions[0]}_size"], np.float64) for shard in sample])
    num_chunks = sum(shard.num_samples for shard in shards)
    if name == VIDEO:
        reads = clip_reads(sample)
        clip_bytes = float(np.mean([sum(size for _, size in ranges) for _, ranges in reads]))
        requests, num_clips = float(np.mean([len(ranges) for _, ranges in reads])), num_chunks
        clips = f"mean of {len(reads)} clips with {_CLIP_FRAMES} frames, 1 to 4 s long"
    else:
        reads = chunk_reads(sample)
        # A compressed array is always read completely.
        fraction = 1.0 if sample[0].extensions[0].endswith(".zst") else np.minimum(1.0, SEGMENT_S / seconds)
        clip_bytes, requests = float(np.mean(sizes * fraction)), 1.0
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
        set_bytes=sum(shard.tar_bytes for shard in shards),
        num_shards=len(shards),
        sampled_shards=list(sample),
        reads=reads,
    )


def clip_reads(shards: Sequence[CommittedShard]) -> list[tuple[CommittedShard, Ranges]]:
    """Return the reads of random clips with four frames. Only the packets needed to decode them are read.

    The clips last 1 to 4 s and start at random times, like the clips of a training set with short captioned intervals.
    """
    rng, reads = Random(0), list[tuple[CommittedShard, Ranges]]()
    for shard in shards:
        for row in sorted(rng.sample(range(shard.num_samples), min(_CHUNKS_PER_SHARD, shard.num_samples))):
            table = shard.packet_tables.packet_table(row)
            offset, _ = shard.packet_tables.payload(row)
            fps = shard.index["fps_num"][row].as_py() / shard.index["fps_den"][row].as_py()
            for _ in range(_CLIPS_PER_CHUNK):
                length = min(rng.uniform(*_CLIP_S) * fps, len(table.frame))
                begin = rng.uniform(0, len(table.frame) - length)
                frames = [int(begin + (part + 0.5) * length / _CLIP_FRAMES) for part in range(_CLIP_FRAMES)]
                ranges = packet_ranges(table, frames, gap_bytes=shard.gap_bytes)
                reads.append((shard, [(offset + first, size) for first, size in ranges]))
    return reads


def chunk_reads(shards: Sequence[CommittedShard]) -> list[tuple[CommittedShard, Ranges]]:
    """Return the reads of all chunks, or of their latents, in random order. Chunks are read completely."""
    members = [(shard, row) for shard in shards for row in range(shard.num_samples)]
    Random(0).shuffle(members)
    return [(shard, [shard.member_range(row, shard.extensions[0])]) for shard, row in members]


def packet_ranges(table: PacketTable, frames: Sequence[int], *, gap_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges (offset, size) of a chunk that are read for `frames`.

    Ranges with a gap of up to `gap_bytes` bytes between them are merged. A chunk with open GOPs is read completely.
    """
    if not table.has_closed_gops:
        return [(0, int(table.offset.max() + table.size[table.offset.argmax()]))]
    positions = table.packets_for(frames)
    starts = table.offset[positions].tolist()
    ends = (table.offset[positions].astype(np.int64) + table.size[positions]).tolist()
    ranges: list[tuple[int, int]] = []
    for start, end in zip(starts, ends, strict=True):
        if ranges and 0 <= start - sum(ranges[-1]) <= gap_bytes:
            ranges[-1] = (ranges[-1][0], end - ranges[-1][0])
        else:
            ranges.append((start, end - start))
    return ranges


def measure_disk(column: Column) -> tuple[ReadSpeed, str]:
    """Measure the disk by reading complete chunks in random order; return the speed, and a note on the method.

    Raises:
        Damaged, OSError: A tar cannot be read.
    """
    for shard in column.sampled_shards:
        drop_cache(shard.tar_path)
    speed = measure_reads([partial(_read, shard, ranges) for shard, ranges in chunk_reads(column.sampled_shards)])
    method = f"measured on {count_noun(speed.num_reads, 'chunk')} in random order, one at a time, page cache dropped"
    return speed, method


def measure_bucket(column: Column, *, num_processes: int) -> tuple[ReadSpeed, ReadSpeed, str]:
    """Measure a bucket: send single requests, then read clips in parallel, as train processes do.

    Args:
        num_processes: Number of train processes per node.

    Returns:
        Speed of single requests, total speed of all threads, and a note on the method.

    Raises:
        Damaged, Inaccessible, OSError: An object cannot be read.
    """
    reads = list(column.reads)
    Random(0).shuffle(reads)
    num_threads = min(READERS * num_processes, _MAX_THREADS)
    request_speed = measure_reads(
        [partial(_read, shard, ranges[:1]) for shard, ranges in reads[:_NUM_LATENCIES]], seconds=10.0
    )
    clips = [partial(_read, shard, ranges) for shard, ranges in reads]
    parallel_speed = measure_reads(clips, num_threads=num_threads, repeats=True)
    method = (
        f"measured from this machine on {count_noun(parallel_speed.num_reads, 'clip')}, {num_threads} at a time; a "
        f"single request takes {request_speed.read_s * 1000:.0f} ms, "
        f"95th percentile {request_speed.slow_read_s * 1000:.0f} ms"
    )
    return request_speed, parallel_speed, method


def _read(shard: CommittedShard, ranges: Ranges) -> int:
    return sum(map(len, shard.read_ranges(ranges)))


METRICS_FILE, SETTINGS_FILE, FACTS_FILE = "metrics.jsonl", "settings.yaml", "run.json"
_WARM_UP_FRACTION = 0.1
_PROCESSES = re.compile(r"(\d+)(?:, \w+(?:, (\d+) x \d+ stages.*)?)?")  # as train writes it: "4, ddp, 2 x 2 stages"
_BATCH = re.compile(r"^batch: *(\d+) *$", re.MULTILINE)


@dataclass(frozen=True)
class RunSteps:
    """Step statistics of a training run.

    Attributes:
        step_s: Median duration of a step in seconds, excluding the wait for data.
        num_steps: Number of steps over which the median is taken.
        batch: Total number of clips per step of all processes; None if unknown.
        num_readers: Number of processes that read data (all processes, or the first stage of each pipeline); None if
            unknown.
    """

    step_s: float
    num_steps: int
    batch: int | None
    num_readers: int | None


def read_run_steps(run: Path) -> RunSteps:
    """Read the step statistics of a training run. The first tenth of the steps (at least one) is omitted as a warm-up.

    Args:
        run: Folder of the run.

    Raises:
        UserError: The folder is not the folder of a run, or the run has too few steps.
    """
    hint = "pass the folder of a training run, or --step-time SECONDS"
    path = run / METRICS_FILE
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint=hint) from None
    steps = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):  # skip truncated lines, and lines without these values
            values: Any = json.loads(line)
            seconds = float(values["step_s"]) - float(values["data_wait_s"])
            if math.isfinite(seconds):
                steps.append(seconds)
    steps = steps[max(1, int(len(steps) * _WARM_UP_FRACTION)) :]
    if not steps:
        raise UserError(f"{path} contains no steps after the warm-up", hint=hint)
    step_s = statistics.median(steps)
    if step_s <= 0:
        raise UserError(f"the step time in {path}, excluding the wait for data, is {step_s:g} s", hint=hint)
    batch = num_readers = None
    with suppress(OSError, UnicodeDecodeError):
        match = _BATCH.search((run / SETTINGS_FILE).read_text())
        batch = int(match[1]) if match else None
    with suppress(OSError, ValueError, TypeError, KeyError):
        match = _PROCESSES.fullmatch(json.loads((run / FACTS_FILE).read_bytes())["processes"])
        num_readers = int(match[2] or match[1]) if match else None
    return RunSteps(step_s, len(steps), batch, num_readers)
