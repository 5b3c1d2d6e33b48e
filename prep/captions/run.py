"""Driver of `captions`: how its workers ask, answers in the journals of other shards, and the trial of a plan."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.prep.captions.answers import (
    ANSWERS_FOLDER,
    Budget,
    Journal,
    answered_chunks,
    journal_path,
    read_answers,
)
from clipmill.prep.captions.column import COLUMN, CaptionsRequest
from clipmill.prep.captions.report import cost_of
from clipmill.prep.captions.worker import Asking, Inquiry, open_captioner
from clipmill.prep.core.chunk_column import chunk_job
from clipmill.prep.core.chunk_plan import ChunksPlan, Holders
from clipmill.prep.core.chunk_work import Workers, open_chunks
from clipmill.prep.core.data_folder import writing
from clipmill.prep.core.plan import with_work
from clipmill.prep.core.variants import make_variant
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
