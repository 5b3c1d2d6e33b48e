"""The estimated cost of a `video` plan in core-hours and bytes.

Bytes are estimated from shards that are already committed, otherwise from the bitrate or from measured averages.
Core-hours come from a model with two terms: reading is proportional to the source's pixels, writing to the output's.
Both were fitted to runs on natural videos; trial encodes (`clipmill.prep.video.trial`) correct them for this machine
and these videos.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from clipmill.manifests.quoting import counted
from clipmill.manifests.units import between, duration_text, parse_bitrate, size_text
from clipmill.prep.core.plan import ShardPlan, ShardState
from clipmill.prep.engines.choice import num_cores
from clipmill.prep.video.codecs import codec_named
from clipmill.prep.video.plan import Workload
from clipmill.prep.video.planning import Planned
from clipmill.prep.video.settings import ChunkSettings
from clipmill.prep.video.trial import Trial, factor_range, run_trials
from clipmill.shards.damage import DamagedIndex
from clipmill.shards.index import open_index

# Core-seconds per megapixel, measured on an x86-64 server core at about 3 GHz.
_DECODE_S_PER_MEGAPIXEL = 0.0029
_DETECT_S_PER_FRAME = 0.0006  # to scale a decoded frame to the detector's size and compare it


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of encoding; chunks copied from old shards count as free.

    Attributes:
        core_hours_range, size_bytes_range: lowest and highest, from trial encodes; None without any.
        num_trials: number of videos of which sections were encoded on this machine.
        num_cores: number of cores of this machine that the run may use.
        wall_hours_range: duration of the run on this machine: with all cores to itself, and with the present load.
        idle_hours: longest duration with all cores to itself.
    """

    core_hours: float
    size_bytes: float
    video_hours: float
    core_hours_range: tuple[float, float] | None = None
    size_bytes_range: tuple[float, float] | None = None
    num_trials: int = 0
    num_cores: int = 1
    wall_hours_range: tuple[float, float] | None = None
    idle_hours: float | None = None


def estimate(work: Workload, *, settings: ChunkSettings, bytes_per_second: float | None) -> Estimate:
    """Estimate the cost of encoding `work`.

    Args:
        bytes_per_second: bytes per second of video, measured on shards of the same variant; None if there are none yet.
    """
    core_s, size_bytes = _costs(work, settings=settings, bytes_per_second=bytes_per_second)
    video_s = float(work.seconds.sum())
    return Estimate(
        core_hours=float(core_s.sum()) / 3600, size_bytes=float(size_bytes.sum()), video_hours=video_s / 3600
    )


