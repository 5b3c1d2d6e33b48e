"""The plan of the `video` column as a job that the driver carries out."""

from manifests.store import captions_path
from prep.core.data_folder import VIDEO
from prep.core.layout import layout_path, write_layout
from prep.core.run import Job
from prep.video.plan import ShardPlan
from prep.video.planning import Planned
from prep.video.worker import ShardTask, make_shard


def chunk_job(planned: Planned) -> Job[ShardTask]:
    """The job; the layout that it relies on is written first."""
    plan = planned.plan
    write_layout(layout_path(planned.data_dir, plan.recipe.settings), plan.layout)
    has_work = any(shard.has_work for shard in plan.shards)
    captions_file = captions_path(planned.data_dir) if plan.has_captions and has_work else None

    def task(shard: ShardPlan) -> ShardTask:
        return ShardTask(
            variant_dir=planned.variant_dir,
            shard_id=shard.shard_id,
            split=shard.split,
            plan_fingerprint=shard.plan_fingerprint,
            recipe=plan.recipe,
            spans=tuple(plan.spans(shard.rows)),
            old_commit=planned.commits.get(shard.shard_id),
            captions_file=captions_file,
        )

    return Job(
        column=VIDEO,
        data_dir=planned.data_dir,
        variant_dir=planned.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_shard,
        task=task,
        video_ids=lambda shard: [span.video_id for span in plan.spans(shard.rows)],
        failed_before=list(plan.failed_sources()),
        chunk_s=float(plan.recipe.settings.len_s),
        ffmpeg_version=plan.recipe.ffmpeg,
    )
