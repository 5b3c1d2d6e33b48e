"""Driver of the column `captions`: options of workers, `--trial`, and the cost of the answers in reports."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, on_one_line
from clipmill.manifests.progress import Activity
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
from clipmill.prep.captions.worker import CaptionRequests, RequestOptions, open_captioner
from clipmill.prep.core.chunk_column import chunk_job
from clipmill.prep.core.chunk_plan import ChunksPlan, ShardLookup
from clipmill.prep.core.chunk_work import Workers, open_chunks
from clipmill.prep.core.column import Addition
from clipmill.prep.core.data_folder import lock_for_writing
from clipmill.prep.core.plan import with_work
from clipmill.prep.core.run import Summary
from clipmill.prep.core.variants import make_variant
from clipmill.prep.engines.choice import num_cores, threads_per_worker
from clipmill.shards.columns import CAPTIONS
from clipmill.shards.reader import Variant

_MIN_ENDPOINT_WORKERS = 4
_ENDPOINT_WORKER_GB = 1.0
_MODEL_WORKER_GB = 8.0  # a rough estimate for 3 billion parameters in bfloat16
_MAX_ANSWERS = 10_000  # maximum number of answers that an estimate reads
_NUM_SHOWN = 3  # number of answers in the report of a plan


def choose_workers(plan: ChunksPlan, request: CaptionsRequest) -> Workers:
    """Reset the shared token count and return the number, resources and options of the workers."""
    workers = _workers(plan, request)
    if workers.options.max_tokens_total is not None:
        Budget(plan.variant_dir, limit=workers.options.max_tokens_total, num_spent=workers.options.num_spent).begin()
    return workers


def _workers(plan: ChunksPlan, request: CaptionsRequest) -> Workers:
    work, has_endpoint = with_work(plan.shards), plan.recipe.settings.endpoint is not None
    gpus = 0.0 if has_endpoint else request.gpus_per_worker(has_work=bool(work))
    workers, num_threads = request.workers, None
    if has_endpoint:
        # Near the end of a shard, a worker has fewer requests left than it may send in parallel. Several workers keep
        # the server busy, even on a machine with few cores.
        workers = max(1, min(workers or max(_MIN_ENDPOINT_WORKERS, num_cores()), request.in_flight, len(work)))
    elif not gpus and workers is None and request.cluster is None:
        workers, num_threads = 1, num_cores()  # a model on a CPU uses all cores; more replicas would only take memory
    else:
        num_threads = threads_per_worker(
            workers, gpus_per_worker=gpus, address=request.cluster, execution=request.execution
        )
    limit = request.max_tokens_total
    cost = None if limit is None else cost_of(plan.variant_dir)
    options = RequestOptions(
        device="cuda" if gpus else "cpu",
        batch=request.batch,
        num_threads=num_threads,
        in_flight=request.in_flight // (workers or 1),
        retries=request.retries,
        timeout_s=request.timeout,
        max_tokens_total=limit,
        num_spent=0 if cost is None else cost.tokens_in + cost.tokens_out,
        retry_codes=request.retry_codes,
    )
    memory_gb = _ENDPOINT_WORKER_GB if has_endpoint else _MODEL_WORKER_GB
    return Workers(request=replace(request, workers=workers), gpus_each=gpus, memory_gb=memory_gb, options=options)


def other_journals(plan: ChunksPlan) -> Callable[[int], tuple[Path, ...]]:
    """Return a function that takes a shard ID and returns the journals of other shards with answers for its chunks."""
    lookup = ShardLookup(answered_chunks(plan.variant_dir / ANSWERS_FOLDER))

    def journals(shard_id: int) -> tuple[Path, ...]:
        other_ids = plan.find_shards(shard_id, lookup)
        return tuple(journal_path(plan.variant_dir, other_id) for other_id in other_ids if other_id != shard_id)

    return journals


def run_trial(plan: ChunksPlan, request: CaptionsRequest) -> None:
    """Caption a few chunks for the estimate, and store the answers.

    Raises:
        UserError: The model or the server failed, or a chunk cannot be captioned.
    """
    num_left = request.trial
    with lock_for_writing(plan.data_dir, column=CAPTIONS), Activity("captioning a few chunks for the estimate"):
        make_variant(plan.variant_dir, dict(plan.recipe.values))
        options = replace(_workers(plan, request).options, retry_codes=frozenset())
        job = chunk_job(COLUMN, plan, options=options)
        for shard in with_work(plan.shards):
            chunks, _ = open_chunks(job.task(shard))
            with Journal(journal_path(plan.variant_dir, shard.shard_id), chunks.extra_input) as journal:
                requests = CaptionRequests(chunks, plan.recipe, journal)
                num_pending = len(requests.pending_rows())
                stop = requests.send(open_captioner(plan.recipe, options), limit=num_left, on_answer=lambda row: None)
                failure = next(iter(requests.failures.values()), None)
            if stop is not None or failure is not None:
                reason = stop.message if stop is not None else failure.message if failure is not None else ""
                raise UserError(
                    f"the trial failed: {reason}", hint="fix the cause, and run the command again; answers are kept"
                )
            num_left -= min(num_left, num_pending)
            if not num_left:
                return


def sample_facts(data_dir: Path, key: str) -> dict[str, Any]:
    """Return the request duration and the model of a chunk's answer, or no facts if no journal contains the answer."""
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


