"""The plan of the `latents` column as a job that the driver carries out."""

from prep.core.data_folder import LATENTS
from prep.core.run import Job
from prep.latents.plan import LatentsPlan
from prep.latents.vae import Device
from prep.latents.worker import LatentsTask, make_latents
from prep.video.plan import ShardPlan


def latents_job(plan: LatentsPlan, *, device: Device, batch: int, num_threads: int) -> Job[LatentsTask]:
    """The job; see `LatentsTask` for the arguments."""

    def task(shard: ShardPlan) -> LatentsTask:
        video_commit = plan.video_commits[shard.shard_id]
        return LatentsTask(
            variant_dir=plan.variant_dir,
            shard_id=shard.shard_id,
            plan_fingerprint=shard.plan_fingerprint,
            recipe=plan.recipe,
            video_dir=plan.video_dir,
            video_commit=video_commit,
            old_commit=plan.commits.get(shard.shard_id),
            device=device,
            batch=batch,
            num_threads=num_threads,
        )

    return Job(
        column=LATENTS,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_latents,
        task=task,
        video_ids=lambda shard: plan.video_shards[shard.shard_id].video_ids.to_pylist(),
        failed_before=plan.unreadable,
        chunk_s=None,
    )
