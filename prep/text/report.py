"""Text and JSON reports of plans and runs of the `text` column."""

from dataclasses import dataclass, field
from pathlib import Path

from clipmill.manifests.quoting import counted
from clipmill.manifests.store import captions_path
from clipmill.manifests.units import size_text
from clipmill.prep.core.column import WEIGHTS
from clipmill.prep.core.disk_use import disk_use
from clipmill.prep.core.failure_list import failure_lines, failure_values
from clipmill.prep.core.report import NOTHING_TO_DO, Report, changed_settings, next_line, states_lines, states_values
from clipmill.prep.core.selection import WHERE
from clipmill.prep.engines import Refused
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.plan import TextPlan
from clipmill.prep.text.recipe import TEXT
from clipmill.shards.commits import Failure

_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class TextSummary:
    """Result of a run.

    Attributes:
        num_videos: number of videos in committed shards.
        num_captions: number of captions in the manifest.
        num_texts: number of distinct texts in the shards that needed work.
        num_encoded: number of these that were encoded in this run.
        num_cut: number of encoded texts that were truncated to the tower's context length.
        failures: all failures, including those of earlier runs that were not tried again.
        unchanged: see `clipmill.prep.core.run.Summary`.
        gave_up: why the run ended before all shards were tried, or None.
        refused_workers: workers that failed the admission check and received no tasks.
    """

    variant: str
    num_videos: int
    num_captions: int
    num_shards: int
    num_shards_made: int
    num_texts: int
    num_encoded: int
    num_cut: int
    num_bytes_written: int
    wall_s: float
    failures: list[Failure] = field(default_factory=list)
    unchanged: frozenset[Failure] = frozenset()
    gave_up: str | None = None
    refused_workers: list[Refused] = field(default_factory=list)

    @property
    def num_copied(self) -> int:
        """Number of texts whose embedding was copied from a shard or from the bank of a killed run."""
        return self.num_texts - self.num_encoded

    @property
    def num_failed_videos(self) -> int:
        """Number of videos that are missing, or could not be made again."""
        return len({failure.video_id for failure in self.failures})


def text_summary(summary: TextSummary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    lines = [f"variant  {summary.variant}", f"captions {summary.num_captions:,} in the manifest"]
    if summary.num_shards_made or summary.num_encoded:
        lines.append(
            f"made     {counted(summary.num_shards_made, 'shard')}: {counted(summary.num_texts, 'unique text')},"
            f" {summary.num_encoded:,} encoded, {summary.num_copied:,} copied,"
            f" {size_text(summary.num_bytes_written)} in {summary.wall_s:.1f} s"
        )
        if summary.num_cut:
            lines.append(f"note     {counted(summary.num_cut, 'text')} truncated to the encoder's context length")
    else:
        lines.append("nothing was encoded" if summary.failures else "nothing to encode: all shards are up to date")
    lines += failure_lines(summary.failures, listed=listed)
    values = {
        "variant": summary.variant,
        "num_videos": summary.num_videos,
        "num_captions": summary.num_captions,
        "num_shards": summary.num_shards,
        "num_shards_made": summary.num_shards_made,
        "num_texts": summary.num_texts,
        "num_encoded": summary.num_encoded,
        "num_taken_over": summary.num_copied,
        "num_cut": summary.num_cut,
        "num_bytes_written": summary.num_bytes_written,
        "wall_s": round(summary.wall_s, 3),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        **failure_values(summary.failures, listed=listed),
        "gave_up": summary.gave_up,
        "refused_workers": [refused.values() for refused in summary.refused_workers],
    }
    return Report("\n".join(lines), values)


def text_report(plan: TextPlan) -> Report:
    """Return the report of a plan: the work by state and reason.

    The number of new texts is not reported: it is unknown until the captions are read.

    Raises:
        UserError: the table of captions is damaged.
    """
    captions_path(plan.data_dir)  # verified, because a run needs them
    recipe = plan.recipe
    differences = changed_settings(plan.data_dir, TEXT, variant=recipe.variant, recipe=recipe.as_dict())
    num_videos = sum(shard.num_chunks for shard in plan.shards if shard.has_work)
    most_bytes = plan.num_captions * plan.recipe.width * _BYTES_PER_NUMBER if num_videos else 0
    disk = disk_use(plan.data_dir, column=TEXT, variant=recipe.variant, added_bytes=(0.0, float(most_bytes)))
    asked = {name: value for name in (WHERE, WEIGHTS) if (value := getattr(recipe, name)) is not None}
    command = COLUMN.command_line({**recipe.as_dict(), **asked}, data_dir=plan.data_dir)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in differences)]
    lines += states_lines(plan.shards, sample="video")
    if num_videos:
        lines.append(f"estimate at most the captions of {counted(num_videos, 'video')} to encode, each text once")
        lines.append("         how long it takes is unknown until the captions are read; a GPU is many times faster")
        lines += [*disk.lines(), next_line(command)]
    else:
        lines.append(NOTHING_TO_DO)
    values = {
        "variant": plan.recipe.variant,
        "changed_settings": differences,
        "num_videos": plan.num_videos,
        "num_captions": plan.num_captions,
        **states_values(plan.shards, sample="video"),
        "estimate": {"num_videos": num_videos},
        "disk": disk.values(),
        "next": command if num_videos else None,
    }
    return Report("\n".join(lines), values)