@dataclass(frozen=True)
class Cost:
    """Cost of the answers of a variant.

    Attributes:
        num_answers: Number of answers.
        num_uncounted: Number of answers without a complete token count from the server.
        tokens_in: Number of input tokens; an unknown number counts as 0.
        tokens_out: Number of output tokens; an unknown number counts as 0.
        seconds: Total duration of the requests in seconds.
    """

    num_answers: int
    num_uncounted: int
    tokens_in: int
    tokens_out: int
    seconds: float

    @classmethod
    def of(cls, answers: list[Answer]) -> "Cost":
        """Return the total cost of answers."""
        return cls(
            num_answers=len(answers),
            num_uncounted=sum(not answer.is_counted for answer in answers),
            tokens_in=sum(answer.tokens_in or 0 for answer in answers),
            tokens_out=sum(answer.tokens_out or 0 for answer in answers),
            seconds=sum(answer.seconds for answer in answers),
        )

    def line(self) -> str:
        """Return the cost as a line of text."""
        per_answer = f"; {self.seconds / self.num_answers:.2g} s each" if self.num_answers else ""
        tokens = f"{self.tokens_in:,} tokens in, {self.tokens_out:,} out"
        if self.num_uncounted:
            tokens += f", and an unknown number for {count_noun(self.num_uncounted, 'answer')}"
        return f"{count_noun(self.num_answers, 'answer')}: {tokens}{per_answer}"


def cost_of(variant_dir: Path) -> Cost:
    """Return the cost of the answers of a variant."""
    return Cost.of(list(answers_in(variant_dir / ANSWERS_FOLDER)))


def estimate(plan: ChunksPlan) -> Addition:
    """Estimate the cost of a plan from the stored answers of the variant."""
    settings = plan.recipe.settings
    num_chunks = sum(shard.num_chunks for shard in plan.shards if shard.has_work)
    answers = list(islice(answers_in(plan.variant_dir / ANSWERS_FOLDER), _MAX_ANSWERS))
    cost, counted_cost = Cost.of(answers), Cost.of([answer for answer in answers if answer.is_counted])
    values: dict[str, Any] = {"num_chunks": num_chunks}
    lines: list[str] = []
    if num_chunks:
        # "At most": no request is sent for a chunk that is unchanged or already has an answer.
        lines.append(
            f"estimate at most {count_noun(num_chunks, 'chunk')} to caption, "
            f"{count_noun(settings.frames, 'frame')} each"
        )
        if cost.num_answers:
            values["answer_s"] = cost.seconds * num_chunks / cost.num_answers
            tokens = "an unknown number of tokens"
            if counted_cost.num_answers:
                scale = num_chunks / counted_cost.num_answers
                values |= {name: round(getattr(counted_cost, name) * scale) for name in ("tokens_in", "tokens_out")}
                tokens = f"{values['tokens_in']:,} tokens in and {values['tokens_out']:,} out"
            lines.append(f"         {tokens}; {duration_text(values['answer_s'])} if requests are not sent in parallel")
            lines.append(f"         ({cost.line()})")
            for answer in answers[:_NUM_SHOWN]:
                problem = answer.problem(plan.recipe.values["model"])
                code = "" if problem is None else f"{problem.code}: "
                lines.append(f"answer   {code}{on_one_line(answer.caption)}")
        else:
            lines.append("         tokens and time are unknown: use --trial 3 to caption three chunks now")
    return Addition(lines, {"estimate": values, "answers": asdict(cost)})


def summary(plan: ChunksPlan, result: Summary, written: Sequence[str]) -> Addition:
    """Return lines about the cost of all answers of the variant, and the path of its caption table."""
    cost, table = cost_of(plan.variant_dir), plan.variant_dir / TABLE_FILE
    lines = [f"cost     {cost.line()}, in all runs of the variant"] if cost.num_answers else []
    return Addition([*lines, *([f"table    {table}"] if table.is_file() else [])], {"answers": asdict(cost)})
