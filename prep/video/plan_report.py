"""Reports of `prep plan`: the work, reasons and cost of a run, or an explanation of one chunk or video (`--explain`).

Core-hours come from a model with two terms: the cost of reading is proportional to the number of source pixels, and the
cost of writing is proportional to the number of output pixels. Both terms were fitted to runs on natural videos. Trial
encodes (`run_trials`) correct them for this machine and these videos. The number of bytes follows from the bitrate, or
from measured averages, which the trials also correct. If shards are already committed, their mean number of bytes per
second is used, because it is more accurate.
"""

import math
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from clipmill.manifests.divided_videos import read_divided_videos
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, on_one_line, parse_bitrate, range_text, size_text
from clipmill.manifests.keys import split_key
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.store import captions_path, read_videos
from clipmill.prep.core.column import Addition
from clipmill.prep.core.failure_list import (
    MAX_ENTRIES,
    codes_line,
    entry_lines,
    failure_lines,
    first_failures,
    lost_source_lines,
    note_lines,
)
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT, FailureCode, SourceFailure
from clipmill.prep.core.other_splits import lost_lines, lost_times
from clipmill.prep.core.plan import ShardState, disk_use
from clipmill.prep.core.report import NOTHING_TO_DO, next_line, retry_arguments, states_lines, states_values
from clipmill.prep.core.work import Report
from clipmill.prep.engines.choice import num_cores as count_cores
from clipmill.prep.video.codecs import find_codec
from clipmill.prep.video.column import COLUMN, INDEX, column_of
from clipmill.prep.video.encode import Span, SpanPlan, encode_span
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan import Plan, Workload
from clipmill.prep.video.plan_inputs import PlanWithInputs, left_out_values, video_list_text
from clipmill.prep.video.settings import ChunkSettings
from clipmill.prep.video.span_task import StagedSources
from clipmill.prep.video.work import (
    audio_lines,
    differences_from_current,
    left_out_report,
    short_tails,
    sources_read_twice,
)
from clipmill.shards.columns import INDEXED, VIDEO
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import current_variant
from clipmill.shards.index import open_index
from clipmill.shards.opening import DamagedIndex
from clipmill.shards.timeline.model import Timeline

# CPU times, measured on an x86-64 server core at about 3 GHz.
_DECODE_S_PER_MEGAPIXEL = 0.0029
_DETECT_S_PER_FRAME = 0.0006  # time to scale a decoded frame for the shot detector, and to compare it
_CHUNK_BYTES = 5_000  # size of the MP4 header, the JSON member, the tar headers and the index columns
_FRAME_BYTES = 17  # size of a row in the packet table of the index
_INDEX_BYTES_PER_S = 3e8  # number of source bytes that `prep index` reads per core-second
_INDEX_ROW_BYTES, _INDEX_FRAME_BYTES = 3_000, 40  # size of an index row with its members; additional size per frame
_NO_RANGE = (1.0, 1.0, 1.0)
_NUM_VIDEOS = 3  # number of videos to encode in trials, in addition to the heaviest video
_SHORT_S, _LONG_S = 1.0, 4.0  # lengths of the two encoded sections of each video
OnSection = Callable[[str, Sequence[Path]], None]  # takes a video ID and the files of an encoded section
_IGNORE: OnSection = lambda video_id, segments: None  # noqa: E731
_MAX_COPY_BYTES = 512 << 20  # maximum size of a source that is copied for trials
# Reasons to make or remove shards that gain or lose videos. The key is (state, True if all videos of the shard move).
_MOVE_REASONS = {
    (ShardState.NEW, True): "the split of the videos has changed",
    (ShardState.NEW, False): "new videos, videos that have become longer, or videos whose split has changed",
    (ShardState.ORPHANED, True): "the split of the videos has changed",
    (ShardState.ORPHANED, False): "the videos are no longer in the manifest, or their split has changed",
}
# States of shards whose old files stay on disk until the user runs `prep gc`.
_REPLACED_STATES = (ShardState.CHANGED, ShardState.RETRY, ShardState.ORPHANED)


