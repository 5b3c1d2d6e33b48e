"""The report of `prep plan --explain`: the state of one chunk, or one video, in the plan."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import split_key
from clipmill.manifests.store import read_videos
from clipmill.prep.core.plan import ShardState
from clipmill.prep.core.report import Report
from clipmill.prep.video.plan_inputs import Planned
from clipmill.prep.video.report import retry_lines, settings_against_current


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
