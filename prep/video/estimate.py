"""The estimated cost of a `video` plan in core-hours and bytes, and how long a run takes on this machine.

Core-hours come from a model with two terms: reading is proportional to the source's pixels, writing to the output's.
Both were fitted to runs on natural videos; trial encodes (`run_trials`) correct them for this machine and these videos.
Bytes follow from the bitrate, or come from measured averages, which the trials correct likewise; shards that are
already committed give a better mean.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clipmill.manifests.formatting import count_noun, duration_text, on_one_line, parse_bitrate, range_text, size_text
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.engines.choice import num_cores
from clipmill.prep.video.codecs import codec_named
from clipmill.prep.video.encode import Span, SpanPlan, encode_span
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan import Plan, Workload
from clipmill.prep.video.plan_inputs import Planned
from clipmill.prep.video.settings import ChunkSettings
from clipmill.prep.video.span_task import StagedSources
from clipmill.shards.index import open_index
from clipmill.shards.opening import DamagedIndex
from clipmill.shards.timeline.model import Timeline

# Core-seconds per megapixel, measured on an x86-64 server core at about 3 GHz.
_DECODE_S_PER_MEGAPIXEL = 0.0029
_DETECT_S_PER_FRAME = 0.0006  # to scale a decoded frame to the detector's size and compare it
_CHUNK_BYTES = 5_000  # of the mp4's header, the json, the blocks of the tar and the columns of the index
_FRAME_BYTES = 17  # of the packet table in the index
_NO_RANGE = (1.0, 1.0, 1.0)


_NUM_VIDEOS = 3  # and the heaviest one
_SHORT_S, _LONG_S = 1.0, 4.0
_MAX_COPY_BYTES = 512 << 20  # of a remote source


@dataclass(frozen=True)
class EncodeTrial:
    """Cost of one second of a video.

    Attributes:
        row: index in the workload that was estimated.
    """

    row: int
    core_s: float
    size_bytes: float


@dataclass(frozen=True)
class EncodeTrials:
    """The trial encodes of a plan.

    Attributes:
        lacking: Why videos were left out, one reason after another; empty if none was.
    """

    found: tuple[EncodeTrial, ...] = ()
    lacking: tuple[str, ...] = ()


def run_trials(plan: Plan, rows: np.ndarray, work: Workload) -> EncodeTrials:
    """Encode sections of videos that a plan has work for: a small one, a medium one, a large one and the heaviest one.

    The heaviest one has the most bytes per second at the size of the chunks: what took much in its source, such as
    grain and fast motion, takes much in chunks as well. Its costs are the upper end of the range. Videos that cannot be
    encoded, are too short, or are remote and too large, are left out; nothing is kept.

    Args:
        rows: rows of the layout with work, int64[N].
        work: `plan.workload(rows)`.
    """
    order = np.argsort(work.width * work.height * work.fps, kind="stable")
    scale = np.minimum(1.0, plan.recipe.settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    heaviest = int(np.argmax(plan.source_bytes_per_s(rows) * scale**2))
    by_size = (int(order[(2 * part + 1) * len(order) // (2 * _NUM_VIDEOS)]) for part in range(_NUM_VIDEOS))
    chosen = sorted({heaviest, *by_size})
    found, lacking = [], []
    spans = plan.spans([int(rows[index]) for index in chosen])
    with StagedSources() as sources:
        for index, span in zip(chosen, spans, strict=True):
            if not Timeline.from_json(span.source.timeline).is_continuous:
                continue  # a copy of the file would have to be made first
            try:
                if is_remote(span.path) and span.source.size_bytes > _MAX_COPY_BYTES:
                    size = size_text(span.source.size_bytes)
                    message = f"{span.path} has {size}, and a plan copies up to {size_text(_MAX_COPY_BYTES)}"
                    raise SourceFailure(FailureCode.SOURCE_TOO_LARGE, message)
                path = sources.path_of(span.path)
                costs = [_cost(plan, span, path, length_s=length_s) for length_s in (_SHORT_S, _LONG_S)]
            except SourceFailure as failure:
                lacking.append(failure.message if span.path in failure.message else f"{span.path}: {failure.message}")
                continue
            except OSError as error:
                lacking.append(f"{span.path}: {error.strerror or error}")
                continue
            (short_s, short_core_s, short_bytes), (long_s, long_core_s, long_bytes) = costs
            if long_s > short_s:
                more_s = long_s - short_s
                core_s, size_bytes = (long_core_s - short_core_s) / more_s, (long_bytes - short_bytes) / more_s
                if core_s <= 0:  # both take less than a clock tells apart: the start of the encoder counts too
                    core_s = long_core_s / long_s
                if core_s > 0 and size_bytes > 0:
                    found.append(EncodeTrial(index, core_s, size_bytes))
    return EncodeTrials(tuple(found), tuple(lacking))


def _cost(plan: Plan, span: SpanPlan, path: Path, *, length_s: float) -> tuple[float, float, int]:
    """Encode a section in the middle of a span of a local file; return its length in seconds, CPU seconds and bytes."""
    fps = plan.recipe.settings.fps_exact
    num_frames = min(span.span.num_frames, round(length_s * fps))
    first_frame = span.span.first_frame + (span.span.num_frames - num_frames) // 2
    section = Span(index=span.span.index, first_frame=first_frame, chunk_frames=(num_frames,), is_last=True)
    with tempfile.TemporaryDirectory() as folder:
        encoded = encode_span(
            path,
            source=span.source,
            span=section,
            recipe=plan.recipe,
            program=find_ffmpeg().path,
            folder=Path(folder),
        )
        return float(num_frames / fps), encoded.cpu_s, sum(path.stat().st_size for path in encoded.segments)


def factor_range(measured: Sequence[float], expected: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest ratio of measured to expected costs.

    The range is at least a fifth wide to each side: few videos say little about many.
    """
    ratios = np.asarray(measured) / np.asarray(expected)
    middle = float(np.median(ratios))
    return middle, min(float(ratios.min()), 0.8 * middle), max(float(ratios.max()), 1.2 * middle)


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of encoding; chunks copied from old shards count as free.

    Attributes:
        core_hours_range, size_bytes_range: lowest and highest, from trial encodes; None without any.
        num_trials: number of videos of which sections were encoded on this machine.
        lacking_trials: why other videos were left out of the trials.
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
    lacking_trials: tuple[str, ...] = ()
    num_cores: int = 1
    wall_hours_range: tuple[float, float] | None = None
    idle_hours: float | None = None


