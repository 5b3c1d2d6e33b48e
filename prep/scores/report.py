"""Text and JSON reports of plans and runs of the `scores` column."""

from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.units import duration_text
from clipmill.prep.core.chunk_report import chunks_report, speed_text
from clipmill.prep.core.chunk_shards import NO_CHUNKS
from clipmill.prep.core.report import Report, summary_report
from clipmill.prep.core.run import Summary
from clipmill.prep.scores.column import COLUMN
from clipmill.prep.scores.plan import ScoresPlan
from clipmill.shards.scores import CHUNKS_FILE


@dataclass
class ScoresSummary(Summary):
    """Result of a run. `is_table_written` is True if it has written the merged table."""

    is_table_written: bool = False


def scores_report(plan: ScoresPlan) -> Report:
    """Return the report of a plan: the work by state and reason."""
    seconds = sum(plan.chunk_shards[shard.shard_id].seconds for shard in plan.shards if shard.has_work)
    # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
    estimate = (
        f"estimate at most {duration_text(seconds)} of video to score",
        "         how long it takes is unknown; each chunk is decoded once",
    )
    return chunks_report(
        plan,
        COLUMN,
        plan.recipe.as_dict(),
        estimate=estimate if seconds else (),
        values={"estimate": {"seconds": seconds}},
        verb="score",
    )


def scores_summary(summary: ScoresSummary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    nothing = None if summary.num_chunks else NO_CHUNKS
    report = summary_report(summary, listed=listed, speed=speed_text(summary), nothing=nothing, verb="score")
    written = [f"table    {CHUNKS_FILE}: written"] if summary.is_table_written else []
    return Report("\n".join([report.text, *written]), report.values)
