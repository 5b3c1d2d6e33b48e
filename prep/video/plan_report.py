"""The reports of `prep plan`: what a run would do, why, and its cost; with `--explain`, of one chunk or video."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, on_one_line
from clipmill.manifests.keys import split_key
from clipmill.manifests.store import captions_path, read_videos
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
from clipmill.prep.core.plan import ShardState
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    Report,
    next_line,
    states_lines,
    states_values,
)
from clipmill.prep.video.column import COLUMN
from clipmill.prep.video.cutting import EvenCutting
from clipmill.prep.video.estimate import (
    Estimate,
    container_bytes,
    detection_core_s,
    estimate_lines,
    estimate_of,
)
from clipmill.prep.video.plan import Plan
from clipmill.prep.video.plan_inputs import Planned, left_out_values, named_videos
from clipmill.prep.video.work import audio_lines, left_out_report, settings_against_current
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import current_variant

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
    lines += failure_lines(list(plan.failed_sources()), listed=None, retry=retry_words(COLUMN, data=planned.data_dir))
    lost, failed = (
        plan.lost_sources(),
        [failure for shard in plan.shards if shard.num_failed for failure in planned.commits[shard.shard_id].failures],
    )
    lines += lost_lines(lost)
    lines += retry_lines(failed, data_dir=planned.data_dir)
    has_work = any(shard.has_work for shard in plan.shards)
    cutting, tails = {**_cutting_values(plan), **left_out_values(plan)}, _tails_values(plan)
    num_noted, notes = plan.notes(max_videos=MAX_NAMED)
    lines += [
        *_cutting_lines(cutting),
        *left_out_report(plan),
        *_tails_lines(tails),
        *note_lines(notes, num_all=num_noted, indent=9),
    ]
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
        command = COLUMN.command_line(plan.recipe.values, data_dir=planned.data_dir)
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
        f"lost     {count_noun(count, 'source')} that can no longer be read ({code}); existing chunks are kept"
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
    lines = [f"missing  chunks, because of {count_noun(len(failed), 'earlier failure')}: {codes_line(failed)}"]
    lines += named_lines(first_failures(failed), num_all=len(failed), listed=None, indent=" " * 9)
    return [*lines, f"         {'; '.join(ways)}"]


def _written_bytes(planned: Planned, cost: Estimate) -> tuple[float, float]:
    """Return the lowest and highest size of what a run writes: tars of encoded and copied chunks, and indexes."""
    low, high = cost.size_bytes_range or (cost.size_bytes, cost.size_bytes)
    copied = sum(change.copied_bytes for change in planned.changes.values())
    # Estimates that come from stored tars have the rest already.
    return low + copied, high + copied + container_bytes(planned.plan, planned.rows_to_encode())


def _why_new(planned: Planned) -> str:
    """Return why chunks of new shards are encoded."""
    if planned.commits:
        return "new videos, or videos that have become longer"
    current = current_variant(planned.data_dir, VIDEO)
    return "not made yet" if current is None else "not made with these settings yet"


def _cutting_values(plan: Plan) -> dict[str, Any]:
    """Return what the plan says of shots, as JSON values; nothing with `--cut even`."""
    if plan.shots is None:
        return {}
    work = plan.detection_work()
    return {
        "num_undetected_videos": len(work.seconds),
        "undetected_s": float(work.seconds.sum()),
        "detection_core_hours": float(detection_core_s(work).sum()) / 3600,
        "first_undetected_videos": plan.video_ids(plan.shots.undetected[:MAX_NAMED].tolist()),
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
    videos = count_noun(values["num_short_tails"], "video")
    return [
        f"tails    {videos} with a last chunk shorter than {_SHORT_TAIL_S} s: {', '.join(first)}{more}",
        "         kept: every frame is in a chunk; --tail merge adds it to the chunk before, --tail drop omits it",
    ]


def _cutting_lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    if values.get("num_undetected_videos"):
        length, cost = duration_text(values["undetected_s"]), duration_text(3600 * values["detection_core_hours"])
        lines.append(
            f"unknown  {count_noun(values['num_undetected_videos'], 'video')}, {length}:"
            f" shots not detected yet; prep chunk does so first, in about {cost} of CPU time"
        )
        first, num_all = values["first_undetected_videos"], values["num_undetected_videos"]
        lines.append(f"         {named_videos(first, num_all=num_all)}")
    return lines


def explanation(planned: Planned, name: str) -> Report:
    """Explain why one chunk, or one video, would be made or not.

    Raises:
        UserError: the manifest does not contain the video.
    """
    plan = planned.plan
    video_id = name
    with suppress(ValueError):
        video_id = split_key(name)[0]
    if not plan.has_video(video_id) and plan.has_video(name):
        video_id = name
    if not plan.has_video(video_id):
        video_id = _id_of_source(planned.data_dir, name)
    shards = [shard for shard in plan.shards if any(span.video_id == video_id for span in plan.spans(shard.rows))]
    failed = [failure for failure in plan.failed_sources() if failure.video_id == video_id]
    missing = [
        failure
        for shard in shards
        if shard.shard_id in planned.commits
        for failure in planned.commits[shard.shard_id].failures
        if failure.video_id == video_id
    ]
    settings = settings_against_current(planned)
    shots = plan.shots_of_video(video_id)
    values = {
        "video_id": video_id,
        "variant": plan.recipe.variant,
        "changed_settings": settings,
        "unusable": [asdict(failure) for failure in failed],
        "shards": [{"shard_id": shard.shard_id, "state": str(shard.state), "reason": shard.reason} for shard in shards],
        "failures": [asdict(failure) for failure in missing],
        "notes": (notes := plan.notes_of(video_id)),
        **({} if shots is None else asdict(shots)),
    }
    lines = [f"{name}: video {video_id} in variant {plan.recipe.variant}"]
    lines += [f"setting  {difference}" for difference in settings]
    for shard in shards:
        is_partial = shard.state == ShardState.CURRENT and missing
        reason = "chunks of the video are missing" if is_partial else shard.reason
        lines.append(f"shard {shard.shard_id:06d}  {shard.state}: {reason}")
    lines += retry_lines(missing, data_dir=planned.data_dir)
    lines += [*(f"unusable {failure.code}: {failure.message}" for failure in failed), *(f"note     {n}" for n in notes)]
    if shots is not None and not failed:
        lines += [
            f"left out {begin_s:.3f} to {end_s:.3f} s: shorter than --min-len" for begin_s, end_s in shots.left_out_s
        ]
        lines += [] if shots.is_detected else ["unknown  shots not detected yet"]
    return Report("\n".join(lines), values)


def _id_of_source(data_dir: Path, name: str) -> str:
    """Return the ID of the video that messages and caption tables call `name`, with or without an extension."""
    videos = read_videos(data_dir).to_pylist()
    video_ids = [video["video_id"] for video in videos if video["source_id"] in (name, name.rpartition(".")[0])]
    if len(video_ids) != 1:
        raise UserError(
            f'{len(video_ids) or "no"} videos "{name}" in the manifest',
            hint="give a key or video ID as shown by `prep inspect`, or the name in the table of captions",
        )
    return str(video_ids[0])
