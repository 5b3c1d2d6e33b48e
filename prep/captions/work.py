"""The functions behind the column `captions`."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.prep.captions.answers import (
    ANSWER_FILE,
    ANSWERS_FOLDER,
    Budget,
    Journal,
    answered_chunks,
    journal_path,
    read_answers,
)
from clipmill.prep.captions.column import CaptionsRequest
from clipmill.prep.captions.endpoint import require_client
from clipmill.prep.captions.plan import (
    CaptionsPlan,
    captions_job,
    captions_task,
    make_captions_plan,
    pending_captions,
)
from clipmill.prep.captions.recipe import CAPTIONS, CaptionsSettings, resolve
from clipmill.prep.captions.report import captions_report, captions_summary, cost_of
from clipmill.prep.captions.table import TABLE_FILE, caption_table_problem, publish_caption_table
from clipmill.prep.captions.worker import Asking, open_captioner, open_chunks
from clipmill.prep.core.chunk_shards import current_chunks
from clipmill.prep.core.column import data_flags
from clipmill.prep.core.data_folder import writing
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import with_work
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.selection import make_variant
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, ExtraFile, ExtraFolder
from clipmill.prep.engines.choice import num_cores, threads_per_worker
from clipmill.shards.reader import Variant

_SERVED_WORKERS = 4
_SERVER_GB, _MODEL_GB = 1.0, 8.0  # memory of a worker; of a model, a guess: bfloat16 weights of 3 B parameters


def _require(settings: CaptionsSettings) -> None:
    settings.with_prompt()
    if settings.endpoint is not None:
        require_client()


def _plan(data_dir: Path, settings: CaptionsSettings, request: Request) -> CaptionsPlan:
    recipe = resolve(settings, video=current_chunks(data_dir))
    request.require_variant(recipe.variant, command=shlex.join(["prep", "captions", "--model", settings.model]))
    plan = make_captions_plan(data_dir, recipe, retry_codes=request.retry_codes)
    if isinstance(request, CaptionsRequest) and request.trial:
        _try(plan, request)
    return plan


def _asking(plan: CaptionsPlan, request: CaptionsRequest) -> tuple[Asking, CaptionsRequest, float]:
    """Return how the workers ask, the request with their number, and their GPUs."""
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
    )
    return asking, replace(request, workers=workers), gpus


def _run(plan: CaptionsPlan, settings: CaptionsSettings, request: Request, part_run: PartRun | None) -> Summary:
    assert isinstance(request, CaptionsRequest)
    asking, with_workers, gpus = _asking(plan, request)
    if asking.max_tokens_total is not None:
        Budget(plan.variant_dir, limit=asking.max_tokens_total, spent=asking.spent).begin()
    is_served = settings.endpoint is not None
    engine = with_workers.open_engine(memory_gb=_SERVER_GB if is_served else _MODEL_GB, gpus_per_worker=gpus)
    job = captions_job(plan, asking, request)
    job = replace(job, lag_limit_s=request.lag_limit_s, asked={**job.asked, **request.asked_engine})
    summary = execute(job, engine, part_run=part_run)
    variant = Variant(plan.variant_dir)
    if (part_run is None or part_run.is_last) and caption_table_problem(variant) is not None:
        publish_caption_table(variant)
    return summary


def _try(plan: CaptionsPlan, request: CaptionsRequest) -> None:
    """Ask about a few chunks for the estimate; the answers are kept.

    Raises:
        UserError: the model or the server does not answer.
    """
    left = request.trial
    with writing(plan.data_dir, column=CAPTIONS), Activity("captioning a few chunks for the estimate"):
        make_variant(plan.variant_dir, plan.recipe.as_dict())
        asking, _, _ = _asking(plan, request)
        for shard in with_work(plan.shards):
            task = captions_task(plan, shard, asking, retry_codes=frozenset())
            with Journal(journal_path(plan.variant_dir, shard.shard_id), task.journals) as journal:
                chunks = open_chunks(task, journal)
                num_open = len(chunks.unanswered())
                stop = chunks.ask(open_captioner(task), limit=left, on_answer=lambda row: None)
                failure = next(iter(chunks.failed.values()), None)
            if stop is not None or failure is not None:
                why = stop.message if stop is not None else failure.message if failure is not None else ""
                raise UserError(f"the trial failed: {why}", hint="answers so far are kept; correct it, and try again")
            left -= min(left, num_open)
            if not left:
                return


def _sample_facts(data_dir: Path, key: str) -> dict[str, Any]:
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


def _next_command(data: Path) -> list[str]:
    table = Variant.open(data, column=CAPTIONS).directory / TABLE_FILE
    return ["prep", "manifest", "captions", str(table), *data_flags(data)]


WORK = ColumnWork(
    require=_require,
    plan=_plan,
    run=_run,
    plan_report=captions_report,
    summary_report=lambda summary, settings, listed: captions_summary(summary, listed=listed),
    pending=pending_captions,
    # A damaged line of a journal is as if there were none.
    extra_folders=(ExtraFolder(ANSWERS_FOLDER, ANSWER_FILE, lambda path: True),),
    extra_files=(MERGED_TABLE, ExtraFile(TABLE_FILE, caption_table_problem)),
    sample_facts=_sample_facts,
    next_command=_next_command,
)
