"""The reports of `video`: plans and runs."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted, on_one_line
from clipmill.manifests.store import captions_path
from clipmill.manifests.units import duration_text
from clipmill.prep.core.disk_use import disk_use
from clipmill.prep.core.ending import retry_words
from clipmill.prep.core.failure_list import (
    MAX_NAMED,
    codes_line,
    failure_lines,
    first_failures,
    named_lines,
    note_lines,
)
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT
from clipmill.prep.core.lost_samples import lost_samples
from clipmill.prep.core.plan import ShardState
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    Report,
    changed_settings,
    next_line,
    states_lines,
    states_values,
    summary_report,
)
from clipmill.prep.core.run import Summary
from clipmill.prep.video.column import COLUMN
from clipmill.prep.video.cutting import EvenCutting, ShotCutting
from clipmill.prep.video.estimate import (
    Estimate,
    container_bytes,
    detection_core_s,
    estimate_lines,
    estimate_of,
    rows_to_encode,
)
from clipmill.prep.video.plan import Plan
from clipmill.prep.video.plan_inputs import Planned
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant

_SHORT_TAIL_S = 1  # too short for most clips
# Why shards that videos enter or leave are made or removed, by whether all of their videos do.
_MOVED = {
    (ShardState.NEW, True): "the split of the videos has changed",
    (ShardState.NEW, False): "new videos, videos that have become longer, or videos whose split has changed",
    (ShardState.ORPHANED, True): "the split of the videos has changed",
    (ShardState.ORPHANED, False): "the videos are no longer in the manifest, or their split has changed",
}
# States of shards whose files are not overwritten: `prep gc` removes them.
_REPLACED = (ShardState.CHANGED, ShardState.RETRY, ShardState.ORPHANED)


def plan_report(planned: Planned) -> Report:
    """Return the report of a plan: the work by state and reason, with an estimate.

    Raises:
        UserError: the table of captions is damaged.
    """
    if planned.plan.has_captions:
        captions_path(planned.data_dir)  # verified, because a run needs them
    plan, cost, against = planned.plan, estimate_of(planned), settings_against_current(planned)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in against)]
    new, moved = _why_new(planned), plan.shards_of_moved_videos(planned.commits)
    reasons = {shard.shard_id: new for shard in plan.shards if shard.state == ShardState.NEW}
    reasons |= {shard_id: change.because for shard_id, change in planned.changes.items() if change.because}
    reasons |= {
        shard.shard_id: _MOVED[shard.state, moved[shard.shard_id]]
        for shard in plan.shards
        if shard.shard_id in moved and shard.state in (ShardState.NEW, ShardState.ORPHANED)
    }
    lines += states_lines(plan.shards, reasons=reasons)
    lines += failure_lines(list(plan.failed_sources()), listed=None)
    lost, failed = (
        plan.lost_sources(),
        [failure for shard in plan.shards if shard.num_failed for failure in planned.commits[shard.shard_id].failures],
    )
    lines += lost_lines(lost)
    lines += retry_lines(failed, data_dir=planned.data_dir)
    has_work = any(shard.has_work for shard in plan.shards)
    cutting, tails = _cutting_values(plan), _tails_values(plan)
    num_noted, notes = plan.notes(max_videos=MAX_NAMED)
    lines += [*_cutting_lines(cutting), *_tails_lines(tails), *note_lines(notes, num_all=num_noted, indent=9)]
    disk = disk_use(
        planned.data_dir,
        column=VIDEO,
        variant=plan.recipe.variant,
        added_bytes=_written_bytes(planned, cost),
        replaced_bytes=sum(
            planned.commits[shard.shard_id].size_bytes for shard in plan.shards if shard.state in _REPLACED
        ),
    )
    if has_work:
        lines += [*audio_lines(planned), *estimate_lines(cost), *disk.lines()]
    command = None
    if (
        has_work
        or cutting.get("num_undetected_videos")
        or any(shard.state == ShardState.ORPHANED for shard in plan.shards)
    ):
        command = COLUMN.command_line(plan.recipe.as_dict(), data_dir=planned.data_dir)
        lines.append(next_line(command))
    elif can_be_retried(failed):
        command = shlex.join(retry_words(COLUMN, data=planned.data_dir))
        lines.append(next_line(command))
    else:
        lines.append(NOTHING_TO_DO if not failed else f"{NOTHING_TO_DO} until the sources can be read again")
    values = {
        "variant": plan.recipe.variant,
        "changed_settings": against,
        "num_videos": plan.num_videos,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unusable_videos": dict(plan.unusable),
        "lost_sources": dict(Counter(failure.code for failure in lost)),
        "failures": dict(Counter(failure.code for failure in failed)),
        "estimate": asdict(cost),
        "disk": disk.values(),
        "next": command,
        **cutting,
        **tails,
        **{"num_noted_videos": num_noted, "first_notes": notes},
    }
    return Report("\n".join(lines), values)


def lost_lines(lost: Sequence[Failure]) -> list[str]:
    """Return the sources that were readable once and are not any more, the first few by name."""
    lines = [
        f"lost     {counted(count, 'source')} that can no longer be read ({code}); existing chunks are kept"
        for code, count in Counter(failure.code for failure in lost).most_common()
    ]
    return [*lines, *named_lines(first_failures(lost), num_all=len(lost), listed=None, indent=" " * 9)]


def can_be_retried(failed: Sequence[Failure]) -> bool:
    """Return True if `prep retry` would try a failure again that a run leaves alone."""
    return any(failure.code not in SOURCE_AWAY | TRANSIENT for failure in failed)


def retry_lines(failed: Sequence[Failure], *, data_dir: Path) -> list[str]:
    """Return the failures of earlier runs for which chunks are missing, and what tries them again."""
    if not failed:
        return []
    codes = {failure.code for failure in failed}
    ways = ["`prep chunk` tries them again"] if codes & TRANSIENT else []
    ways += ["`prep chunk` tries them again as soon as the source can be read"] if codes & SOURCE_AWAY else []
    if can_be_retried(failed):
        ways.append(f"`{shlex.join(retry_words(COLUMN, data=data_dir))}` tries them again")
    lines = [f"missing  chunks, because of {counted(len(failed), 'earlier failure')}: {codes_line(failed)}"]
    lines += named_lines(first_failures(failed), num_all=len(failed), listed=None, indent=" " * 9)
    return [*lines, f"         {'; '.join(ways)}"]


def _written_bytes(planned: Planned, cost: Estimate) -> tuple[float, float]:
    """Return the lowest and highest size of what a run writes: tars of encoded and copied chunks, and indexes."""
    low, high = cost.size_bytes_range or (cost.size_bytes, cost.size_bytes)
    copied = sum(change.copied_bytes for change in planned.changes.values())
    # Estimates that come from stored tars have the rest already.
    return low + copied, high + copied + container_bytes(planned.plan, rows_to_encode(planned))


def audio_lines(planned: Planned) -> list[str]:
    """Return what is said of audio before the first chunks of a variant are made without it."""
    plan = planned.plan
    if planned.commits or plan.recipe.settings.audio != "drop" or not plan.num_with_audio:
        return []
    found = f"{plan.num_with_audio:,} of {counted(plan.num_videos, 'video')}"
    return [f"audio    of {found} is left out; --audio keep keeps it, without which the score `speech` is unknown"]


def other_settings_lines(planned: Planned) -> list[str]:
    """Return what a run with other settings than those of the current variant says before it begins; else nothing."""
    try:
        against, current = settings_against_current(planned), current_variant(planned.data_dir, VIDEO)
    except UserError:
        return []  # a damaged record, which the run writes again
    if not against or current is None:
        return []
    plan, variant = planned.plan, planned.plan.recipe.variant
    rows = rows_to_encode(planned)
    lines = [f"setting  {difference}" for difference in against]
    if len(rows) or any(shard.has_work for shard in plan.shards):
        chunks = counted(sum(len(span.span.chunk_frames) for span in plan.spans(rows.tolist())), "chunk")
        videos, length = counted(plan.num_videos_of(rows), "video"), duration_text(plan.workload(rows).seconds.sum())
        lines.append(f"variant  {variant}: {chunks} of {videos} to encode, {length} of video")
        plan_line = COLUMN.command_line(plan.recipe.as_dict(), data_dir=planned.data_dir).replace("chunk", "plan", 1)
        lines.append(f"         `{plan_line}` estimates time and disk")
    else:
        lost = lost_samples(planned.data_dir, VIDEO, variant=variant, former=current)
        lacking = f"lacks samples of the current one ({codes_line(lost)}), which stays current"
        lines.append(f"variant  {variant} {lacking if lost else 'is complete, and becomes the current one again'}")
    with suppress(UserError):  # a recipe of another version of clipmill
        kept = COLUMN.command_line(Variant.open(planned.data_dir, column=VIDEO).recipe, data_dir=planned.data_dir)
        lines.append(f"         {current} is kept until `prep gc`; to keep to its settings: {kept}")
    return lines


def _why_new(planned: Planned) -> str:
    """Return why chunks of new shards are encoded."""
    if planned.commits:
        return "new videos, or videos that have become longer"
    current = current_variant(planned.data_dir, VIDEO)
    return "not made yet" if current is None else "not made with these settings yet"


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


def _tails_values(plan: Plan) -> dict[str, Any]:
    """Return which videos end in a very short chunk, as JSON values; nothing with `--cut shots`."""
    if not isinstance(plan.cutting, EvenCutting):
        return {}
    fps = plan.recipe.settings.fps_exact
    found = plan.cutting.short_tails(max_frames=math.ceil(_SHORT_TAIL_S * fps))
    first = list(found)[:MAX_NAMED]
    lengths = zip(plan.video_ids(first), (float(found[video] / fps) for video in first), strict=True)
    return {"num_short_tails": len(found), "first_short_tails_s": dict(lengths)}


def _tails_lines(values: Mapping[str, Any]) -> list[str]:
    if not values.get("num_short_tails"):
        return []
    first = [f"{on_one_line(video)} {length_s:.2g} s" for video, length_s in values["first_short_tails_s"].items()]
    more = ", ..." if values["num_short_tails"] > len(first) else ""
    videos = counted(values["num_short_tails"], "video")
    return [
        f"tails    {videos} with a last chunk shorter than {_SHORT_TAIL_S} s: {', '.join(first)}{more}",
        "         kept: every frame is in a chunk; --tail merge adds it to the chunk before, --tail drop omits it",
    ]


def _cutting_lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    if values.get("num_undetected_videos"):
        length, cost = duration_text(values["undetected_s"]), duration_text(3600 * values["detection_core_hours"])
        lines.append(
            f"unknown  {counted(values['num_undetected_videos'], 'video')}, {length}:"
            f" shots not detected yet; prep chunk does so first, in about {cost} of CPU time"
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


def settings_against_current(planned: Planned) -> list[str]:
    """Return the settings in which a plan differs from the current variant."""
    recipe = planned.plan.recipe
    return changed_settings(planned.data_dir, VIDEO, variant=recipe.variant, recipe=recipe.as_dict())


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
