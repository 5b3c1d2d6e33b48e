"""Count the samples that failed to load, over all ranks, list them in failures.jsonl, and enforce --max-failures.

clipmill.train.data.outcomes describes the life cycle of a failed sample. The exchange of the failures also tells every
rank whether any rank must stop, so that either all ranks take a step or none does.
"""

import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from clipmill.manifests.errors import ClipmillError, FailedWork, UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch, TooManyFailures, describe_repeats
from clipmill.train.data.prefetch import broadcast_batch
from clipmill.train.distributed.world import World
from clipmill.train.run.folder import RunFolder, append_lines, keep_lines


@dataclass(frozen=True)
class SyncedBatch:
    """Batch of this rank, and values that are the same on all ranks.

    Attributes:
        loaded: Batch of this rank. In a pipeline, only the first stage has the frames.
        stops: True if a rank was told to stop. In that case, no rank takes the step.
        waited_s: Longest time that a rank waited for its batch, in seconds.
    """

    loaded: LoadedBatch
    stops: bool
    waited_s: float


class FailureLog:
    """Log of the failed samples of all ranks.

    Args:
        cursor: Position in the order of samples at which the run starts or continues. Failures after this position are
            removed from the file.
    """

    def __init__(self, run: RunFolder, *, world: World, max_failures: int, cursor: Cursor) -> None:
        self._path, self._world, self._max_failures = run.failures, world, max_failures
        self._has_warned = False

        self._keys = world.first(
            lambda: [
                str(line.get("key"))
                for line in keep_lines(run.failures, lambda line: cursor.has_passed(line["position"]))
            ]
        )

    @property
    def num_failed(self) -> int:
        """Number of failed samples so far."""
        return len(self._keys)

    @property
    def num_left(self) -> int:
        """Number of further failures that are allowed."""
        return self._max_failures - self.num_failed

    def next_batch(self, batches: Generator[LoadedBatch, None, None], *, stops: bool) -> SyncedBatch:
        """Return the next batch once every rank has a batch. All ranks must call this method before each step.

        Args:
            stops: True if this rank was told to stop.

        Raises:
            FailedWork: Too many samples failed.
            ClipmillError: The loader failed on one of the ranks. All ranks raise the error of this loader.
        """
        began_s = time.perf_counter()
        loaded_batch, error = None, None
        failed_samples: tuple[FailedSample, ...] = ()
        try:
            if self._world.stages.is_first:
                loaded_batch = next(batches)
                failed_samples = loaded_batch.failed
        except TooManyFailures as too_many:
            failed_samples = too_many.failed
        except ClipmillError as loader_error:
            error = loader_error
        waited_s = time.perf_counter() - began_s
        # The ranks exchange four numbers per step. They exchange objects only after a failure.
        counts_14 = torch.tensor(
            [[len(failed_samples), float(stops), float(error is not None), waited_s]], dtype=torch.float64
        )
        all_R4 = self._world.gather(counts_14)
        num_failed, num_stops, num_errors, _ = all_R4.sum(dim=0).tolist()
        if num_failed:
            self._record([sample for samples in self._world.gather_objects(failed_samples) for sample in samples])
        if num_errors:
            raise next(rank_error for rank_error in self._world.gather_objects(error) if rank_error is not None)
        loaded_batch = broadcast_batch(loaded_batch, self._world.stages)
        assert loaded_batch is not None  # otherwise an error has been raised above
        return SyncedBatch(loaded_batch, stops=num_stops > 0, waited_s=all_R4[:, 3].max().item())

    def _record(self, failures: list[FailedSample]) -> None:
        self._keys += [failure.key for failure in failures]
        if self._world.is_first:
            append_lines(self._path, [asdict(failure) for failure in failures])
        last_failure = f"{failures[-1].key}: {failures[-1].detail}"
        if self.num_failed > self._max_failures:
            raise FailedWork(
                f"{count_noun(self.num_failed, 'sample')} failed, more than --max-failures {self._max_failures}"
                f"{describe_repeats(self._keys)}; the last one: {last_failure}; all are listed in "
                f"{self._path}{_remedy(failures)}"
            )
        if self._world.is_first and not self._has_warned:
            self._has_warned = True
            sys.stderr.write(
                f"note: a sample could not be loaded and is skipped: {last_failure}; the run ends if more than "
                f"{self._max_failures} samples fail (--max-failures); all failures are listed in "
                f"{self._path}{_remedy(failures)}\n"
            )