def estimate(
    work: Workload,
    trials: Sequence[EncodeTrial] = (),
    *,
    settings: ChunkSettings,
    bytes_per_second: float | None = None,
) -> Estimate:
    """Estimate the cost of encoding `work`, scaled by what trial encodes cost in comparison with their own estimates.

    Args:
        bytes_per_second: bytes per second of video, measured on shards of the same variant; None if there are none yet.
    """
    codec = codec_named(settings.codec)
    scale = np.minimum(1.0, settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    source_megapixels_per_s = work.width * work.height * work.fps / 1e6
    output_megapixels_per_s = work.width * work.height * scale**2 * float(settings.fps_exact) / 1e6
    core_s_per_s = (
        source_megapixels_per_s * _DECODE_S_PER_MEGAPIXEL + output_megapixels_per_s * codec.encode_s_per_megapixel
    )
    bytes_per_s = output_megapixels_per_s * (1e6 * codec.bits_per_pixel / 8)
    core_factors = size_factors = _NO_RANGE
    if trials:
        core_factors = factor_range([one.core_s for one in trials], [core_s_per_s[one.row] for one in trials])
        size_factors = factor_range([one.size_bytes for one in trials], [bytes_per_s[one.row] for one in trials])
    core_hours = float((work.seconds * core_s_per_s).sum()) / 3600
    size_bytes = float((work.seconds * bytes_per_s).sum())
    if bytes_per_second is None and settings.bitrate is not None:
        bytes_per_second = parse_bitrate(settings.bitrate, flag="--bitrate") / 8
        size_bytes, size_factors = float(work.seconds.sum()) * bytes_per_second, _NO_RANGE
    elif bytes_per_second is not None:
        # Other videos of the variant: a better mean than that of few trials, which say what these may take.
        low, high = _range(size_bytes, size_factors)
        size_bytes = float(work.seconds.sum()) * bytes_per_second
        if trials:
            size_factors = (1.0, min(low / size_bytes, 0.8), max(high / size_bytes, 1.2))
    return Estimate(
        core_hours=core_hours * core_factors[0],
        size_bytes=size_bytes * size_factors[0],
        video_hours=float(work.seconds.sum()) / 3600,
        core_hours_range=None if core_factors is _NO_RANGE else _range(core_hours, core_factors),
        size_bytes_range=None if size_factors is _NO_RANGE else _range(size_bytes, size_factors),
        num_trials=len(trials),
    )


def _range(value: float, factors: tuple[float, float, float]) -> tuple[float, float]:
    _, low, high = factors
    return value * low, value * high


def detection_core_s(work: Workload) -> np.ndarray:
    """Estimate the core-seconds for detecting the shots of `work`."""
    source_megapixels = work.seconds * work.width * work.height * work.fps / 1e6
    return np.asarray(source_megapixels * _DECODE_S_PER_MEGAPIXEL + work.seconds * work.fps * _DETECT_S_PER_FRAME)


def estimate_of(planned: Planned) -> Estimate:
    """Estimate the cost of the shards that have to be encoded; shards that are only rewritten count as free.

    Short sections of some videos are encoded, so that the estimate is one of this machine and these videos.
    """
    plan, rows = planned.plan, planned.rows_to_encode()
    work, load = plan.workload(rows), os.getloadavg()[0]  # before the trials add to it
    trials = run_trials(plan, rows, work) if len(rows) else EncodeTrials()
    cost = estimate(work, trials.found, settings=plan.recipe.settings, bytes_per_second=_bytes_per_second(planned))
    cost = replace(cost, lacking_trials=trials.lacking)
    num_shards = sum(shard.has_work for shard in plan.shards)
    return with_wall_time(cost, num_cores=num_cores(), num_shards=num_shards, load=load) if len(rows) else cost


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


def container_bytes(plan: Plan, rows: np.ndarray) -> float:
    """Return the size of what a shard holds beside the encoded video of the spans in the given rows of the plan."""
    settings = plan.recipe.settings
    seconds = plan.workload(rows).seconds
    num_chunks = np.ceil(seconds / float(settings.len_s)).sum()
    return float(num_chunks * _CHUNK_BYTES + seconds.sum() * float(settings.fps_exact) * _FRAME_BYTES)


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
        core_hours = range_text(*(duration_text(3600 * hours) for hours in cost.core_hours_range))
    if cost.size_bytes_range is not None:
        size = range_text(*(size_text(round(one)) for one in cost.size_bytes_range))
    lines = [f"estimate {core_hours} of CPU time for {duration_text(3600 * cost.video_hours)} of video; {size}"]
    if cost.wall_hours_range is not None and cost.idle_hours is not None:
        first, busy = (duration_text(3600 * hours) for hours in cost.wall_hours_range)
        idle = duration_text(3600 * cost.idle_hours)
        trials = f"; measured by encoding 5 s of {count_noun(cost.num_trials, 'video')}" if cost.num_trials else ""
        cores = f"the {count_noun(cost.num_cores, 'core')} of this machine"
        load = "" if busy == idle else f", up to {busy} beside what else is running now"
        lines.append(f"         {range_text(first, idle)} on {cores}{load}{trials}")
    if cost.lacking_trials:
        what = "some videos were" if cost.num_trials else "no video was"
        basis = "" if cost.num_trials else "; the estimate rests on averages of other machines and videos"
        verb = "not tried" if cost.num_trials else "tried"
        lines.append(f"         {what} {verb}: {on_one_line(cost.lacking_trials[0])}{basis}")
    return lines
