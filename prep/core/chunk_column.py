"""Plan, run and reports of a column with one sample per chunk, derived from its `ColumnSpec` and `ChunkWork`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text
from clipmill.manifests.plugins import import_object
from clipmill.prep.core.chunk_plan import NO_CHUNKS, ChunksPlan, current_chunks, plan_chunks
from clipmill.prep.core.chunk_work import ChunkTask, ChunkWork, Workers, make_chunk_shard
from clipmill.prep.core.column import WEIGHTS, Addition, ColumnSpec, PendingWork
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan, pending_of
from clipmill.prep.core.recipe import Recipe, setting_flags, stored_values, values_not_stored
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    changed_settings,
    next_line,
    retry_arguments,
    states_lines,
    states_values,
    summary_report,
)
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Job, Summary, execute
from clipmill.prep.core.variants import WHERE, stored_recipe
from clipmill.prep.core.work import ColumnWork, Report
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant


def column_work(column: ColumnSpec, work: ChunkWork) -> ColumnWork:
    """Return the `ColumnWork` of a column with one sample per chunk."""
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
    """Return the recipe that settings produce.

    Args:
        video: Name of the `video` variant whose chunks are the input of the column.

    Raises:
        UserError: The model does not exist, or does not support the settings.
    """
    resolved_settings, further_values = work.resolve(settings)
    identity = {"schema": column.schema, "column": column.name, VIDEO: video}
    recipe = Recipe(resolved_settings, {**stored_values(resolved_settings), **identity, **further_values}, column.name)
    return replace(recipe, name=work.name(recipe))


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


def _pending(column: ColumnSpec, work: ChunkWork, data_dir: Path, variant: Variant) -> PendingWork:
    """Return the remaining work of a variant. A variant that is not current has no remaining work."""
    if current_variant(data_dir, column.name) != variant.directory.name:
        return PendingWork()
    try:
        if variant.recipe.get("schema", column.schema) != column.schema:
            return PendingWork(
                stale_because=f"made with schema {variant.recipe['schema']}; this version has schema {column.schema}"
            )
        recipe = stored_recipe(column, variant)
    except UserError:
        return PendingWork()  # `prep status` reports a missing or incomplete recipe
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return PendingWork(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    try:
        plan = _plan_recipe(work, data_dir, recipe, frozenset())
        return replace(pending_of(plan.shards), left_out=tuple(work.left_out(plan)))
    except UserError as error:
        return PendingWork(stale_because=f"its --where cannot be evaluated: {error}")


def chunk_job(column: ColumnSpec, plan: ChunksPlan, *, options: Any = None) -> Job[ChunkTask]:
    """Return the job that the driver runs for a plan.

    Args:
        options: Options of the workers (`Chunks.options`).
    """
    work: ChunkWork = import_object(column.work)
    extra_input = work.extra_input(plan)

    def make_task(shard: ShardPlan) -> ChunkTask:
        chunks = plan.chunk_shards[shard.shard_id]
        shard_ids = {shard.shard_id, *(next_chunk.shard_id for next_chunk in chunks.next_chunks.values())}
        return ChunkTask(
            column=column.name,
            work=column.work,
            recipe=plan.recipe,
            variant_dir=plan.variant_dir,
            shard_id=shard.shard_id,
            plan_fingerprint=shard.plan_fingerprint,
            video_dir=plan.video_dir,
            video_commits={number: plan.video_commits[number] for number in sorted(shard_ids)},
            next_chunks=chunks.next_chunks,
            old_commits=plan.old_commits(shard.shard_id),
            rows=chunks.rows,
            options=options,
            extra_input=extra_input(shard.shard_id),
        )

    # Record flags that are not part of the recipe, so that other commands can continue the run.
    flags = {**values_not_stored(plan.recipe.settings), WEIGHTS: work.weights(plan.recipe)}
    return Job(
        column=column,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=dict(plan.recipe.values),
        shards=plan.shards,
        make=make_chunk_shard,
        task=make_task,
        video_ids=plan.video_ids,
        planning_failures=plan.unreadable,
        chunk_s=None,
        needs=None if work.needs is None else (work.needs[0], plan.recipe.values[work.needs[1]]),
        where=flags.pop(WHERE, None),
        request_values=flags,
    )


def _run(
    column: ColumnSpec, work: ChunkWork, plan: ChunksPlan, settings: Any, request: Request, part_run: PartRun | None
) -> Summary:
    workers = Workers(request=request, memory_gb=work.memory_gb)
    if work.workers is not None:
        workers = work.workers(plan, request)
    engine = workers.request.open_engine(memory_gb=workers.memory_gb, gpus_per_worker=workers.gpus_each)
    job = chunk_job(column, plan, options=workers.options)
    flags = {**job.request_values, **request.recorded_flags}
    summary = execute(replace(job, lag_limit_s=request.lag_limit_s, request_values=flags), engine, part_run=part_run)
    names = []
    # The extra files are derived from all shards. If a run has several parts, only the last part sees all shards.
    if part_run is None or part_run.is_last:
        variant = Variant(plan.variant_dir)
        for file in work.extra_files:
            if file.publish is not None and file.problem(variant) is not None:
                file.publish(variant)
                names.append(file.name)
    if work.summary is not None:
        summary.added = work.summary(plan, summary, names)
    else:
        has_table = any(file.publish is not None for file in work.extra_files)
        lines = [f"table    {name}: written" for name in names]
        summary.added = Addition(lines, {"is_table_written": bool(names)} if has_table else {})
    return summary


def _plan_report(column: ColumnSpec, work: ChunkWork, plan: ChunksPlan) -> Report:
    """Return the report of a plan: shards by state and reason, and the estimated cost."""
    if work.estimate is not None:
        estimate = work.estimate(plan)
    else:
        seconds = sum(plan.chunk_shards[shard.shard_id].seconds for shard in plan.shards if shard.has_work)
        # The estimate is an upper bound: samples of unchanged chunks are copied, but their number is not known yet.
        about = (
            f"estimate at most {duration_text(seconds)} of video to {column.verb}",
            "         the duration of the run is unknown; each chunk is read once",
        )
        estimate = Addition(about if seconds else (), {"estimate": {"seconds": seconds}})
    run_values = {**values_not_stored(plan.recipe.settings), WEIGHTS: work.weights(plan.recipe)}
    flags = {name: value for name, value in run_values.items() if value is not None}
    where = {WHERE: run_values[WHERE]} if WHERE in run_values else {}
    recipe = plan.recipe.values
    differences = changed_settings(plan.data_dir, column.name, variant=plan.recipe.variant, recipe=recipe)
    command = column.command_line({**recipe, **flags}, data_dir=plan.data_dir)
    lines = [f"variant  {plan.recipe.variant}", f"video    {plan.recipe.video}"]
    if WHERE in flags:
        lines.append(f"where    {flags[WHERE]}: {count_noun(plan.num_chunks, 'chunk')} selected")
    lines += [*estimate.about, *(f"setting  {difference}" for difference in differences)]
    lines += states_lines(plan.shards, verb=column.verb)
    lines += [f"{failure.video_id}  cannot be planned: {failure.message}" for failure in plan.unreadable]
    lines += [*estimate.lines, next_line(command)] if estimate.lines else [NOTHING_TO_DO]
    values = {
        "variant": plan.recipe.variant,
        "video": plan.recipe.video,
        "changed_settings": differences,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unreadable": [failure.message for failure in plan.unreadable],
        **where,
        **estimate.values,
        "next": command if estimate.lines else None,
    }
    return Report("\n".join(lines), values)


def _summary_report(column: ColumnSpec, work: ChunkWork, summary: Summary, settings: Any, list_path: Path) -> Report:
    speed = None
    if summary.encoded_s:
        speed = f"{summary.encoded_s / summary.wall_s:.1f}x real time"
        # A speed per core is meaningless for a column that waits for a GPU or a server.
        if work.has_cpu_speed and summary.cpu_s:
            per_core = summary.encoded_s / summary.cpu_s
            speed += f"; {per_core:.1f}x per core ({summary.cpu_s:.1f} s of CPU time)"
    return summary_report(
        summary,
        list_path=list_path,
        speed=speed,
        no_work_reason=None if summary.num_chunks else NO_CHUNKS,
        verb=column.verb,
        retry_command=retry_arguments(column, data=list_path.parents[2]),
    )