def _remedy(failures: list[FailedSample]) -> str:
    """Return advice about a missing or damaged shard; empty if the last sample failed for another reason."""
    if failures[-1].reason not in ("shard_unreadable", "checksum"):
        return ""
    return "; `prep verify` lists missing and damaged shards and the commands that rebuild them"


# Fraction of GPU memory reserved for cuBLAS, NCCL and fragmentation.
_RESERVED_FRACTION = 0.1


@contextmanager
def explain_out_of_memory(settings: TrainingSettings, world: World, *, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error within the block into a UserError.

    On a GPU, the hint of the error proposes a batch size that probably fits.

    Raises:
        UserError: torch raised OutOfMemoryError, or its CPU allocator raised a RuntimeError.
    """
    if device.type != "cuda":
        try:
            yield
        except RuntimeError as error:
            if "DefaultCPUAllocator" not in str(error):
                raise
            raise UserError(
                f"out of memory: a step of {count_noun(settings.batch, 'sample')} does not fit",
                hint="use a smaller --microbatch or --batch, or smaller clips",
            ) from error
        return
    before_bytes = torch.cuda.memory_allocated(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        share = settings.batch // world.size
        raise memory_error(
            batch=settings.batch,
            share=share,
            microbatch=min(settings.microbatch or share, share),
            before_bytes=before_bytes,
            peak_bytes=torch.cuda.max_memory_allocated(device),
            total_bytes=available_bytes(device),
        ) from error


def available_bytes(device: torch.device) -> int:
    """Return the bytes of GPU memory that are free or held by this process, within its memory fraction."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    limit_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    return min(limit_bytes, free_bytes + torch.cuda.memory_reserved(device))


def memory_error(
    *, batch: int, share: int, microbatch: int, before_bytes: int, peak_bytes: int, total_bytes: int
) -> UserError:
    """Return the error for a step that needs more memory than this process can use.

    Args:
        batch: Number of samples per step, over all ranks.
        share: Number of these samples on this rank.
        microbatch: Number of samples in a microbatch.
        before_bytes: Bytes allocated before the step: weights, optimizer state, buffers.
        peak_bytes: Bytes allocated when memory ran out; the step needs at least that much.
        total_bytes: Bytes that this process can use.
    """
    num_fitting = largest_fit(microbatch, before_bytes=before_bytes, peak_bytes=peak_bytes, total_bytes=total_bytes)
    message = (
        f"out of GPU memory: a forward and backward pass over {count_noun(microbatch, 'sample')} needs more than "
        f"{size_text(total_bytes)}: "
        f"{size_text(before_bytes)} were allocated before the step, and {size_text(peak_bytes)} at its peak"
    )
    if num_fitting is None:
        return UserError(
            message,
            hint="use a smaller --model, or --parallel.strategy fsdp on more GPUs: a single sample does not fit",
        )
    return UserError(
        message,
        hint=f"use --microbatch {num_fitting}, which would probably fit and keeps --batch {batch}; "
        f"or use --batch {batch // share * num_fitting}, or --towers.activation-checkpointing",
    )


def largest_fit(microbatch: int, *, before_bytes: int, peak_bytes: int, total_bytes: int) -> int | None:
    """Return the number of samples that probably fit, rounded down to a power of two; None if not even one fits.

    A sample needs at least (peak - before) / microbatch bytes. It may need more, because the peak is measured when
    memory runs out, not after a complete step. The result is therefore at most half of `microbatch`.
    """
    if microbatch < 2:
        return None
    free_bytes = (1 - _RESERVED_FRACTION) * total_bytes - before_bytes
    sample_bytes = max(peak_bytes - before_bytes, 1) / microbatch
    num_samples = min(microbatch // 2, int(free_bytes / sample_bytes))
    return 1 << (num_samples.bit_length() - 1) if num_samples >= 1 else None
