"""The functions of a column with one sample for each chunk, derived from its `ColumnSpec` and its `ChunkWork`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import duration_text
from clipmill.manifests.plugins import import_object
from clipmill.prep.core.chunk_columns import ChunksPlan, plan_chunks
from clipmill.prep.core.chunk_report import chunks_report, speed_text
from clipmill.prep.core.chunk_shards import NO_CHUNKS, current_chunks
from clipmill.prep.core.chunk_work import ChunkWork, Workers
from clipmill.prep.core.chunk_worker import ChunkTask, make_chunk_shard
from clipmill.prep.core.column import WEIGHTS, Addition, ColumnSpec, Pending
from clipmill.prep.core.ending import retry_words
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan, pending_of
from clipmill.prep.core.recipe import Recipe, setting_flags, stored_values, values_not_stored
from clipmill.prep.core.report import Report, summary_report
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Job, Summary, execute
from clipmill.prep.core.selection import WHERE, stored_recipe
from clipmill.prep.core.work import ColumnWork
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant


def column_work(column: ColumnSpec, work: ChunkWork) -> ColumnWork:
    """Return the functions of a column."""
    return ColumnWork(
        require=work.require,
        plan=partial(_plan, column, work),
        run=partial(_run, column, work),
        plan_report=partial(_plan_report, column, work),
        summary_report=partial(_summary_report, column, work),
        pending=partial(_pending, column, work),
        extra_folders=work.extra_folders,
        extra_files=work.extra_files,
        sample_facts=work.sample_facts,
        write_page=work.write_page,
        next_command=work.next_command,
    )


def resolve(column: ColumnSpec, work: ChunkWork, settings: Any, *, video: str) -> Recipe[Any]:
    """Return the recipe of settings on this machine.

    Args:
        video: Name of the variant of `video` whose chunks the column is made of.

    Raises:
        UserError: there is no such model, or it does not go with the settings.
    """
    used, facts = work.resolve(settings)
    identity = {"schema": column.schema, "column": column.name, VIDEO: video}
    recipe = Recipe(used, {**stored_values(used), **identity, **facts}, column.name)
    return replace(recipe, name=work.name(recipe))


def _asked(work: ChunkWork, recipe: Recipe[Any]) -> dict[str, str | None]:
    """Return what commands that continue a run need besides the recipe, by the names of the flags."""
    return {**values_not_stored(recipe.settings), WEIGHTS: work.weights(recipe)}


def _plan_recipe(work: ChunkWork, data_dir: Path, recipe: Recipe[Any], retry_codes: frozenset[str]) -> ChunksPlan:
    has_sample = None if work.has_sample is None else partial(work.has_sample, recipe)
    reads_next = work.reads_next(recipe)
    return plan_chunks(data_dir, recipe, retry_codes=retry_codes, reads_next=reads_next, has_sample=has_sample)


def _plan(column: ColumnSpec, work: ChunkWork, data_dir: Path, settings: Any, request: Request) -> ChunksPlan:
    recipe = resolve(column, work, settings, video=current_chunks(data_dir))
    request.require_variant(recipe.variant, command=join(["prep", column.command, *setting_flags(settings)]))
    plan = _plan_recipe(work, data_dir, recipe, request.retry_codes)
    work.on_plan(plan, request)
    return plan


def _pending(column: ColumnSpec, work: ChunkWork, data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant; nothing if the variant is not current."""
    if current_variant(data_dir, column.name) != variant.directory.name:
        return Pending()
    try:
        if variant.recipe.get("schema", column.schema) != column.schema:
            return Pending(stale_because=f"made with schema {variant.recipe['schema']}; it is {column.schema} now")
        recipe = stored_recipe(column, variant)
    except UserError:
        return Pending()  # its recipe is missing or incomplete, which the status names
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return Pending(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    try:
        plan = _plan_recipe(work, data_dir, recipe, frozenset())
        return replace(pending_of(plan.shards), left_out=tuple(work.left_out(plan)))
    except UserError as error:
        return Pending(stale_because=f"its --where cannot be evaluated: {error}")


def chunk_job(column: ColumnSpec, plan: ChunksPlan, *, use: Any = None) -> Job[ChunkTask]:
    """Return a plan as a job for the driver; `use` is that of its workers."""
    work: ChunkWork = import_object(column.work)
    more = work.more(plan)

    def task(shard: ShardPlan) -> ChunkTask:
        chunks = plan.chunk_shards[shard.shard_id]
        needed = {shard.shard_id, *(after.shard_id for after in chunks.following.values())}
        return ChunkTask(
            column=column.name,
            work=column.work,
            recipe=plan.recipe,
            variant_dir=plan.variant_dir,
            shard_id=shard.shard_id,
            plan_fingerprint=shard.plan_fingerprint,
            video_dir=plan.video_dir,
            video_commits={number: plan.video_commits[number] for number in sorted(needed)},
            following=chunks.following,
            old_commits=plan.old_commits(shard.shard_id),
            rows=chunks.rows,
            use=use,
            more=more(shard.shard_id),
        )

    asked = _asked(work, plan.recipe)
    return Job(
        column=column,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=dict(plan.recipe.values),
        shards=plan.shards,
        make=make_chunk_shard,
        task=task,
        video_ids=plan.video_ids,
        failed_before=plan.unreadable,
        chunk_s=None,
        needs=None if work.needs is None else (work.needs[0], plan.recipe.values[work.needs[1]]),
        where=asked.pop(WHERE, None),
        asked=asked,
    )


def _run(
    column: ColumnSpec, work: ChunkWork, plan: ChunksPlan, settings: Any, request: Request, part_run: PartRun | None
) -> Summary:
    workers = Workers(request=request, memory_gb=work.memory_gb)
    if work.workers is not None:
        workers = work.workers(plan, request)
    engine = workers.request.open_engine(memory_gb=workers.memory_gb, gpus_per_worker=workers.gpus_each)
    job = chunk_job(column, plan, use=workers.use)
    asked = {**job.asked, **request.asked}
    summary = execute(replace(job, lag_limit_s=request.lag_limit_s, asked=asked), engine, part_run=part_run)
    written = [] if part_run is not None and not part_run.is_last else _write_extra_files(work, plan.variant_dir)
    summary.added = _written_files(work, written) if work.summary is None else work.summary(plan, summary, written)
    return summary


def _write_extra_files(work: ChunkWork, variant_dir: Path) -> list[str]:
    """Write the files of a variant that are derived from its shards, unless they are up to date; return their names."""
    variant, written = Variant(variant_dir), []
    for file in work.extra_files:
        if file.publish is not None and file.problem(variant) is not None:
            file.publish(variant)
            written.append(file.name)
    return written


def _written_files(work: ChunkWork, written: list[str]) -> Addition:
    has_table = any(file.publish is not None for file in work.extra_files)
    lines = [f"table    {name}: written" for name in written]
    return Addition(lines, {"is_table_written": bool(written)} if has_table else {})


def _plan_report(column: ColumnSpec, work: ChunkWork, plan: ChunksPlan) -> Report:
    asked = _asked(work, plan.recipe)
    estimate = _duration(column, plan) if work.estimate is None else work.estimate(plan)
    if WHERE in asked:
        estimate = replace(estimate, values={WHERE: asked[WHERE], **estimate.values})
    return chunks_report(plan, column, estimate=estimate, asked=asked)


def _duration(column: ColumnSpec, plan: ChunksPlan) -> Addition:
    seconds = sum(plan.chunk_shards[shard.shard_id].seconds for shard in plan.shards if shard.has_work)
    # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
    lines = (
        f"estimate at most {duration_text(seconds)} of video to {column.verb}",
        "         how long it takes is unknown; each chunk is read once",
    )
    return Addition(lines if seconds else (), {"estimate": {"seconds": seconds}})


def _summary_report(column: ColumnSpec, work: ChunkWork, summary: Summary, settings: Any, listed: Path) -> Report:
    return summary_report(
        summary,
        listed=listed,
        speed=speed_text(summary, per_core=work.has_cpu_speed),
        nothing=None if summary.num_chunks else NO_CHUNKS,
        verb=column.verb,
        retry=retry_words(column, data=listed.parents[2]),
    )
