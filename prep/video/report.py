"""The report of a `video` plan: the work, its reasons, and an estimate in core-hours and bytes.

Bytes are estimated from shards that are already committed, otherwise from the bitrate or from measured averages.
Core-hours come from a model with two terms: reading is proportional to the source's pixels, writing to the output's.
Both were fitted to runs on natural videos; expect the right order of magnitude, not an exact time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manifests.errors import UserError
from manifests.keys import split_key
from manifests.quoting import counted, on_one_line
from prep.core.column import VIDEO
from prep.core.failure_list import MAX_NAMED
from prep.core.plan import ShardState
from prep.core.report import Report, changed_settings, size_text, states_lines, states_values, summary_report
from prep.core.run import Summary
from prep.video.codecs import codec_named
from prep.video.cutting import ShotCutting
from prep.video.plan import Plan, Workload
from prep.video.planning import Planned
from prep.video.settings import ChunkSettings, bits_per_second
from shards.damage import DamagedIndex
from shards.index import open_index

# Core-seconds per megapixel, measured on an x86-64 server core at about 3 GHz.
_DECODE_S_PER_MEGAPIXEL = 0.0029
_DETECT_S_PER_FRAME = 0.0006  # to scale a decoded frame to the detector's size and compare it


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of encoding; chunks copied from old shards count as free."""

    core_hours: float
    size_bytes: float
    video_hours: float


def estimate(work: Workload, *, settings: ChunkSettings, bytes_per_second: float | None) -> Estimate:
    """Estimate the cost of encoding `work`.

    Args:
        bytes_per_second: bytes per second of video, measured on shards of the same variant; None if there are none yet.
    """
    codec = codec_named(settings.codec)
    source_pixels = work.width * work.height
    scale = np.minimum(1.0, settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    output_megapixels_per_s = source_pixels * scale**2 * float(settings.fps_exact) / 1e6
    source_megapixels_per_s = source_pixels * work.fps / 1e6
    core_s = work.seconds * (
        source_megapixels_per_s * _DECODE_S_PER_MEGAPIXEL + output_megapixels_per_s * codec.encode_s_per_megapixel
    )
    video_s = float(work.seconds.sum())
    if bytes_per_second is not None:
        size_bytes = video_s * bytes_per_second
    elif settings.bitrate is not None:
        size_bytes = video_s * bits_per_second(settings.bitrate) / 8
    else:
        size_bytes = float((work.seconds * output_megapixels_per_s).sum()) * 1e6 * codec.bits_per_pixel / 8
    return Estimate(core_hours=float(core_s.sum()) / 3600, size_bytes=size_bytes, video_hours=video_s / 3600)


def detection_core_s(work: Workload) -> np.ndarray:
    """Estimate the core-seconds for detecting the shots of `work`."""
    source_megapixels = work.seconds * work.width * work.height * work.fps / 1e6
    return np.asarray(source_megapixels * _DECODE_S_PER_MEGAPIXEL + work.seconds * work.fps * _DETECT_S_PER_FRAME)


def estimate_of(planned: Planned) -> Estimate:
    """Estimate the cost of the shards that have to be encoded; shards that are only rewritten count as free."""
    plan = planned.plan
    ranges = [np.asarray(shard.rows) for shard in plan.shards if shard.has_work and shard.state != ShardState.CHANGED]
    work = plan.workload(np.concatenate([np.zeros(0, np.int64), *ranges]).astype(np.int64))
    return estimate(work, settings=plan.recipe.settings, bytes_per_second=_bytes_per_second(planned))


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


def plan_report(planned: Planned) -> Report:
    """Return the report of a plan: the work by state and reason, with an estimate."""
    plan, cost = planned.plan, estimate_of(planned)
    against = _changed_settings(planned)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in against)]
    lines += states_lines(plan.shards)
    lines += [f"unusable {counted(count, 'video')}: {code}" for code, count in sorted(plan.unusable.items())]
    has_work = any(shard.has_work for shard in plan.shards)
    cutting = _cutting_values(plan)
    lines += _cutting_lines(cutting)
    if has_work:
        lines.append(
            f"estimate {_hours(cost.core_hours)} of CPU time for {_hours(cost.video_hours)} of video,"
            f" {size_text(round(cost.size_bytes))}"
        )
    elif not cutting.get("num_undetected_videos"):
        lines.append("nothing to do")
    values = {
        "variant": plan.recipe.variant,
        "changed_settings": against,
        "num_videos": plan.num_videos,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unusable_videos": dict(plan.unusable),
        "estimate": asdict(cost),
        **cutting,
    }
    return Report("\n".join(lines), values)


def _cutting_values(plan: Plan) -> dict[str, Any]:
    """Return what the plan says of shots, as JSON values; nothing with `--cut even`."""
    if plan.shots is None or not isinstance(plan.cutting, ShotCutting):
        return {}
    work, cutting = plan.detection_work(), plan.cutting
    return {
        "num_undetected_videos": len(work.seconds),
        "undetected_s": float(work.seconds.sum()),
        "detection_core_hours": float(detection_core_s(work).sum()) / 3600,
        "first_undetected_videos": plan.video_ids(plan.shots.undetected[:MAX_NAMED].tolist()),
        "num_left_out": cutting.num_left_out,
        "left_out_s": float(cutting.frames_left_out / plan.recipe.settings.fps_exact),
        "num_left_out_videos": len(cutting.videos_left_out),
        "first_left_out_videos": plan.video_ids(cutting.videos_left_out[:MAX_NAMED]),
    }


