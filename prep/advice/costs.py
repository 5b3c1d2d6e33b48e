"""What reading the current variant of a column costs: measured on its shards, on a disk or in a bucket."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from manifests.quoting import counted
from manifests.storage.objects import Objects
from prep.advice.bucket import GAP_BYTES, READERS, Measured, Read, measure
from prep.advice.reading_costs import (
    SEGMENT_S,
    clip_bytes,
    clip_reads,
    mean_chunk_s,
    measure_read_speed,
    segment_bytes,
    segments_per_chunk,
    spread,
    video_bytes_per_s,
)
from prep.video.recipe import recipe_from_dict
from shards.reader import CommittedShard, Variant


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What reading a set costs, and in words where the figures come from.

    Attributes:
        bytes_per_s: bytes of chunks, or of their latents, per second of video.
        chunk_s: length of a chunk.
        clip_bytes: bytes read per clip.
        requests_per_clip: ranges read per clip.
        clips_per_epoch: chunks, or segments of latents.
        read_bytes_per_s: read speed as measured; 0.0 if it was not measured.
        latency_s: of a request to a bucket; None for a disk, or if it was not measured.
        set_bytes: size of all tars.
        num_sampled: shards that were looked at, of `num_shards`.
    """

    bytes_per_s: float
    chunk_s: float
    clip_bytes: float
    requests_per_clip: float
    clips_per_epoch: int
    clips: str
    read_bytes_per_s: float = 0.0
    latency_s: float | None = None
    read_speed: str = ""
    set_bytes: int
    num_sampled: int
    num_shards: int

    def with_speed(self, bytes_per_s: float, read_speed: str) -> "Costs":
        """The same with a read speed that was not measured here."""
        return replace(self, read_bytes_per_s=bytes_per_s, read_speed=read_speed)


def measure_costs(variant: Variant, *, column: str, objects: Objects | None, data_dir: Path) -> Costs:
    """Measure what reading a set costs, except for the read speed.

    Args:
        objects: the bucket that the folder stands for; None for a folder on a disk.

    Raises:
        UserError: there are no shards.
        Damaged, OSError: the shards cannot be read.
    """
    shards = spread(variant.shards())
    files = [commit.files for commit in variant.commits.values() if commit.files is not None]
    num_chunks = sum(one.num_samples for one in files)
    if column == "video":
        settings = recipe_from_dict(variant.recipe).settings()
        chunk_s = float(settings.len_s) if settings.cut == "even" else mean_chunk_s(shards)
        reads = clip_reads(shards, gap_bytes=None if objects is None else GAP_BYTES)
        per_clip, requests = (float(np.mean(one)) for one in ([r.num_bytes for r in reads], [len(r.ranges) for r in reads]))
        clips, num_clips = f"mean of {len(reads)} clips with 4 frames, 1 to 4 s long", num_chunks
    else:
        chunk_s, requests = mean_chunk_s(shards), 1.0
        per_clip, num_sampled = segment_bytes(shards)
        clips = f"segments of {SEGMENT_S:g} s, mean over {counted(num_sampled, 'chunk')}"
        num_clips = max(1, round(num_chunks * segments_per_chunk(shards)))
    return Costs(
        bytes_per_s=video_bytes_per_s(shards),
        chunk_s=chunk_s,
        clip_bytes=per_clip,
        requests_per_clip=requests,
        clips_per_epoch=num_clips,
        clips=clips,
        set_bytes=sum(one.tar_bytes for one in files),
        num_sampled=len(shards),
        num_shards=len(files),
    )
