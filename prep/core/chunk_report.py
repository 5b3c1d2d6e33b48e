"""Reports of plans and runs of a column with one sample for each chunk."""

from collections.abc import Mapping

from clipmill.manifests.formatting import count_noun
from clipmill.prep.core.chunk_columns import ChunksPlan
from clipmill.prep.core.column import Addition, ColumnSpec
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    Report,
    changed_settings,
    next_line,
    states_lines,
    states_values,
)
from clipmill.prep.core.run import Summary


def chunks_report(
    plan: ChunksPlan,
    column: ColumnSpec,
    *,
    estimate: Addition,
    asked: Mapping[str, str | None],
) -> Report:
    """Return the report of a plan: the work by state and reason.

    Args:
        estimate: What the column adds: lines about the cost of the work, none if there is no work, and JSON values.
        asked: Flags besides the recipe, None if they were not given; of these, `where` selects chunks.
    """
    recipe = plan.recipe.values
    asked = {name: value for name, value in asked.items() if value is not None}
    differences = changed_settings(plan.data_dir, column.name, variant=plan.recipe.variant, recipe=recipe)
    command = column.command_line({**recipe, **asked}, data_dir=plan.data_dir)
    lines = [f"variant  {plan.recipe.variant}", f"video    {plan.recipe.video}"]
    if "where" in asked:
        lines.append(f"where    {asked['where']}: {count_noun(plan.num_chunks, 'chunk')} selected")
    lines += [*estimate.about, *(f"setting  {difference}" for difference in differences)]
    lines += states_lines(plan.shards, verb=column.verb)
    lines += [f"{failure.video_id}  cannot be planned: {failure.message}" for failure in plan.unreadable]
    lines += [*estimate.lines, next_line(command)] if estimate.lines else [NOTHING_TO_DO]
    found = {
        "variant": plan.recipe.variant,
        "video": plan.recipe.video,
        "changed_settings": differences,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unreadable": [failure.message for failure in plan.unreadable],
        **estimate.values,
        "next": command if estimate.lines else None,
    }
    return Report("\n".join(lines), found)


def speed_text(summary: Summary, *, per_core: bool = True) -> str | None:
    """Return the speed of a run, also per CPU core where the CPU does the work; None if it made nothing."""
    if not summary.encoded_s:
        return None
    text = f"{summary.encoded_s / summary.wall_s:.1f}x real time"
    if not per_core or not summary.cpu_s:
        return text
    return f"{text}; {summary.encoded_s / summary.cpu_s:.1f}x per core ({summary.cpu_s:.1f} s of CPU time)"
