"""Making one shard of the `captions` column in a worker.

Captions of unchanged chunks are copied from the old shard, and those that the journal has are taken from there; the
model is asked about all others. The shard is written once no question is left; until then, answers are in the journal
alone. A chunk without a caption is recorded in the commit and does not affect the others.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.prep.captions.answers import Answer, Budget, Journal, journal_path
from clipmill.prep.captions.asking import Captioner, Questions
from clipmill.prep.captions.endpoint import Endpoint
from clipmill.prep.captions.frames import Picture, decode_pictures
from clipmill.prep.captions.recipe import CAPTIONS, CaptionsRecipe
from clipmill.prep.captions.sample import EXTENSION, caption_sample
from clipmill.prep.captions.vlm import Device, LocalCaptioner, open_model
from clipmill.prep.captions.weights import find_model
from clipmill.prep.core.chunk_input import OldSamples, chunk_fingerprints, read_chunk, seconds_of
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.heartbeat import Heartbeat
from clipmill.prep.core.shard_result import ShardResult, Stop, cpu_s, stopped, system_errors_as_results
from clipmill.prep.engines import worker_threads
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.damage import Damaged
from clipmill.shards.format import CAPTIONS_FIELDS
from clipmill.shards.reader import CommittedShard, open_shard
from clipmill.shards.writer import Sample, ShardWriter


@dataclass(frozen=True)
class Asking:
    """How models are asked, without effect on their answers.

    Attributes:
        batch: chunks at a time of a model in the worker.
        num_threads: of that model; None for what the engine has assigned to the worker.
        in_flight, retries, timeout_s: requests of the worker at a time, repetitions and time limit of each.
        max_tokens_total, spent: tokens that the variant may take, and that answers of earlier runs took.
    """

    device: Device
    batch: int
    num_threads: int | None
    in_flight: int
    retries: int
    timeout_s: float
    max_tokens_total: int | None = None
    spent: int = 0


@dataclass(frozen=True)
class CaptionsTask:
    """Input of a worker: paths and small values only.

    Attributes:
        video_dir: folder of the `video` variant to caption.
        video_commit: commit of the shard with the chunks, as planned.
        old_commits: Commits of the column with captions of unchanged chunks.
        journals: Journals of other shards with answers about chunks of this one.
        rows: the chunks to caption, as rows of the shard; None for all.
        retry_codes: codes of answers that were no captions, which are asked for again.
    """

    variant_dir: Path
    shard_id: int
    plan_fingerprint: str
    recipe: CaptionsRecipe
    video_dir: Path
    video_commit: Commit
    old_commits: tuple[Commit, ...]
    journals: tuple[Path, ...]
    rows: tuple[int, ...] | None
    asking: Asking
    retry_codes: frozenset[str]


def make_captions(task: CaptionsTask) -> ShardResult:
    """Make, publish and commit one shard."""
    return system_errors_as_results(_make, task)


@dataclass
class Chunks:
    """The chunks of a shard, and what is known about them.

    Attributes:
        wanted: rows of the shard.
        failed: why there is no answer about a row.
    """

    task: CaptionsTask
    video: CommittedShard
    fingerprints: list[str]
    old: OldSamples
    journal: Journal
    wanted: range | tuple[int, ...]
    failed: dict[int, SourceFailure] = field(default_factory=dict)

    def unanswered(self) -> list[int]:
        """Return the rows to ask about."""
        return [row for row in self.wanted if self.fingerprints[row] not in self.old and self._is_open(row)]

    def _is_open(self, row: int) -> bool:
        answer = self.journal.answers.get(self.fingerprints[row])
        problem = None if answer is None else answer.problem(self.task.recipe.model)
        again = self.task.retry_codes | {FailureCode.OTHER_MODEL}
        return answer is None or (problem is not None and problem.code in again)

    def ask(self, captioner: Captioner, *, limit: int | None = None, on_answer: Callable[[int], None]) -> Stop | None:
        """Ask about the open rows, at most `limit`; return why the rest could not be asked, or None."""
        rows, asking, settings = self.unanswered()[:limit], self.task.asking, self.task.recipe.settings
        budget = Budget(self.task.variant_dir, limit=asking.max_tokens_total, spent=asking.spent)

        def stop() -> Stop | None:
            message = f"the answers took the {asking.max_tokens_total or 0:,} tokens of --max-tokens-total"
            return Stop(FailureCode.BUDGET_SPENT, message) if budget.is_spent() else None

        def keep(row: int, found: Answer | SourceFailure) -> None:
            if isinstance(found, SourceFailure):
                self.failed[row] = found
                return
            self.journal.add(self.fingerprints[row], found)
            budget.add(found.tokens)
            on_answer(row)

        def seed(row: int) -> int:
            text = f"{settings.seed or 0} {self.fingerprints[row]}"
            return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1

        def pictures(content: bytes, row: int) -> list[Picture]:
            return decode_pictures(content, self.video, row, count=settings.frames, size=settings.size)

        read = partial(read_chunk, self.video)
        questions = Questions(rows=iter(rows), stop=stop, read=read, pictures=pictures, keep=keep, seed=seed)
        return captioner.answer(questions) if rows else None

    def sample(self, row: int) -> Sample | SourceFailure:
        """Return the sample of a row, or why there is none."""
        fingerprint = self.fingerprints[row]
        if fingerprint in self.old:
            return self.old.sample(fingerprint, self.video.index, row)
        if row in self.failed:
            return self.failed[row]
        answer = self.journal.answers[fingerprint]
        problem = answer.problem(self.task.recipe.model)
        return problem or caption_sample(self.video.index, row, answer, fingerprint=fingerprint)


def open_captioner(task: CaptionsTask) -> Captioner:
    """Open the model or the server that answers.

    Raises:
        UserError: it cannot be opened here, or its weights are not those of the plan.
    """
    settings, asking = task.recipe.settings, task.asking
    if settings.endpoint is not None:
        return Endpoint(settings, in_flight=asking.in_flight, retries=asking.retries, timeout_s=asking.timeout_s)
    found = find_model(settings.model)
    if found.sha256 != task.recipe.model_sha256:
        raise UserError(f"the files of {found.name} on this node differ from those of the plan", hint="copy them again")
    model = open_model(
        found.directory,
        name=found.name,
        device=asking.device,
        precision=settings.precision,
        num_threads=worker_threads() if asking.num_threads is None else asking.num_threads,
    )
    return LocalCaptioner(model, settings, batch=asking.batch)


def open_chunks(task: CaptionsTask, journal: Journal) -> Chunks:
    """Open a shard.

    Raises:
        Damaged: the chunks cannot be read.
        FileNotFoundError: likewise.
    """
    video = open_shard(task.video_dir, task.video_commit)
    fingerprints = chunk_fingerprints(video.index)
    old = OldSamples(task.variant_dir, task.old_commits, fields=CAPTIONS_FIELDS, wanted=fingerprints)
    wanted = range(len(fingerprints)) if task.rows is None else task.rows
    return Chunks(task, video, fingerprints, old, journal, wanted)


def _make(task: CaptionsTask) -> ShardResult:
    begin_cpu_s = cpu_s()
    with Journal(journal_path(task.variant_dir, task.shard_id), task.journals) as journal:
        try:
            chunks = open_chunks(task, journal)
        except (Damaged, FileNotFoundError) as error:
            return stopped(task, FailureCode.CHUNK_DAMAGED, f"the chunks cannot be read: {error}")
        asked = chunks.unanswered()
        with Heartbeat(task.variant_dir, task.shard_id, num_chunks=len(chunks.wanted)) as beat:
            if asked:
                try:
                    captioner = open_captioner(task)
                except UserError as error:
                    return stopped(task, FailureCode.MODEL_UNAVAILABLE, str(error))
                num_known = len(chunks.wanted) - len(asked)
                done: list[int] = []

                def show(row: int) -> None:
                    done.append(row)
                    beat.show(num_known + len(done))

                if (stop := chunks.ask(captioner, on_answer=show)) is not None:
                    return stopped(task, stop.code, stop.message)
            result = _write(chunks)
    seconds = float(sum(seconds_of(chunks.video.index, row) for row in asked if row not in chunks.failed))
    return replace(result, encoded_s=seconds, cpu_s=cpu_s() - begin_cpu_s)


def _write(chunks: Chunks) -> ShardResult:
    """Write and commit the shard; every chunk has an answer, or a reason."""
    task, index = chunks.task, chunks.video.index
    failures: list[Failure] = []
    files = None
    content = hashlib.sha256(task.plan_fingerprint.encode())
    writer = ShardWriter(task.variant_dir, shard_id=task.shard_id, extensions=[EXTENSION], fields=CAPTIONS_FIELDS)
    with writer:
        for row in chunks.wanted:
            outcome = chunks.sample(row)
            if isinstance(outcome, SourceFailure):
                video_id, key = (index[name][row].as_py() for name in ("video_id", "key"))
                failures.append(Failure(video_id, key, str(outcome.code), outcome.message))
                continue
            writer.add(outcome)
            # The text of an answer is not a function of the plan.
            content.update(outcome.members[EXTENSION])
        num_chunks = writer.num_samples
        if num_chunks:
            files = writer.publish(content.hexdigest())
    commit = Commit(CAPTIONS, task.shard_id, task.video_commit.split, task.plan_fingerprint, files, tuple(failures))
    write_commit(task.variant_dir, commit)
    return ShardResult(
        task.shard_id,
        num_chunks=num_chunks,
        num_reused=sum(chunks.fingerprints[row] in chunks.old for row in chunks.wanted),
        num_bytes=files.tar_bytes if files else 0,
        failures=commit.failures,
    )