@dataclass(frozen=True)
class EncodeTrial:
    """Measured cost of encoding one second of a video.

    Attributes:
        row: Index of the video's span in the estimated workload.
        core_s: CPU time in seconds.
        size_bytes: Size of the output in bytes.
    """

    row: int
    core_s: float
    size_bytes: float


@dataclass(frozen=True)
class EncodeTrials:
    """The trial encodes of a plan.

    Attributes:
        skip_reasons: Reasons why videos were omitted; empty if no video was omitted.
    """

    trials: tuple[EncodeTrial, ...] = ()
    skip_reasons: tuple[str, ...] = ()


def run_trials(plan: Plan, rows: np.ndarray, work: Workload, *, on_section: OnSection = _IGNORE) -> EncodeTrials:
    """Encode sections of four of the videos to encode: a small, a medium, a large and the heaviest video.

    The heaviest video has the most source bytes per second, scaled to the resolution of the chunks. Content that takes
    many bytes in the source, such as grain and fast motion, is also expensive to encode, so this video gives the upper
    end of the range. Videos are omitted if they cannot be encoded, are too short, or require too large a copy. The
    encoded sections are not kept.

    Args:
        rows: Rows of the plan with the spans to encode, int64 [N].
        work: Result of `plan.workload(rows)`.
        on_section: Function to call with the ID of a video and the files of its longer section.
    """
    order = np.argsort(work.width * work.height * work.fps, kind="stable")
    scale = np.minimum(1.0, plan.recipe.settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    videos = plan.video_rows[rows]
    size_bytes, end_s = (np.asarray(plan.probes[name])[videos] for name in ("size_bytes", "end_s"))
    heaviest_index = int(np.argmax(size_bytes / end_s * scale**2))
    by_size = (int(order[(2 * part + 1) * len(order) // (2 * _NUM_VIDEOS)]) for part in range(_NUM_VIDEOS))
    indexes = sorted({heaviest_index, *by_size})
    trials, skip_reasons = [], []
    spans = plan.spans([int(rows[index]) for index in indexes])
    keeps_audio = plan.recipe.settings.audio == "keep"
    with tempfile.TemporaryDirectory() as folder, StagedSources(folder=Path(folder)) as sources:
        for index, span in zip(indexes, spans, strict=True):
            try:
                is_copied = is_remote(span.path) or not Timeline.from_json(span.source.timeline).is_continuous
                if is_copied and span.source.size_bytes > _MAX_COPY_BYTES:
                    size = size_text(span.source.size_bytes)
                    message = f"{span.path} takes {size}, but a plan copies at most {size_text(_MAX_COPY_BYTES)}"
                    raise SourceFailure(FailureCode.SOURCE_TOO_LARGE, message)
                path, source = sources.continuous(sources.path_of(span.path), span.source, keeps_audio=keeps_audio)
                sections, local_span = ((_SHORT_S, _IGNORE), (_LONG_S, on_section)), replace(span, source=source)
                costs = [
                    _measure_section(plan, local_span, path, length_s=length_s, on_section=function)
                    for length_s, function in sections
                ]
            except SourceFailure as failure:
                message = failure.message
                skip_reasons.append(message if span.path in message else f"{span.path}: {message}")
                continue
            except OSError as error:
                skip_reasons.append(f"{span.path}: {error.strerror or error}")
                continue
            # The difference between the costs of the two sections excludes the cost of starting the encoder.
            (short_s, short_core_s, short_bytes), (long_s, long_core_s, long_bytes) = costs
            if long_s > short_s:
                extra_s = long_s - short_s
                core_s, bytes_per_s = (long_core_s - short_core_s) / extra_s, (long_bytes - short_bytes) / extra_s
                if core_s <= 0:  # the difference is below the precision of the clock, so include the start
                    core_s = long_core_s / long_s
                if core_s > 0 and bytes_per_s > 0:
                    trials.append(EncodeTrial(index, core_s, bytes_per_s))
    return EncodeTrials(tuple(trials), tuple(skip_reasons))


def _measure_section(
    plan: Plan, span: SpanPlan, path: Path, *, length_s: float, on_section: OnSection
) -> tuple[float, float, int]:
    """Encode a section from the middle of a span; return (length in seconds, CPU seconds, bytes)."""
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
        on_section(span.video_id, encoded.segments)
        return float(num_frames / fps), encoded.cpu_s, sum(path.stat().st_size for path in encoded.segments)


def factor_range(measured_costs: Sequence[float], expected_costs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest ratio of measured to expected costs.

    The range extends at least a fifth of the median to each side, because the trials cover only a few videos.
    """
    ratios = np.asarray(measured_costs) / np.asarray(expected_costs)
    median = float(np.median(ratios))
    return median, min(float(ratios.min()), 0.8 * median), max(float(ratios.max()), 1.2 * median)


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of encoding. Chunks that are copied from old shards cost nothing.

    Attributes:
        core_hours_range, size_bytes_range: Lowest and highest value from trial encodes; None without trials.
        num_trials: Number of videos whose sections were encoded on this machine.
        lacking_trials: Reasons why other videos were omitted from the trials.
        num_cores: Number of cores of this machine that the run may use.
        wall_hours_range: Shortest duration of the run if all cores of this machine are idle, and longest duration under
            the current load.
        idle_hours: Longest duration if all cores are idle.
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
    """Estimate the cost of encoding `work`, scaled by the ratio of measured to expected costs of trial encodes.

    Args:
        bytes_per_second: Bytes per second of video, measured on shards of the same variant; None without such shards.
    """
    # Core-seconds per second of video on the machine where the constants were measured.
    codec = find_codec(settings.codec)
    scale = np.minimum(1.0, settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    source_megapixels_per_s = work.width * work.height * work.fps / 1e6
    output_megapixels_per_s = work.width * work.height * scale**2 * float(settings.fps_exact) / 1e6
    core_s_per_s = (
        source_megapixels_per_s * _DECODE_S_PER_MEGAPIXEL + output_megapixels_per_s * codec.encode_s_per_megapixel
    )
    bytes_per_s = output_megapixels_per_s * (1e6 * codec.bits_per_pixel / 8)
    # Trials correct the model by the ratio of measured to expected costs.
    core_factors = size_factors = _NO_RANGE
    if trials:
        core_factors = factor_range([trial.core_s for trial in trials], [core_s_per_s[trial.row] for trial in trials])
        size_factors = factor_range(
            [trial.size_bytes for trial in trials], [bytes_per_s[trial.row] for trial in trials]
        )
    core_hours = float((work.seconds * core_s_per_s).sum()) / 3600
    size_bytes = float((work.seconds * bytes_per_s).sum())
    if bytes_per_second is None and settings.bitrate is not None:
        bytes_per_second = parse_bitrate(settings.bitrate, flag="--bitrate") / 8
        size_bytes, size_factors = float(work.seconds.sum()) * bytes_per_second, _NO_RANGE
    elif bytes_per_second is not None:
        # Stored chunks of the variant provide a better mean than a few trials; the trials provide the range.
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


def estimate_of(full_plan: PlanWithInputs) -> Estimate:
    """Estimate the cost of the spans that must be encoded. Chunks that are only copied cost nothing.

    The function encodes short sections of some videos, so that the estimate is valid for this machine and these videos.
    """
    plan, rows = full_plan.plan, full_plan.rows_to_encode()
    num_shards = sum(shard.has_work for shard in plan.shards)
    if plan.recipe.settings.codec == INDEXED:
        cost = _index_estimate(plan, rows)
        return add_wall_time(cost, num_cores=count_cores(), num_shards=num_shards, load=0) if len(rows) else cost
    work, load = plan.workload(rows), os.getloadavg()[0]  # read the load before the trials increase it
    trials = run_trials(plan, rows, work) if len(rows) else EncodeTrials()
    cost = estimate(work, trials.trials, settings=plan.recipe.settings, bytes_per_second=_bytes_per_second(full_plan))
    cost = replace(cost, lacking_trials=trials.skip_reasons)
    return add_wall_time(cost, num_cores=count_cores(), num_shards=num_shards, load=load) if len(rows) else cost


def _index_estimate(plan: Plan, rows: np.ndarray) -> Estimate:
    """Estimate the cost of reading the sources of the spans in `rows` once, from the size of the sources."""
    work, videos = plan.workload(rows), np.unique(plan.video_rows[rows])
    size_bytes = np.asarray(plan.probes["size_bytes"])[videos]
    seconds, num_frames = work.seconds.sum(), (work.seconds * work.fps).sum()
    num_chunks = seconds / float(plan.recipe.settings.len_s) + len(videos)
    return Estimate(
        core_hours=float(size_bytes.sum()) / _INDEX_BYTES_PER_S / 3600,
        size_bytes=float(num_chunks * _INDEX_ROW_BYTES + num_frames * _INDEX_FRAME_BYTES),
        video_hours=float(seconds) / 3600,
    )


def add_wall_time(cost: Estimate, *, num_cores: int, num_shards: int, load: float) -> Estimate:
    """Add the duration of a run with one worker per core to an estimate.

    Args:
        num_shards: Number of shards to make; a worker makes one shard at a time.
        load: Mean number of other processes that require a core. Each gets the same CPU time as a worker.
    """
    low, high = cost.core_hours_range or (cost.core_hours, cost.core_hours)
    workers = min(num_cores, num_shards)
    unevenness = math.ceil(num_shards / workers) * workers / num_shards
    idle_hours = high * unevenness / workers
    slowdown = max(1.0, (workers + load) / num_cores)
    wall_hours_range = (low / workers, idle_hours * slowdown)
    return replace(cost, num_cores=num_cores, wall_hours_range=wall_hours_range, idle_hours=idle_hours)


def container_bytes(plan: Plan, rows: np.ndarray) -> float:
    """Return the number of bytes that shards with the spans in `rows` contain in addition to the encoded video."""
    settings = plan.recipe.settings
    seconds = plan.workload(rows).seconds
    num_chunks = np.ceil(seconds / float(settings.len_s)).sum()
    return float(num_chunks * _CHUNK_BYTES + seconds.sum() * float(settings.fps_exact) * _FRAME_BYTES)


def _bytes_per_second(full_plan: PlanWithInputs) -> float | None:
    """Return the bytes per second of video in one committed shard of this variant; None if no shard is readable."""
    for commit in full_plan.commits.values():
        if commit.files is None:
            continue
        try:
            frames = open_index(full_plan.variant_dir / commit.files.index)["num_frames"].to_numpy().sum()
        except (DamagedIndex, OSError):
            continue  # try the next shard
        return float(commit.files.tar_bytes * full_plan.plan.recipe.settings.fps_exact / int(frames))
    return None


def estimate_lines(cost: Estimate) -> list[str]:
    """Return the report lines about the cost of a plan."""
    if not cost.video_hours:
        return []
    core_hours, size = duration_text(3600 * cost.core_hours), size_text(round(cost.size_bytes))
    if cost.core_hours_range is not None:
        core_hours = range_text(*(duration_text(3600 * hours) for hours in cost.core_hours_range))
    if cost.size_bytes_range is not None:
        size = range_text(*(size_text(round(size_bytes)) for size_bytes in cost.size_bytes_range))
    lines = [f"estimate {core_hours} of CPU time for {duration_text(3600 * cost.video_hours)} of video; {size}"]
    if cost.wall_hours_range is not None and cost.idle_hours is not None:
        min_time, max_time = (duration_text(3600 * hours) for hours in cost.wall_hours_range)
        idle_time = duration_text(3600 * cost.idle_hours)
        trials = f"; measured by encoding 5 s of {count_noun(cost.num_trials, 'video')}" if cost.num_trials else ""
        cores = f"the {count_noun(cost.num_cores, 'core')} of this machine"
        load = "" if max_time == idle_time else f", up to {max_time} alongside the other processes that are running now"
        lines.append(f"         {range_text(min_time, idle_time)} on {cores}{load}{trials}")
    if cost.lacking_trials:
        subject = "some trials were" if cost.num_trials else "all trials were"
        basis = "" if cost.num_trials else "; the estimate is based on averages from other machines and videos"
        lines.append(f"         {subject} omitted: {on_one_line(cost.lacking_trials[0])}{basis}")
    return lines


def plan_report(full_plan: PlanWithInputs) -> Report:
    """Return the report of a plan: the work by state and reason, and its estimated cost.

    Raises:
        UserError: The table of captions is damaged.
    """
    if full_plan.plan.has_captions:
        captions_path(full_plan.data_dir)  # verify the table of captions, because a run requires it
    plan, cost, differences = full_plan.plan, estimate_of(full_plan), differences_from_current(full_plan)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in differences)]
    # Replace the generic reason of a state with the specific reason for a shard, if it is known.
    moved_shards = plan.shards_of_moved_videos(full_plan.commits)
    if full_plan.commits:
        new_reason = "new videos, or videos that have become longer"
    else:
        is_first = current_variant(full_plan.data_dir, VIDEO) is None
        new_reason = "not made yet" if is_first else "not made with these settings yet"
    reasons = {shard.shard_id: new_reason for shard in plan.shards if shard.state == ShardState.NEW}
    reasons |= {shard_id: change.reason for shard_id, change in full_plan.changes.items() if change.reason}
    reasons |= {
        shard.shard_id: _MOVE_REASONS[shard.state, moved_shards[shard.shard_id]]
        for shard in plan.shards
        if shard.shard_id in moved_shards and shard.state in (ShardState.NEW, ShardState.ORPHANED)
    }
    lines += states_lines(plan.shards, reasons=reasons, verb=(column := column_of(plan.recipe)).verb)
    lines += failure_lines(
        list(plan.failed_sources()), list_path=None, retry_command=retry_arguments(COLUMN, data=full_plan.data_dir)
    )
    lost_sources = plan.lost_sources()
    codes = dict(Counter(failure.code for failure in lost_sources).most_common())
    lines += [f"lost     {line}" for line in lost_source_lines(codes, is_indexed=column is INDEX)]
    lines += entry_lines(first_failures(lost_sources), num_all=len(lost_sources), list_path=None, indent=" " * 9)
    failures = [
        failure for shard in plan.shards if shard.num_failed for failure in full_plan.commits[shard.shard_id].failures
    ]
    lines += retry_lines(failures, full_plan)
    has_work = any(shard.has_work for shard in plan.shards)
    shots, tails, lost_time = _undetected_shots(plan), short_tails(plan), _time_lost_to_other_splits(full_plan)
    read_twice = sources_read_twice(full_plan)
    num_noted, notes = plan.notes(max_videos=MAX_ENTRIES)
    lines += [
        *shots.lines,
        *left_out_report(plan),
        *tails.lines,
        *lost_time.lines,
        *note_lines(notes, num_all=num_noted, indent=9),
    ]
    # A run writes tars with encoded and copied chunks, and indexes. The upper limit adds container overhead, which an
    # estimate from stored tars already includes.
    low, high = cost.size_bytes_range or (cost.size_bytes, cost.size_bytes)
    copied_bytes = sum(change.copied_bytes for change in full_plan.changes.values())
    disk = disk_use(
        full_plan.data_dir,
        column=VIDEO,
        variant=plan.recipe.variant,
        added_bytes=(low + copied_bytes, high + copied_bytes + container_bytes(plan, full_plan.rows_to_encode())),
        replaced_bytes=sum(
            full_plan.commits[shard.shard_id].size_bytes for shard in plan.shards if shard.state in _REPLACED_STATES
        ),
    )
    if has_work:
        lines += [*audio_lines(full_plan), *estimate_lines(cost), *read_twice.lines, *disk.lines()]
    command = None
    if (
        has_work
        or shots.values.get("num_undetected_videos")
        or any(shard.state == ShardState.ORPHANED for shard in plan.shards)
    ):
        command = COLUMN.command_line(plan.recipe.values, data_dir=full_plan.data_dir)
        lines.append(next_line(command))
    elif can_be_retried(failures):
        command = shlex.join(retry_arguments(COLUMN, data=full_plan.data_dir))
        lines.append(next_line(command))
    else:
        is_incomplete = failures or not plan.num_chunks or (lost_sources and column is INDEX)
        lines.append(f"{NOTHING_TO_DO} until the sources can be read again" if is_incomplete else NOTHING_TO_DO)
    values = {
        "variant": plan.recipe.variant,
        "changed_settings": differences,
        "num_videos": plan.num_videos,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unusable_videos": dict(plan.num_unusable),
        "lost_sources": codes,
        "failures": dict(Counter(failure.code for failure in failures)),
        "estimate": asdict(cost),
        "disk": disk.values(),
        "next": command,
        **shots.values,
        **left_out_values(plan),
        **tails.values,
        **lost_time.values,
        **read_twice.values,
        **{"num_noted_videos": num_noted, "first_notes": notes},
    }
    return Report("\n".join(lines), values)


def can_be_retried(failures: Sequence[Failure]) -> bool:
    """Return True if `prep retry` would retry a failure that a normal run does not retry."""
    return any(failure.code not in SOURCE_AWAY | TRANSIENT for failure in failures)


def retry_lines(failures: Sequence[Failure], full_plan: PlanWithInputs) -> list[str]:
    """Return lines about earlier failures that caused missing chunks, and about the commands that retry them."""
    if not failures:
        return []
    codes, command = {failure.code for failure in failures}, column_of(full_plan.plan.recipe).command
    hints = [f"`prep {command}` retries them"] if codes & TRANSIENT else []
    hints += [f"`prep {command}` retries them as soon as the source can be read"] if codes & SOURCE_AWAY else []
    if can_be_retried(failures):
        hints.append(f"`{shlex.join(retry_arguments(COLUMN, data=full_plan.data_dir))}` retries them")
    lines = [f"missing  chunks, because of {count_noun(len(failures), 'earlier failure')}: {codes_line(failures)}"]
    lines += entry_lines(first_failures(failures), num_all=len(failures), list_path=None, indent=" " * 9)
    return [*lines, f"         {'; '.join(hints)}"]


def _undetected_shots(plan: Plan) -> Addition:
    """Return the report lines about videos whose shots the run must detect first; empty with `--cut even`."""
    if plan.shots is None:
        return Addition([], {})
    videos = plan.shots.undetected_rows
    width, height, fps = (np.asarray(plan.probes[name])[videos] for name in ("width", "height", "fps"))
    lengths_s = plan.num_frames[videos] / float(plan.recipe.settings.fps_exact)
    source_megapixels = lengths_s * width * height * fps / 1e6
    core_s = source_megapixels * _DECODE_S_PER_MEGAPIXEL + lengths_s * fps * _DETECT_S_PER_FRAME
    num_videos, seconds, core_hours = len(videos), float(lengths_s.sum()), float(core_s.sum()) / 3600
    first_ids = plan.video_ids(videos[:MAX_ENTRIES].tolist())
    values = {
        "num_undetected_videos": num_videos,
        "undetected_s": seconds,
        "detection_core_hours": core_hours,
        "first_undetected_videos": first_ids,
    }
    lines = [
        f"unknown  {count_noun(num_videos, 'video')}, {duration_text(seconds)}: shots not detected yet;"
        f" `prep chunk` detects the shots first, in about {duration_text(3600 * core_hours)} of CPU time",
        f"         {video_list_text(first_ids, num_all=num_videos)}",
    ]
    return Addition(lines if num_videos else [], values)


def _time_lost_to_other_splits(full_plan: PlanWithInputs) -> Addition:
    """Return the report lines about time that splits lose to captions of other splits; empty if no time is lost."""
    divided_videos = read_divided_videos(full_plan.data_dir)
    if divided_videos is None:
        return Addition([], {})
    plan, us_per_frame = full_plan.plan, 1_000_000 / full_plan.plan.recipe.settings.fps_exact
    rows = np.flatnonzero(np.isin(plan.video_rows, divided_videos.video))
    video, times_us = list[int](), list[tuple[int, int]]()
    for row, span in zip(rows.tolist(), plan.spans(rows.tolist()), strict=True):
        boundaries = accumulate(span.span.chunk_frames, initial=span.span.first_frame)
        times_us += pairwise(round(frame * us_per_frame) for frame in boundaries)
        video += [int(plan.video_rows[row])] * len(span.span.chunk_frames)
    begin_us, end_us = np.array(times_us, np.int64).reshape(-1, 2).T
    splits = read_videos(full_plan.data_dir, columns=["split"])["split"].combine_chunks()
    times = lost_times(divided_videos, splits, video=np.array(video, np.int64), begin_us=begin_us, end_us=end_us)
    values = {"of_other_splits": {split: asdict(time) for split, time in times.items()}}
    return Addition(lost_lines(times, indent=9), values)


def explanation(full_plan: PlanWithInputs, name: str) -> Report:
    """Explain why a run would or would not make a chunk or a video.

    Args:
        name: Key of a chunk, or ID or source name of a video.

    Raises:
        UserError: The manifest does not contain the video, or several videos match.
    """
    plan = full_plan.plan
    video_id = name
    with suppress(ValueError):
        video_id = split_key(name)[0]
    if not plan.has_video(video_id) and plan.has_video(name):
        video_id = name
    if not plan.has_video(video_id):
        # Messages and caption tables name the source, with or without an extension.
        sources = (name, name.rpartition(".")[0])
        videos = read_videos(full_plan.data_dir).to_pylist()
        video_ids = [str(video["video_id"]) for video in videos if video["source_id"] in sources]
        if len(video_ids) != 1:
            raise UserError(
                f'the manifest has {len(video_ids) or "no"} videos named "{name}"',
                hint="use a key or video ID from `prep inspect`, or the name in the table of captions",
            )
        video_id = video_ids[0]
    shards = [shard for shard in plan.shards if any(span.video_id == video_id for span in plan.spans(shard.rows))]
    source_failures = [failure for failure in plan.failed_sources() if failure.video_id == video_id]
    chunk_failures = [
        failure
        for shard in shards
        if shard.shard_id in full_plan.commits
        for failure in full_plan.commits[shard.shard_id].failures
        if failure.video_id == video_id
    ]
    settings = differences_from_current(full_plan)
    shots = plan.shots_of_video(video_id)
    values = {
        "video_id": video_id,
        "variant": plan.recipe.variant,
        "changed_settings": settings,
        "unusable": [asdict(failure) for failure in source_failures],
        "shards": [{"shard_id": shard.shard_id, "state": str(shard.state), "reason": shard.reason} for shard in shards],
        "failures": [asdict(failure) for failure in chunk_failures],
        "notes": (notes := plan.notes_of(video_id)),
        **({} if shots is None else asdict(shots)),
    }
    lines = [f"{name}: video {video_id} in variant {plan.recipe.variant}"]
    lines += [f"setting  {difference}" for difference in settings]
    for shard in shards:
        is_partial = shard.state == ShardState.CURRENT and chunk_failures
        reason = "chunks of the video are missing" if is_partial else shard.reason
        lines.append(f"shard {shard.shard_id:06d}  {shard.state}: {reason}")
    lines += retry_lines(chunk_failures, full_plan)
    lines += [f"unusable {failure.code}: {failure.message}" for failure in source_failures]
    lines += [f"note     {note}" for note in notes]
    if shots is not None and not source_failures:
        lines += [
            f"left out {begin_s:.3f} to {end_s:.3f} s: shorter than --min-len" for begin_s, end_s in shots.left_out_s
        ]
        lines += [] if shots.is_detected else ["unknown  shots not detected yet"]
    return Report("\n".join(lines), values)
