"""Lines of `captions` in the reports of plans and runs: the cost of answers, and an estimate from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from clipmill.manifests.formatting import count_noun, duration_text, on_one_line
from clipmill.prep.captions.answers import ANSWERS_FOLDER, Answer, answers_in
from clipmill.prep.captions.table import TABLE_FILE
from clipmill.prep.core.chunk_columns import ChunksPlan
from clipmill.prep.core.column import Addition
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
            tokens += f", and an unknown number for {count_noun(self.num_uncounted, 'answer')}"
        return f"{count_noun(self.num_answers, 'answer')}: {tokens}{each}"


def cost_of(variant_dir: Path) -> Cost:
    """Return what the answers of a variant took."""
    return Cost.of(list(answers_in(variant_dir / ANSWERS_FOLDER)))


def estimate(plan: ChunksPlan) -> Addition:
    """Return what the captions of a plan cost, from the answers so far."""
    settings = plan.recipe.settings
    num_chunks = sum(shard.num_chunks for shard in plan.shards if shard.has_work)
    answers = list(islice(answers_in(plan.variant_dir / ANSWERS_FOLDER), _MAX_ANSWERS))
    cost, counted_cost = Cost.of(answers), Cost.of([one for one in answers if one.is_counted])
    values: dict[str, Any] = {"num_chunks": num_chunks}
    lines: list[str] = []
    if num_chunks:
        # Unchanged chunks of a changed shard, and those with an answer, are not asked about again.
        lines.append(
            f"estimate at most {count_noun(num_chunks, 'chunk')} to caption, "
            f"{count_noun(settings.frames, 'frame')} each"
        )
        if cost.num_answers:
            values["answer_s"] = cost.seconds * num_chunks / cost.num_answers
            tokens = "an unknown number of tokens"
            if counted_cost.num_answers:
                share = num_chunks / counted_cost.num_answers
                values |= {name: round(getattr(counted_cost, name) * share) for name in ("tokens_in", "tokens_out")}
                tokens = f"{values['tokens_in']:,} tokens in and {values['tokens_out']:,} out"
            lines.append(f"         {tokens}; {duration_text(values['answer_s'])} without requests in parallel")
            lines.append(f"         ({cost.line()})")
            for answer in answers[:_NUM_SHOWN]:
                problem = answer.problem(plan.recipe.values["model"])
                code = "" if problem is None else f"{problem.code}: "
                lines.append(f"answer   {code}{on_one_line(answer.caption)}")
        else:
            lines.append(
                "         tokens and time are unknown: --trial 3 describes three chunks, and keeps the answers"
            )
    return Addition(lines, {"estimate": values, "answers": cost.values()})


def summary(plan: ChunksPlan, result: Summary, written: Sequence[str]) -> Addition:
    """Return what all answers of the variant cost, and its table."""
    cost, table = cost_of(plan.variant_dir), plan.variant_dir / TABLE_FILE
    lines = [f"cost     {cost.line()}, in all runs of the variant"] if cost.num_answers else []
    return Addition([*lines, *([f"table    {table}"] if table.is_file() else [])], {"answers": cost.values()})
