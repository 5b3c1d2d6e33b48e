"""What reading the current variant of a column costs: measured on its shards, on a disk or in a bucket."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from clipmill.manifests.quoting import counted
from clipmill.manifests.storage.objects import Objects
from clipmill.prep.advice.bucket import GAP_BYTES, measure
from clipmill.prep.advice.equation import bytes_text
from clipmill.prep.advice.reading_costs import (
    SEGMENT_S,
    ClipRead,
    clip_reads,
    mean_chunk_s,
    measure_read_speed,
    member_reads,
    segment_bytes,
    segments_per_chunk,
    spread,
    video_bytes_per_s,
)
from clipmill.prep.video.recipe import recipe_from_dict
from clipmill.shards.reader import CommittedShard, Variant


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What reading a set costs, and in words where the figures come from.

    Attributes:
        bytes_per_s: bytes of chunks, or of their latents, per second of video.
        chunk_s: length of a chunk.
        clip_bytes: bytes read per clip.
        requests_per_clip: ranges read per clip.
        clips_per_epoch: chunks, or segments of latents.
        read_bytes_per_s: read speed, as measured or given.
        latency_s: median of a request to a bucket; None for a disk.
        set_bytes: size of all tars.
        num_sampled: shards that were looked at, of `num_shards`.
    """

    bytes_per_s: float
    chunk_s: float
    clip_bytes: float
    requests_per_clip: float
    clips_per_epoch: int
    clips: str
    read_bytes_per_s: float
    read_speed: str
    latency_s: float | None
    set_bytes: int
    num_sampled: int
    num_shards: int


@dataclass(frozen=True)
class _Speed:
    bytes_per_s: float
    origin: str
    latency_s: float | None = None


def measure_costs(
    variant: Variant,
    *,
    column: str,
    data_dir: Path,
    objects: Objects | None,
    read_bytes_per_s: float | None,
    num_nodes: int,
    gpus_per_node: int,
) -> Costs:
    """Measure what reading a set costs.

    Args:
        column: "video" or "latents".
        objects: the bucket that the folder `data_dir` stands for; None for a folder on a disk.
        read_bytes_per_s: the read speed for all nodes if it is known; the disk is not measured then.
        num_nodes, gpus_per_node: the cluster. Each node gets as much from a bucket as is measured here.

    Raises:
        UserError: there are no shards.
        Damaged, OSError: the shards cannot be read.
    """
    shards = spread(variant.shards())
    files = [commit.files for commit in variant.commits.values() if commit.files is not None]
    num_chunks = sum(one.num_samples for one in files)
    gap_bytes = None if objects is None else GAP_BYTES
    if column == "video":
        settings = recipe_from_dict(variant.recipe).settings()
        chunk_s = float(settings.len_s) if settings.cut == "even" else mean_chunk_s(shards)
        reads = clip_reads(shards, gap_bytes=gap_bytes)
        per_clip = float(np.mean([read.num_bytes for read in reads]))
        requests = float(np.mean([len(read.ranges) for read in reads]))
        along = "" if objects is None else f", gaps up to {bytes_text(GAP_BYTES)} read along"
        clips, num_clips = f"mean of {len(reads)} clips with 4 frames, 1 to 4 s long{along}", num_chunks
    else:
        reads = member_reads(shards)
        chunk_s, requests = mean_chunk_s(shards), 1.0
        per_clip, num_sampled = segment_bytes(shards)
        clips = f"segments of {SEGMENT_S:g} s, mean over {counted(num_sampled, 'chunk')}"
        num_clips = max(1, round(num_chunks * segments_per_chunk(shards)))
    speed = _speed(
        shards,
        reads,
        data_dir=data_dir,
        objects=objects,
        read_bytes_per_s=read_bytes_per_s,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
    )
    return Costs(
        bytes_per_s=video_bytes_per_s(shards),
        chunk_s=chunk_s,
        clip_bytes=per_clip,
        requests_per_clip=requests,
        clips_per_epoch=num_clips,
        clips=clips,
        read_bytes_per_s=speed.bytes_per_s,
        read_speed=speed.origin,
        latency_s=speed.latency_s,
        set_bytes=sum(one.tar_bytes for one in files),
        num_sampled=len(shards),
        num_shards=len(files),
    )


def _speed(
    shards: list[CommittedShard],
    reads: list[ClipRead],
    *,
    data_dir: Path,
    objects: Objects | None,
    read_bytes_per_s: float | None,
    num_nodes: int,
    gpus_per_node: int,
) -> _Speed:
    given = "given by --read-speed"
    if objects is None:
        if read_bytes_per_s is not None:
            return _Speed(read_bytes_per_s, given)
        disk = measure_read_speed(shards)
        return _Speed(
            disk.bytes_per_s,
            f"measured on {counted(disk.num_reads, 'chunk')} from {counted(disk.num_shards, 'shard')}: "
            "whole chunks in random order, one at a time, page cache dropped",
        )
    wanted = [(read.shard.tar_path.relative_to(data_dir).as_posix(), read.ranges) for read in reads]
    Random(0).shuffle(wanted)
    found = measure(objects, wanted, num_processes=gpus_per_node)
    if read_bytes_per_s is not None:
        return _Speed(read_bytes_per_s, given, found.latency_s)
    each = "" if num_nodes == 1 else f"{num_nodes} x {bytes_text(found.bytes_per_s)}/s, "
    origin = (
        f"{each}measured from this machine on {counted(found.num_reads, 'clip')}, {found.num_threads} at a time; one "
        f"request alone takes {found.latency_s * 1000:.0f} ms, 95th percentile {found.slow_latency_s * 1000:.0f} ms"
    )
    return _Speed(found.bytes_per_s * num_nodes, origin, found.latency_s)