def _costs(work: Workload, *, settings: ChunkSettings, bytes_per_second: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the estimated core-seconds and bytes of each span, float64[N]."""
    codec = codec_named(settings.codec)
    source_pixels = work.width * work.height
    scale = np.minimum(1.0, settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    output_megapixels_per_s = source_pixels * scale**2 * float(settings.fps_exact) / 1e6
    source_megapixels_per_s = source_pixels * work.fps / 1e6
    core_s = work.seconds * (
        source_megapixels_per_s * _DECODE_S_PER_MEGAPIXEL + output_megapixels_per_s * codec.encode_s_per_megapixel
    )
    if bytes_per_second is not None:
        size_bytes = work.seconds * bytes_per_second
    elif settings.bitrate is not None:
        size_bytes = work.seconds * (parse_bitrate(settings.bitrate, flag="--bitrate") / 8)
    else:
        size_bytes = work.seconds * output_megapixels_per_s * (1e6 * codec.bits_per_pixel / 8)
    return core_s, size_bytes


def corrected(
    cost: Estimate, trials: Sequence[Trial], work: Workload, *, settings: ChunkSettings, has_bytes: bool
) -> Estimate:
    """Return an estimate that is scaled by what trial encodes cost in comparison with their own estimates.

    Args:
        has_bytes: whether the bytes come from committed shards or from the bitrate, so that trials do not change them.
    """
    if not trials:
        return cost
    core_s, size_bytes = _costs(work, settings=settings, bytes_per_second=None)
    per_s = [(core_s[one.row] / work.seconds[one.row], size_bytes[one.row] / work.seconds[one.row]) for one in trials]
    middle, low, high = factor_range([one.core_s for one in trials], [core for core, _ in per_s])
    found = replace(
        cost,
        core_hours=cost.core_hours * middle,
        core_hours_range=(cost.core_hours * low, cost.core_hours * high),
        num_trials=len(trials),
    )
    if has_bytes:
        return found
    middle, low, high = factor_range([one.size_bytes for one in trials], [size for _, size in per_s])
    return replace(
        found, size_bytes=cost.size_bytes * middle, size_bytes_range=(cost.size_bytes * low, cost.size_bytes * high)
    )


def detection_core_s(work: Workload) -> np.ndarray:
    """Estimate the core-seconds for detecting the shots of `work`."""
    source_megapixels = work.seconds * work.width * work.height * work.fps / 1e6
    return np.asarray(source_megapixels * _DECODE_S_PER_MEGAPIXEL + work.seconds * work.fps * _DETECT_S_PER_FRAME)


def estimate_of(planned: Planned, *, has_trials: bool = False) -> Estimate:
    """Estimate the cost of the shards that have to be encoded; shards that are only rewritten count as free.

    Args:
        has_trials: encode short sections of some videos, so that the estimate is one of this machine and these videos.
    """
    plan, settings = planned.plan, planned.plan.recipe.settings
    ranges = [np.asarray(_rows_to_encode(planned, shard), np.int64) for shard in plan.shards if shard.has_work]
    rows = np.concatenate([np.zeros(0, np.int64), *ranges]).astype(np.int64)
    work, bytes_per_second = plan.workload(rows), _bytes_per_second(planned)
    cost = estimate(work, settings=settings, bytes_per_second=bytes_per_second)
    if not len(rows):
        return cost
    load = os.getloadavg()[0]  # before the trials add to it
    if has_trials:
        has_bytes = bytes_per_second is not None or settings.bitrate is not None
        cost = corrected(cost, run_trials(plan, rows, work), work, settings=settings, has_bytes=has_bytes)
    num_shards = sum(shard.has_work for shard in plan.shards)
    return with_wall_time(cost, num_cores=num_cores(), num_shards=num_shards, load=load)


def with_wall_time(cost: Estimate, *, num_cores: int, num_shards: int, load: float) -> Estimate:
    """Return an estimate with the duration of the run, one worker a core.

    Args:
        num_shards: number of shards to make; a worker makes one after another.
        load: mean number of other processes that want a core. They get the same share of the cores as the workers.
    """
    low, high = cost.core_hours_range or (cost.core_hours, cost.core_hours)
    workers = min(num_cores, num_shards)
    unevenness = math.ceil(num_shards / workers) * workers / num_shards
    idle_hours = high * unevenness / workers
    slowdown = max(1.0, (workers + load) / num_cores)
    wall_hours_range = (low / workers, idle_hours * slowdown)
    return replace(cost, num_cores=num_cores, wall_hours_range=wall_hours_range, idle_hours=idle_hours)


def _rows_to_encode(planned: Planned, shard: ShardPlan) -> Sequence[int]:
    if shard.shard_id in planned.changes:
        return planned.changes[shard.shard_id].rows
    return () if shard.state == ShardState.CHANGED else shard.rows


def _bytes_per_second(planned: Planned) -> float | None:
    """Return the bytes per second of video of one committed shard of this variant; None if there is none."""
    for commit in planned.commits.values():
        if commit.files is None:
            continue
        try:
            frames = open_index(planned.variant_dir / commit.files.index)["num_frames"].to_numpy().sum()
        except (DamagedIndex, OSError):
            continue  # its shard is planned again; use another one
        return float(commit.files.tar_bytes * planned.plan.recipe.settings.fps_exact / int(frames))
    return None


def estimate_lines(cost: Estimate) -> list[str]:
    """Return what a plan costs, in words."""
    if not cost.video_hours:
        return []
    core_hours, size = duration_text(3600 * cost.core_hours), size_text(round(cost.size_bytes))
    if cost.core_hours_range is not None:
        core_hours = between(*(duration_text(3600 * hours) for hours in cost.core_hours_range))
    if cost.size_bytes_range is not None:
        size = between(*(size_text(round(one)) for one in cost.size_bytes_range))
    lines = [f"estimate {core_hours} of CPU time for {duration_text(3600 * cost.video_hours)} of video; {size}"]
    if cost.wall_hours_range is not None and cost.idle_hours is not None:
        first, busy = (duration_text(3600 * hours) for hours in cost.wall_hours_range)
        idle = duration_text(3600 * cost.idle_hours)
        trials = f"; measured by encoding 5 s of {counted(cost.num_trials, 'video')}" if cost.num_trials else ""
        cores = f"the {counted(cost.num_cores, 'core')} of this machine"
        load = "" if busy == idle else f", up to {busy} beside what else is running now"
        lines.append(f"         {between(first, idle)} on {cores}{load}{trials}")
    return lines