def _cutting_lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    if values.get("num_undetected_videos"):
        lines.append(
            f"unknown  {counted(values['num_undetected_videos'], 'video')}, {_hours(values['undetected_s'] / 3600)}:"
            f" shots not detected yet; prep chunk does so first, in about {_hours(values['detection_core_hours'])} of"
            " CPU time"
        )
        first, num_all = values["first_undetected_videos"], values["num_undetected_videos"]
        lines.append(f"         {_named(first, num_all=num_all)}")
    return lines + left_out_lines(values)


def left_out_lines(values: Mapping[str, Any]) -> list[str]:
    """Return what is said of the shots that are in no chunk."""
    if not values.get("num_left_out"):
        return []
    count, seconds = values["num_left_out"], values["left_out_s"]
    length = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
    return [
        f"left out {counted(count, 'shot')}, {length}: shorter than --min-len, and no neighbour has room",
        f"         in {_named(values['first_left_out_videos'], num_all=values['num_left_out_videos'])}",
    ]


def _named(video_ids: Sequence[str], *, num_all: int) -> str:
    """Return the names of the first few videos, and the number of the others."""
    more = f", and {num_all - len(video_ids):,} more" if num_all > len(video_ids) else ""
    return f"{on_one_line(', '.join(video_ids))}{more}"


def _changed_settings(planned: Planned) -> list[str]:
    recipe = planned.plan.recipe
    return changed_settings(planned.data_dir, VIDEO, variant=recipe.variant, recipe=recipe.as_dict())


def explanation(planned: Planned, name: str) -> Report:
    """Explain why one chunk, or one video, would be made or not.

    Raises:
        UserError: the manifest does not contain the video.
    """
    plan = planned.plan
    try:
        video_id = split_key(name)[0]
    except ValueError:
        video_id = name
    if not plan.has_video(video_id) and plan.has_video(name):
        video_id = name
    if not plan.has_video(video_id):
        raise UserError(
            f'no video "{video_id}" in the manifest', hint="give a key or video ID as shown by `prep inspect`"
        )
    shards = [shard for shard in plan.shards if any(span.video_id == video_id for span in plan.spans(shard.rows))]
    failed = [failure for failure in plan.failed_sources() if failure.video_id == video_id]
    settings = _changed_settings(planned)
    shots = plan.shots_of_video(video_id)
    values = {
        "video_id": video_id,
        "variant": plan.recipe.variant,
        "changed_settings": settings,
        "unusable": [asdict(failure) for failure in failed],
        "shards": [{"shard_id": shard.shard_id, "state": str(shard.state), "reason": shard.reason} for shard in shards],
        **({} if shots is None else asdict(shots)),
    }
    lines = [f"{name}: video {video_id} in variant {plan.recipe.variant}"]
    lines += [f"setting  {difference}" for difference in settings]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in shards]
    lines += [f"unusable {failure.code}: {failure.message}" for failure in failed]
    if shots is not None and not failed:
        lines += [
            f"left out {begin_s:.3f} to {end_s:.3f} s: shorter than --min-len" for begin_s, end_s in shots.left_out_s
        ]
        lines += [] if shots.is_detected else ["unknown  shots not detected yet"]
    return Report("\n".join(lines), values)


def chunk_summary(summary: Summary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    speed = None
    if summary.cpu_s and summary.encoded_s:
        speed = f"{summary.encoded_s / summary.cpu_s:.1f}x real time per core ({summary.cpu_s:.1f} s of CPU time)"
    report = summary_report(summary, listed=listed, speed=speed)
    if not isinstance(summary, ShotSummary):
        return report
    lines = report.text.splitlines()
    if summary.num_searched:
        took = f"{summary.detection_cpu_s:.1f} s of CPU time"
        lines.append(f"shots    detected in {counted(summary.num_searched, 'source')} ({took})")
    return Report("\n".join([*lines, *left_out_lines(report.values)]), report.values)


@dataclass
class ShotSummary(Summary):
    """Result of a run with `--cut shots`.

    Attributes:
        num_searched: number of sources whose shots were detected in this run.
        detection_cpu_s: CPU time of this detection in seconds.
        num_left_out: number of shots that are in no chunk.
        left_out_s: their total length in seconds.
        num_left_out_videos: number of videos with such shots.
        first_left_out_videos: ids of the first few of them.
    """

    num_searched: int = 0
    detection_cpu_s: float = 0.0
    num_left_out: int = 0
    left_out_s: float = 0.0
    num_left_out_videos: int = 0
    first_left_out_videos: list[str] = field(default_factory=list)


def with_cutting(summary: Summary, planned: Planned) -> Summary:
    """Return the summary of a run, with what `--cut shots` adds to it."""
    values = _cutting_values(planned.plan)
    if not values:
        return summary
    detection = planned.detection
    if detection is not None:
        summary.refused_workers = list(dict.fromkeys([*detection.refused, *summary.refused_workers]))
    return ShotSummary(
        **vars(summary),
        num_searched=0 if detection is None else detection.num_videos,
        detection_cpu_s=0.0 if detection is None else detection.cpu_s,
        num_left_out=values["num_left_out"],
        left_out_s=values["left_out_s"],
        num_left_out_videos=values["num_left_out_videos"],
        first_left_out_videos=values["first_left_out_videos"],
    )


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
