"""Driver of `captions`: how its workers ask, answers in the journals of other shards, and the trial of a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import count_noun, on_one_line
from clipmill.manifests.units import duration_text
from clipmill.prep.captions.answers import (
    ANSWERS_FOLDER,
    Answer,
    Budget,
    Journal,
    answered_chunks,
    answers_in,
    journal_path,
    read_answers,
)
from clipmill.prep.captions.column import COLUMN, CaptionsRequest
from clipmill.prep.captions.work import TABLE_FILE
from clipmill.prep.captions.worker import Asking, Inquiry, open_captioner
from clipmill.prep.core.chunk_column import chunk_job
from clipmill.prep.core.chunk_columns import ChunksPlan, Holders
from clipmill.prep.core.chunk_work import Workers
from clipmill.prep.core.chunk_worker import open_chunks
from clipmill.prep.core.column import Addition
from clipmill.prep.core.data_folder import writing
from clipmill.prep.core.plan import with_work
from clipmill.prep.core.run import Summary
from clipmill.prep.core.selection import make_variant
from clipmill.prep.engines.choice import num_cores, threads_per_worker
from clipmill.shards.columns import CAPTIONS
from clipmill.shards.reader import Variant

_SERVED_WORKERS = 4
_SERVER_GB, _MODEL_GB = 1.0, 8.0  # memory of a worker; of a model, a guess: bfloat16 weights of 3 B parameters


def choose_workers(plan: ChunksPlan, request: CaptionsRequest) -> Workers:
    """Return how the workers of a run ask, and forget the tokens of the run before it."""
    workers = _workers(plan, request)
    if workers.use.max_tokens_total is not None:
        Budget(plan.variant_dir, limit=workers.use.max_tokens_total, spent=workers.use.spent).begin()
    return workers


def _workers(plan: ChunksPlan, request: CaptionsRequest) -> Workers:
    work, is_served = with_work(plan.shards), plan.recipe.settings.endpoint is not None
    gpus = 0.0 if is_served else request.gpus_per_worker(has_work=bool(work))
    workers, num_threads = request.workers, None
    if is_served:
        # While a worker ends a shard, its share of the requests is not used: several share them, also on few cores.
        workers = max(1, min(workers or max(_SERVED_WORKERS, num_cores()), request.in_flight, len(work)))
    elif not gpus and workers is None and request.cluster is None:
        workers, num_threads = 1, num_cores()  # a model on a CPU uses all cores; replicas take its memory again
    else:
        num_threads = threads_per_worker(
            workers, gpus_per_worker=gpus, address=request.cluster, execution=request.execution
        )
    limit = request.max_tokens_total
    cost = None if limit is None else cost_of(plan.variant_dir)
    asking = Asking(
        device="cuda" if gpus else "cpu",
        batch=request.batch,
        num_threads=num_threads,
        in_flight=request.in_flight // (workers or 1),
        retries=request.retries,
        timeout_s=request.timeout,
        max_tokens_total=limit,
        spent=0 if cost is None else cost.tokens_in + cost.tokens_out,
        retry_codes=request.retry_codes,
    )
    memory_gb = _SERVER_GB if is_served else _MODEL_GB
    return Workers(request=replace(request, workers=workers), gpus_each=gpus, memory_gb=memory_gb, use=asking)


def other_journals(plan: ChunksPlan) -> Callable[[int], tuple[Path, ...]]:
    """Return a function of a shard: the journals of other shards with answers about chunks that it holds now."""
    answered = Holders(answered_chunks(plan.variant_dir / ANSWERS_FOLDER))

    def journals(shard_id: int) -> tuple[Path, ...]:
        others = plan.holding(shard_id, answered)
        return tuple(journal_path(plan.variant_dir, other) for other in others if other != shard_id)

    return journals


def run_trial(plan: ChunksPlan, request: CaptionsRequest) -> None:
    """Ask about a few chunks for the estimate; the answers are kept.

    Raises:
        UserError: the model or the server does not answer.
    """
    left = request.trial
    with writing(plan.data_dir, column=CAPTIONS), Activity("captioning a few chunks for the estimate"):
        make_variant(plan.variant_dir, dict(plan.recipe.values))
        asking = replace(_workers(plan, request).use, retry_codes=frozenset())
        job = chunk_job(COLUMN, plan, use=asking)
        for shard in with_work(plan.shards):
            chunks, _ = open_chunks(job.task(shard))
            with Journal(journal_path(plan.variant_dir, shard.shard_id), chunks.more) as journal:
                inquiry = Inquiry(chunks, plan.recipe, journal)
                num_open = len(inquiry.unanswered())
                stop = inquiry.ask(open_captioner(plan.recipe, asking), limit=left, on_answer=lambda row: None)
                failure = next(iter(inquiry.failed.values()), None)
            if stop is not None or failure is not None:
                why = stop.message if stop is not None else failure.message if failure is not None else ""
                raise UserError(f"the trial failed: {why}", hint="answers so far are kept; correct it, and try again")
            left -= min(left, num_open)
            if not left:
                return


def sample_facts(data_dir: Path, key: str) -> dict[str, Any]:
    """Return how long the answer about a chunk took, and which model gave it, as far as the journal has it."""
    variant = Variant.open(data_dir, column=CAPTIONS)
    for shard in variant.shards():
        row = pc.index(shard.index["key"], key).as_py()
        if row >= 0:
            fingerprint, folder = shard.index["chunk_fingerprint"][row].as_py(), variant.directory / ANSWERS_FOLDER
            for shard_id, fingerprints in answered_chunks(folder):
                if fingerprint.encode() in fingerprints:
                    answer = read_answers(journal_path(variant.directory, shard_id)).get(fingerprint)
                    return {} if answer is None else {"seconds": answer.seconds, "answered_by": answer.model}
    return {}


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
