"""Text and JSON reports of plans and runs of the `scores` column."""

from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.units import duration_text
from clipmill.prep.core.chunk_shards import NO_CHUNKS
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    Report,
    changed_settings,
    next_line,
    states_lines,
    states_values,
    summary_report,
)
from clipmill.prep.core.run import Summary
from clipmill.prep.scores.column import COLUMN
from clipmill.prep.scores.plan import ScoresPlan
from clipmill.prep.scores.recipe import SCORES
from clipmill.shards.scores import CHUNKS_FILE


@dataclass
class ScoresSummary(Summary):
    """Result of a run. `is_table_written` is True if it has written the merged table."""

    is_table_written: bool = False


def scores_report(plan: ScoresPlan) -> Report:
    """Return the report of a plan: the work by state and reason."""
    recipe = plan.recipe
    differences = changed_settings(plan.data_dir, SCORES, variant=recipe.variant, recipe=recipe.as_dict())
    seconds = sum(plan.chunk_shards[shard.shard_id].seconds for shard in plan.shards if shard.has_work)
    lines = [f"variant  {recipe.variant}", f"video    {recipe.video}"]
    lines += [f"setting  {difference}" for difference in differences]
    lines += states_lines(plan.shards, verb="score")
    lines += [f"{failure.video_id}  cannot be planned: {failure.message}" for failure in plan.unreadable]
    command = COLUMN.command_line(recipe.as_dict(), data_dir=plan.data_dir)
    # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
    if seconds:
        lines.append(f"estimate at most {duration_text(seconds)} of video to score")
        lines.append("         how long it takes is unknown; each chunk is decoded once")
        lines.append(next_line(command))
    else:
        lines.append(NOTHING_TO_DO)
    values = {
        "variant": recipe.variant,
        "video": recipe.video,
        "changed_settings": differences,
        "num_chunks": sum(shard.num_chunks for shard in plan.shards),
        **states_values(plan.shards),
        "unreadable": [failure.message for failure in plan.unreadable],
        "estimate": {"seconds": seconds},
        "next": command if seconds else None,
    }
    return Report("\n".join(lines), values)


def scores_summary(summary: ScoresSummary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    speed = None
    if summary.encoded_s:
        speed = (
            f"{summary.encoded_s / summary.wall_s:.1f}x real time;"
            f" {summary.encoded_s / summary.cpu_s:.1f}x per core ({summary.cpu_s:.1f} s of CPU time)"
        )
    nothing = None
    if not summary.num_chunks:
        nothing = NO_CHUNKS
    report = summary_report(summary, listed=listed, speed=speed, nothing=nothing, verb="score")
    written = [f"table    {CHUNKS_FILE}: written"] if summary.is_table_written else []
    return Report("\n".join([report.text, *written]), report.values)
