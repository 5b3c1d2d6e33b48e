"""Samples that could not be loaded: counted over all ranks, listed in failures.jsonl, limited by --max-failures.

The life cycle of a failed sample ("why was this sample skipped?"):

1. Reading or decoding raises `SampleFailed` with a reason code (clipmill.train.data.outcomes). The loader turns it into
a
   `FailedSample`, which comes with the next batch; that batch is filled from the samples that follow.
2. Before each step, `FailureLog.next_batch` gathers the failures of all ranks. The first rank appends them to
   failures.jsonl: position in the order of samples, chunk, reason, detail.
3. Once more than --max-failures samples have failed, all ranks raise `FailedWork`, which ends the run. A loader whose
   rank alone has used up the budget stops with `TooManyFailures`; that is caught here and counted like the others.
4. A resumed run drops the lines of samples that come after its checkpoint, and visits these samples again. The results
   page lists the rest.

The same exchange tells all ranks whether one of them is to stop, so that all take a step or none does.
"""

import sys
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch

from clipmill.manifests.errors import ClipmillError, FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch, TooManyFailures
from clipmill.train.data.prefetch import on_all_stages
from clipmill.train.distributed.world import World
from clipmill.train.run.folder import RunFolder, append_lines, keep_lines


@dataclass(frozen=True)
class SyncedBatch:
    """This rank's batch, and what all ranks know. Of a pipeline's stages only the first has the pictures.

    Attributes:
        stops: a rank was told to stop, so this step is not taken.
        waited_s: the longest that any rank waited for its batch.
    """

    loaded: LoadedBatch
    stops: bool
    waited_s: float


class FailureLog:
    """The failed samples of all ranks.

    Args:
        cursor: where the run starts or continues in the order of samples; later failures in the file are dropped.

    Attributes:
        num_failed: number of failed samples so far.
    """

    def __init__(self, run: RunFolder, *, world: World, max_failures: int, cursor: Cursor) -> None:
        self._path, self._world, self._max_failures = run.failures, world, max_failures
        self._is_told = False

        def count_kept_lines() -> int:
            return len(keep_lines(run.failures, lambda line: cursor.has_passed(line["position"])))

        self.num_failed = world.first(count_kept_lines)

    @property
    def num_left(self) -> int:
        """Number of further failures that are allowed."""
        return self._max_failures - self.num_failed

    def next_batch(self, batches: Generator[LoadedBatch, None, None], *, stops: bool) -> SyncedBatch:
        """Return the next batch once every rank has one; all ranks call it before each step.

        Args:
            stops: this rank was told to stop.

        Raises:
            FailedWork: too many samples failed.
            ClipmillError: what the loader of a rank raised; all ranks raise it.
        """
        began_s = time.perf_counter()
        loaded, error = None, None
        failed: tuple[FailedSample, ...] = ()
        try:
            if self._world.stages.is_first:
                loaded = next(batches)
                failed = loaded.failed
        except TooManyFailures as too_many:
            failed = too_many.failed
        except ClipmillError as own:
            error = own
        waited_s = time.perf_counter() - began_s
        # Four numbers per step; objects are exchanged only if something failed.
        own_14 = torch.tensor([[len(failed), float(stops), float(error is not None), waited_s]], dtype=torch.float64)
        all_R4 = self._world.gather(own_14)
        num_failed, num_stops, num_errors, _ = all_R4.sum(dim=0).tolist()
        if num_failed:
            self._record([one for of_rank in self._world.gather_objects(failed) for one in of_rank])
        if num_errors:
            raise next(one for one in self._world.gather_objects(error) if one is not None)
        loaded = on_all_stages(loaded, self._world.stages)
        assert loaded is not None  # otherwise _record or the error above has been raised
        return SyncedBatch(loaded, stops=num_stops > 0, waited_s=all_R4[:, 3].max().item())

    def _record(self, failed: list[FailedSample]) -> None:
        self.num_failed += len(failed)
        if self._world.is_first:
            append_lines(self._path, [failure.as_json() for failure in failed])
        last = f"{failed[-1].key}: {failed[-1].detail}"
        if self.num_failed > self._max_failures:
            raise FailedWork(
                f"{count_noun(self.num_failed, 'sample')} failed, more than --max-failures {self._max_failures}; "
                f"the last one: {last}; all are listed in {self._path}{_remedy(failed)}"
            )
        if self._world.is_first and not self._is_told:
            self._is_told = True
            sys.stderr.write(
                f"note: a sample could not be loaded, the run continues without it: {last}; the run ends after "
                f"{self._max_failures} of them (--max-failures), listed in {self._path}{_remedy(failed)}\n"
            )


def _remedy(failed: list[FailedSample]) -> str:
    """Return what to do about missing and damaged shards; empty if the last sample failed for another reason."""
    if failed[-1].reason not in ("shard_unreadable", "checksum"):
        return ""
    return "; prep verify names missing and damaged shards, and the commands that make them again"
