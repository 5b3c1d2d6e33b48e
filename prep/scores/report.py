"""Text and JSON reports of plans and runs of the `scores` column."""

from pathlib import Path

from prep.core.report import Report, changed_settings, states_lines, states_values, summary_report
from prep.core.run import Summary
from prep.scores.plan import ScoresPlan
from prep.scores.recipe import SCORES


def scores_report(plan: ScoresPlan) -> Report:
    """Return the report of a plan: the work by state and reason."""
    recipe = plan.recipe
    differences = changed_settings(plan.data_dir, SCORES, variant=recipe.variant, recipe=recipe.as_dict())
    seconds = sum(plan.chunk_shards[shard.shard_id].seconds for shard in plan.shards if shard.has_work)
    lines = [f"variant  {recipe.variant}", f"video    {recipe.video}"]
    lines += [f"setting  {difference}" for difference in differences]
    lines += states_lines(plan.shards)
    lines += [f"{failure.video_id}  cannot be planned: {failure.message}" for failure in plan.unreadable]
    # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
    lines.append(f"estimate at most {seconds / 60:,.1f} minutes of video to score" if seconds else "nothing to do")
    values = {
        "variant": recipe.variant,
        "video": recipe.video,
        "changed_settings": differences,
        "num_chunks": sum(shard.num_chunks for shard in plan.shards),
        **states_values(plan.shards),
        "unreadable": [failure.message for failure in plan.unreadable],
        "estimate": {"seconds": seconds},
    }
    return Report("\n".join(lines), values)


def scores_summary(summary: Summary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    speed = None
    if summary.encoded_s:
        speed = (
            f"{summary.encoded_s / summary.wall_s:.1f}x real time;"
            f" {summary.encoded_s / summary.cpu_s:.1f}x per core ({summary.cpu_s:.1f} s of CPU time)"
        )
    nothing = None
    if not summary.num_chunks:
        nothing = "there are no committed chunks yet; run it again after `prep chunk`"
    return summary_report(summary, listed=listed, speed=speed, nothing=nothing, verb="score")
