"""Caption the chunks of one shard in a worker.

Answers in the journal of the shard (`answers.py`) are reused, and a request is sent for every other chunk. Once all
requests of the shard have ended, the answers become samples. A chunk without a caption does not affect other chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from clipmill.manifests.errors import UserError
from clipmill.prep.captions.answers import (
    Answer,
    Budget,
    Captioner,
    CaptionTask,
    Journal,
    caption_sample,
    decode_pictures,
    journal_path,
)
from clipmill.prep.captions.endpoint import Endpoint
from clipmill.prep.captions.recipe import CaptionsSettings, find_model
from clipmill.prep.captions.vlm import Device, LocalCaptioner, open_model
from clipmill.prep.core.chunk_content import read_chunk
from clipmill.prep.core.chunk_input import Chunk, Chunks
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.shard_result import Stop
from clipmill.prep.engines import worker_threads
from clipmill.shards.writer import Sample


@dataclass(frozen=True)
class RequestOptions:
    """Options of a worker that are not part of the recipe.

    Attributes:
        device: Device of a local model.
        batch: Batch size of a local model in chunks.
        num_threads: Number of CPU threads of a local model; None for the number that the engine assigns to the worker.
        in_flight: Maximum number of parallel requests of the worker to a server.
        retries: Maximum number of retries of a request.
        timeout_s: Timeout of a request in seconds.
        max_tokens_total: Maximum number of tokens for the variant, including earlier runs; None for no limit.
        num_spent: Number of tokens that earlier runs have used.
        retry_codes: Failure codes to retry: stored answers with these codes are replaced.
    """

    device: Device
    batch: int
    num_threads: int | None
    in_flight: int
    retries: int
    timeout_s: float
    max_tokens_total: int | None = None
    num_spent: int = 0
    retry_codes: frozenset[str] = frozenset()


def make_captions(chunks: Chunks, recipe: Recipe[CaptionsSettings]) -> Iterator[Sample | SourceFailure | Stop]:
    """Yield a sample or a failure for each chunk; yield only a `Stop` if some requests were not sent."""
    with Journal(journal_path(chunks.variant_dir, chunks.shard_id), chunks.extra_input) as journal:
        requests = CaptionRequests(chunks, recipe, journal)
        pending_rows = requests.pending_rows()
        chunks.known_rows.update(set(chunks.rows) - set(pending_rows))
        if pending_rows:
            answered_rows: list[int] = []
            num_known = len(chunks.planned_rows) - len(pending_rows)

            def show(row: int) -> None:
                answered_rows.append(row)
                chunks.show(num_known + len(answered_rows))

            stop = requests.send(open_captioner(recipe, chunks.options), on_answer=show)
            if stop is not None:
                yield stop
                return
        yield from map(requests.outcome, chunks)


@dataclass
class CaptionRequests:
    """Requests for those chunks of a shard that have no sample yet.

    Attributes:
        failures: Failures of the requests, keyed by row.
    """

    chunks: Chunks
    recipe: Recipe[CaptionsSettings]
    journal: Journal
    failures: dict[int, SourceFailure] = field(default_factory=dict)

    def pending_rows(self) -> list[int]:
        """Return the rows without an answer, and the rows whose answer has a failure to retry."""
        codes = self.chunks.options.retry_codes | {FailureCode.OTHER_MODEL}
        rows = []
        for row in self.chunks.rows:
            answer = self.journal.answers.get(self.chunks.fingerprints[row])
            problem = None if answer is None else answer.problem(self.recipe.values["model"])
            if answer is None or (problem is not None and problem.code in codes):
                rows.append(row)
        return rows

    def send(self, captioner: Captioner, *, limit: int | None = None, on_answer: Callable[[int], None]) -> Stop | None:
        """Send requests for the pending rows, or for the first `limit` of them.

        Args:
            on_answer: Function that is called with the row of each answer, after the answer has been stored.

        Returns:
            Reason why some requests were not sent, or None.
        """
        chunks, options, settings = self.chunks, self.chunks.options, self.recipe.settings
        budget = Budget(chunks.variant_dir, limit=options.max_tokens_total, num_spent=options.num_spent)

        def stop() -> Stop | None:
            message = f"the answers have used the {options.max_tokens_total or 0:,} tokens of --max-tokens-total"
            return Stop(FailureCode.BUDGET_SPENT, message) if budget.is_spent() else None

        def keep(row: int, result: Answer | SourceFailure) -> None:
            if isinstance(result, SourceFailure):
                self.failures[row] = result
                return
            self.journal.add(chunks.fingerprints[row], result)
            budget.add(result.tokens)
            on_answer(row)

        def seed(row: int) -> int:
            text = f"{settings.seed or 0} {chunks.fingerprints[row]}"
            return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") >> 1

        rows, read = self.pending_rows()[:limit], partial(read_chunk, chunks.video)
        pictures = partial(decode_pictures, count=settings.frames, size=settings.size)
        task = CaptionTask(rows=iter(rows), stop=stop, read=read, pictures=pictures, keep=keep, seed=seed)
        return captioner.caption(task) if rows else None

    def outcome(self, chunk: Chunk) -> Sample | SourceFailure:
        """Return the sample of a chunk, or the reason why it has no sample."""
        if chunk.row in self.failures:
            return self.failures[chunk.row]
        answer = self.journal.answers[chunk.fingerprint]
        return answer.problem(self.recipe.values["model"]) or caption_sample(chunk, answer)


def open_captioner(recipe: Recipe[CaptionsSettings], options: RequestOptions) -> Captioner:
    """Return the model or the server that writes the captions.

    Raises:
        UserError: The model or the client cannot be used on this machine, or the files of the model differ from the
            files that the plan was made with.
    """
    settings = recipe.settings
    if settings.endpoint is not None:
        return Endpoint(settings, in_flight=options.in_flight, retries=options.retries, timeout_s=options.timeout_s)
    files = find_model(settings.model)
    if files.sha256 != recipe.values["model_sha256"]:
        raise UserError(
            f"the files of model {files.name} on this node differ from the files that the plan was made with",
            hint="copy the same files to all nodes",
        )
    model = open_model(
        files.directory,
        name=files.name,
        device=options.device,
        precision=settings.precision,
        num_threads=worker_threads() if options.num_threads is None else options.num_threads,
    )
    return LocalCaptioner(model=model, settings=settings, batch=options.batch)
