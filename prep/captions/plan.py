"""The plan of the `captions` column, from the commits of `video` and its own, as a job for the driver."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.prep.captions.answers import ANSWERS_FOLDER, answered_chunks, journal_path
from clipmill.prep.captions.column import COLUMN, CaptionsRequest
from clipmill.prep.captions.recipe import CAPTIONS, CaptionsRecipe, captions_recipe_from_dict
from clipmill.prep.core.chunk_columns import ChunksPlan, Holders, pending_chunks, plan_chunks
from clipmill.prep.core.column import WEIGHTS, Pending
from clipmill.prep.core.plan import ShardPlan
from clipmill.prep.core.selection import stored_request
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    from clipmill.prep.captions.worker import Asking, CaptionsTask
    from clipmill.prep.core.run import Job


class CaptionsPlan(ChunksPlan[CaptionsRecipe]):
    """A plan and its inputs."""

    @cached_property
    def _answered(self) -> Holders:
        return Holders(answered_chunks(self.variant_dir / ANSWERS_FOLDER))

    def journals(self, shard_id: int) -> tuple[Path, ...]:
        """Return the journals of other shards with answers about chunks that are in this shard now."""
        others = self.holding(shard_id, self._answered)
        return tuple(journal_path(self.variant_dir, other) for other in others if other != shard_id)


def make_captions_plan(
    data_dir: Path, recipe: CaptionsRecipe, *, retry_codes: frozenset[str] = frozenset()
) -> CaptionsPlan:
    """Plan `recipe` for the committed shards of its `video` variant in `data_dir`.

    Raises:
        UserError: the recipe's `where` selects nothing, or uses scores that chunks lack.
    """
    plan = plan_chunks(data_dir, recipe, column=CAPTIONS, where=recipe.settings.where, retry_codes=retry_codes)
    return CaptionsPlan(**vars(plan))


def captions_task(
    plan: CaptionsPlan, shard: ShardPlan, asking: "Asking", *, retry_codes: frozenset[str]
) -> "CaptionsTask":
    """Return what a worker needs to make a shard."""
    from clipmill.prep.captions.worker import CaptionsTask

    return CaptionsTask(
        variant_dir=plan.variant_dir,
        shard_id=shard.shard_id,
        plan_fingerprint=shard.plan_fingerprint,
        recipe=plan.recipe,
        video_dir=plan.video_dir,
        video_commit=plan.video_commits[shard.shard_id],
        old_commits=plan.old_commits(shard.shard_id),
        journals=plan.journals(shard.shard_id),
        rows=plan.chunk_shards[shard.shard_id].rows,
        asking=asking,
        retry_codes=retry_codes,
    )


def captions_job(plan: CaptionsPlan, asking: "Asking", request: CaptionsRequest) -> "Job[CaptionsTask]":
    """Return the plan as a job for the driver."""
    from clipmill.prep.captions.worker import make_captions
    from clipmill.prep.core.run import Job

    settings = plan.recipe.settings
    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_captions,
        task=lambda shard: captions_task(plan, shard, asking, retry_codes=request.retry_codes),
        video_ids=plan.video_ids,
        failed_before=plan.unreadable,
        chunk_s=None,
        where=settings.where,
        asked={"endpoint": settings.endpoint, WEIGHTS: plan.recipe.weights, **request.kept},
    )


def pending_captions(data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant; nothing if the variant is not current."""
    return pending_chunks(
        data_dir,
        variant,
        stored_recipe=lambda: captions_recipe_from_dict(stored_request(variant)),
        plan=lambda recipe: make_captions_plan(data_dir, recipe),
    )
