"""The plan of the `scores` column: which shards have to be made and why, from the commits of `video` and its own.

Shard N of `scores` holds the chunks of shard N of `video`. The plan covers the shards of `video` committed so far, even
while `prep chunk` is running; a later plan covers the rest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from clipmill.manifests.errors import UserError
from clipmill.prep.core.chunk_shards import ChunkShard, read_chunk_shards
from clipmill.prep.core.column import Pending
from clipmill.prep.core.plan import ShardPlan, pending_of, plan_shards, stored_shards
from clipmill.prep.scores.column import COLUMN
from clipmill.prep.scores.recipe import SCORES, ScoresRecipe, scores_recipe_from_dict
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit, Failure, read_commits
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.reader import Variant
from clipmill.shards.scores import score_table_problem

if TYPE_CHECKING:
    from clipmill.prep.core.run import Job
    from clipmill.prep.scores.worker import ScoresTask


@dataclass(frozen=True)
class ScoresPlan:
    """A plan and its inputs.

    Attributes:
        shards: the shards, in order of their ids.
        chunk_shards: shards of `video` whose scores are wanted, by shard id.
        num_videos: number of videos with committed chunks.
        unreadable: shards of `video` that cannot be planned because their index is unreadable.
    """

    recipe: ScoresRecipe
    data_dir: Path
    variant_dir: Path
    video_dir: Path
    video_commits: dict[int, Commit]
    commits: dict[int, Commit]
    shards: list[ShardPlan]
    chunk_shards: dict[int, ChunkShard]
    num_videos: int
    unreadable: list[Failure]


def make_scores_plan(data_dir: Path, recipe: ScoresRecipe, *, retry_codes: frozenset[str] = frozenset()) -> ScoresPlan:
    """Plan `recipe` for the committed shards of its `video` variant in `data_dir`."""
    video_dir = variant_dir(data_dir, VIDEO, recipe.video)
    folder = variant_dir(data_dir, SCORES, recipe.variant)
    video, own = read_commits(video_dir), stored_shards(folder)
    chunk_shards, unreadable = read_chunk_shards(video_dir, video.commits.values())
    unknown = {damaged.shard_id for damaged in video.damaged} | unreadable.keys()
    fingerprint = recipe.fingerprint
    shards = plan_shards(
        (shard.wanted(recipe_fingerprint=fingerprint) for shard in chunk_shards),
        own.without(unknown),
        what_changed="its chunks",
        orphaned_because="the chunks are no longer in the video column",
        retry_codes=retry_codes,
    )
    return ScoresPlan(
        recipe=recipe,
        data_dir=data_dir,
        variant_dir=folder,
        video_dir=video_dir,
        video_commits=video.commits,
        commits=own.commits,
        shards=list(shards),
        chunk_shards={shard.shard_id: shard for shard in chunk_shards},
        num_videos=len(pa.chunked_array([shard.video_ids for shard in chunk_shards], pa.string()).unique()),
        unreadable=list(unreadable.values()),
    )


def scores_job(plan: ScoresPlan) -> "Job[ScoresTask]":
    """Return the plan as a job for the driver."""
    from clipmill.prep.core.run import Job
    from clipmill.prep.scores.worker import ScoresTask, make_scores

    def task(shard: ShardPlan) -> "ScoresTask":
        return ScoresTask(
            variant_dir=plan.variant_dir,
            shard_id=shard.shard_id,
            plan_fingerprint=shard.plan_fingerprint,
            cut_threshold=plan.recipe.settings.cut_threshold,
            video_dir=plan.video_dir,
            video_commit=plan.video_commits[shard.shard_id],
            old_commit=plan.commits.get(shard.shard_id),
        )

    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_scores,
        task=task,
        video_ids=lambda shard: plan.chunk_shards[shard.shard_id].video_ids.to_pylist(),
        failed_before=plan.unreadable,
        chunk_s=None,
        needs=("clipmill.prep.scores.recipe:version_mismatch", plan.recipe.libraries),
    )


def pending_scores(data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant; nothing if the variant is not current."""
    if current_variant(data_dir, SCORES) != variant.directory.name:
        return Pending()
    try:
        recipe = scores_recipe_from_dict(variant.recipe)
    except UserError:
        return Pending()  # its recipe is missing or of another version
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return Pending(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    return pending_of(make_scores_plan(data_dir, recipe).shards)


def table_problem(variant: Variant) -> str | None:
    """Return why the merged table cannot be used; None if it can, or if the variant has no scores to merge."""
    return score_table_problem(variant) if any(commit.files for commit in variant.commits.values()) else None
