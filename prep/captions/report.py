"""Text and JSON reports of plans and runs of the `captions` column, and the estimate from the answers so far."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from clipmill.manifests.quoting import counted, on_one_line
from clipmill.manifests.units import duration_text
from clipmill.prep.captions.answers import ANSWERS_FOLDER, Answer, answers_in
from clipmill.prep.captions.column import COLUMN
from clipmill.prep.captions.plan import CaptionsPlan
from clipmill.prep.captions.table import TABLE_FILE
from clipmill.prep.core.chunk_report import chunks_report
from clipmill.prep.core.chunk_shards import NO_CHUNKS
from clipmill.prep.core.column import WEIGHTS
from clipmill.prep.core.report import Report, summary_report
from clipmill.prep.core.run import Summary

_MAX_ANSWERS = 10_000  # that an estimate looks at
_NUM_SHOWN = 3  # of them, in words


@dataclass(frozen=True)
class Cost:
    """What the answers of a variant took: tokens in and out, and seconds.

    Attributes:
        num_uncounted: answers of which the server did not say how many tokens they took.
    """

    num_answers: int
    num_uncounted: int
    tokens_in: int
    tokens_out: int
    seconds: float

    @classmethod
    def of(cls, answers: list[Answer]) -> "Cost":
        """Add up the cost of answers."""
        tokens_in, tokens_out = (
            sum(getattr(one, name) or 0 for one in answers) for name in ("tokens_in", "tokens_out")
        )
        num_uncounted = sum(not one.is_counted for one in answers)
        return cls(len(answers), num_uncounted, tokens_in, tokens_out, sum(one.seconds for one in answers))

    def values(self) -> dict[str, Any]:
        """Return the JSON values."""
        return {**vars(self)}

    def line(self) -> str:
        """Return the cost in words."""
        each = f"; {self.seconds / self.num_answers:.2g} s each" if self.num_answers else ""
        tokens = f"{self.tokens_in:,} tokens in, {self.tokens_out:,} out"
        if self.num_uncounted:
            tokens += f", and an unknown number for {counted(self.num_uncounted, 'answer')}"
        return f"{counted(self.num_answers, 'answer')}: {tokens}{each}"


def cost_of(variant_dir: Path) -> Cost:
    """Return what the answers of a variant took."""
    return Cost.of(list(answers_in(variant_dir / ANSWERS_FOLDER)))


def captions_report(plan: CaptionsPlan) -> Report:
    """Return the report of a plan: the work by state and reason."""
    settings = plan.recipe.settings
    num_chunks = sum(shard.num_chunks for shard in plan.shards if shard.has_work)
    answers = list(islice(answers_in(plan.variant_dir / ANSWERS_FOLDER), _MAX_ANSWERS))
    cost, counted_cost = Cost.of(answers), Cost.of([one for one in answers if one.is_counted])
    estimate: dict[str, Any] = {"num_chunks": num_chunks}
    lines: list[str] = []
    if num_chunks:
        # Unchanged chunks of a changed shard, and those with an answer, are not asked about again.
        lines.append(
            f"estimate at most {counted(num_chunks, 'chunk')} to caption, {counted(settings.frames, 'frame')} each"
        )
        if cost.num_answers:
            estimate["answer_s"] = cost.seconds * num_chunks / cost.num_answers
            tokens = "an unknown number of tokens"
            if counted_cost.num_answers:
                share = num_chunks / counted_cost.num_answers
                estimate |= {name: round(getattr(counted_cost, name) * share) for name in ("tokens_in", "tokens_out")}
                tokens = f"{estimate['tokens_in']:,} tokens in and {estimate['tokens_out']:,} out"
            lines.append(f"         {tokens}; {duration_text(estimate['answer_s'])} without requests in parallel")
            lines.append(f"         ({cost.line()})")
            for answer in answers[:_NUM_SHOWN]:
                problem = answer.problem(plan.recipe.model)
                code = "" if problem is None else f"{problem.code}: "
                lines.append(f"answer   {code}{on_one_line(answer.caption)}")
        else:
            lines.append(
                "         tokens and time are unknown: --trial 3 describes three chunks, and keeps the answers"
            )
    return chunks_report(
        plan,
        COLUMN,
        plan.recipe.as_dict(),
        estimate=lines,
        values={"where": settings.where, "estimate": estimate, "answers": cost.values()},
        asked={"endpoint": settings.endpoint, "where": settings.where, WEIGHTS: plan.recipe.weights},
        verb="describe",
    )


def captions_summary(summary: Summary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    speed = None
    if summary.encoded_s:
        speed = f"{summary.encoded_s / summary.wall_s:.1f}x real time"
    cost = cost_of(listed.parent)
    nothing = None if summary.num_chunks else NO_CHUNKS
    report = summary_report(
        summary, listed=listed, speed=speed, nothing=nothing, verb="describe", answers=cost.values()
    )
    lines = [report.text]
    if cost.num_answers:
        lines.append(f"cost     {cost.line()}, in all runs of the variant")
    if (listed.parent / TABLE_FILE).is_file():
        lines.append(f"table    {listed.parent / TABLE_FILE}")
    return Report("\n".join(lines), report.values)
