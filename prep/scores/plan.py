"""The plan of the `scores` column: which shards have to be made and why, from the commits of `video` and its own."""

from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.prep.core.chunk_columns import ChunksPlan, pending_chunks, plan_chunks
from clipmill.prep.core.column import Pending
from clipmill.prep.core.plan import ShardPlan
from clipmill.prep.scores.column import COLUMN
from clipmill.prep.scores.recipe import SCORES, ScoresRecipe, scores_recipe_from_dict
from clipmill.shards.reader import Variant
from clipmill.shards.scores import score_table_problem

if TYPE_CHECKING:
    from clipmill.prep.core.run import Job
    from clipmill.prep.scores.worker import ScoresTask

ScoresPlan = ChunksPlan[ScoresRecipe]


def make_scores_plan(data_dir: Path, recipe: ScoresRecipe, *, retry_codes: frozenset[str] = frozenset()) -> ScoresPlan:
    """Plan `recipe` for the committed shards of its `video` variant in `data_dir`."""
    return plan_chunks(data_dir, recipe, column=SCORES, retry_codes=retry_codes)


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
            old_commits=plan.old_commits(shard.shard_id),
        )

    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_scores,
        task=task,
        video_ids=plan.video_ids,
        failed_before=plan.unreadable,
        chunk_s=None,
        needs=("clipmill.prep.scores.recipe:version_mismatch", plan.recipe.libraries),
    )


def pending_scores(data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant; nothing if the variant is not current."""
    return pending_chunks(
        data_dir,
        variant,
        stored_recipe=scores_recipe_from_dict,
        plan=lambda recipe: make_scores_plan(data_dir, recipe),
    )


def table_problem(variant: Variant) -> str | None:
    """Return why the merged table cannot be used; None if it can, or if the variant has no scores to merge."""
    return score_table_problem(variant) if any(commit.files for commit in variant.commits.values()) else None
