"""Asynchronous checkpoints: copied to the CPU, written by a thread, published by a rename."""

import errno
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.publish import TEMPORARY_PREFIX, publish_json, sync
from clipmill.train.distributed.storage import FailedElsewhere, Storage
from clipmill.train.distributed.world import World
from clipmill.train.run.checkpoint import (
    METADATA_FILE,
    TABLE_FILE,
    CheckpointMetadata,
    all_checkpoints,
    checkpoint_name,
    content_of,
    file_facts,
    is_checkpoint_name,
    is_intact,
)


class CheckpointWriter:
    """Writer of the checkpoints of a run into `folder`. All ranks call its methods in the same order.

    Args:
        keep: Number of latest checkpoints to keep.
        best: Metric whose best checkpoint is kept too.
        lower_is_better: Take the lowest value of this metric as the best one.
    """

    def __init__(
        self, folder: Path, *, world: World, keep: int, best: str | None, lower_is_better: bool = False
    ) -> None:
        self._folder, self._world, self._keep, self._best = folder, world, keep, best
        self._sign = -1 if lower_is_better else 1
        self._storage = Storage(world)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            recover(folder)

    def save(self, tensors: Mapping[str, torch.Tensor], metadata: CheckpointMetadata) -> None:
        """Copy the state and return; waits for (and raises FailedWork for) the previous checkpoint only."""
        self.wait()
        staged = self._storage.stage(tensors)
        self._writing = self._thread.submit(self._write, staged, metadata)

    def wait(self) -> None:
        """Block until the last checkpoint is written; all ranks raise FailedWork if one could not write it."""
        if self._writing is None:
            return
        error = self._writing.exception()
        self._writing = None
        is_own = error is not None and not isinstance(error, FailedElsewhere)
        reasons = self._world.gather_objects(_describe_error(error) if is_own else None)
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise FailedWork(f"rank {rank} could not write a checkpoint into {self._folder}: {reason}") from error

    def prune(self) -> None:
        """Remove superfluous checkpoints that a killed process left.

        To be called only after the latest one has been read, because the others are needed if it is damaged.
        """
        if self._world.is_first:
            self._prune()

    def close(self) -> None:
        """Wait for the writing thread and end it; to be called after a failure too."""
        self._thread.shutdown(wait=True)

    def is_best(self, numbers: Mapping[str, float]) -> bool:
        """Return True if the selected metric is better than in every existing checkpoint."""
        if self._best is None or self._best not in numbers:
            return False
        self.wait()
        score = self._sign * numbers[self._best]
        return self._world.first(lambda: all(score > other for other in self._scores().values()))

    def _write(self, staged: dict[str, torch.Tensor], metadata: CheckpointMetadata) -> None:
        name = checkpoint_name(metadata.step)
        temporary = self._folder / f"{TEMPORARY_PREFIX}{name}"
        table = self._storage.write(temporary, staged)
        facts = {path.name: file_facts(path) for path in temporary.glob(f"__{self._world.rank}_*")}
        files = {name: about for of_rank in self._storage.gather(facts) for name, about in of_rank.items()}
        if not self._world.is_first:
            return
        publish_json(temporary / TABLE_FILE, table)
        files[TABLE_FILE] = file_facts(temporary / TABLE_FILE)
        publish_json(temporary / METADATA_FILE, metadata.as_json(files))
        _publish(temporary, self._folder / name)
        self._prune()

    def _prune(self) -> None:
        checkpoints = all_checkpoints(self._folder)
        for step in superfluous_steps(list(checkpoints), keep=self._keep, scores=self._scores()):
            _remove(checkpoints[step])

    def _scores(self) -> dict[int, float]:
        """Return the value of the selected metric in each checkpoint that has it, negated if lower is better."""
        scores: dict[int, float] = {}
        for step, path in all_checkpoints(self._folder).items() if self._best is not None else ():
            try:
                numbers = content_of(path)["numbers"]
            except (OSError, ValueError, KeyError):
                continue  # a damaged one is never the best; it is reported when it is read
            if self._best in numbers:
                scores[step] = self._sign * float(numbers[self._best])
        return scores


def recover(folder: Path) -> None:
    """Rename complete checkpoints of a killed process and remove incomplete ones; only for the writing process."""
    for left in sorted(folder.glob(f"{TEMPORARY_PREFIX}*")):
        name = left.name.removeprefix(TEMPORARY_PREFIX)
        if is_checkpoint_name(name) and is_intact(left):
            _publish(left, folder / name)
        else:
            _delete(left)


def superfluous_steps(steps: list[int], *, keep: int, scores: Mapping[int, float]) -> list[int]:
    """Return the steps to remove: all but the last `keep` and the (first) one with the best score."""
    kept = set(sorted(steps)[-keep:])
    if scores:
        kept.add(max(sorted(scores), key=lambda step: scores[step]))
    return [step for step in steps if step not in kept]


def _publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint; an intact one of the same name holds the same step and is kept."""
    sync(temporary)
    if final.exists():
        if is_intact(final):
            _delete(temporary)
            return
        # Damaged ones are replaced. If this process is killed between the two renames, `recover` does the second.
        _remove(final)
    temporary.rename(final)
    sync(final.parent)


def _remove(path: Path) -> None:
    # Renamed first, so that readers see complete checkpoints only.
    leaving = path.with_name(f"{TEMPORARY_PREFIX}old-{path.name}")
    path.rename(leaving)
    _delete(leaving)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _describe_error(error: BaseException | None) -> str:
    # DCP wraps the error of each rank with its traceback as text.
    for cause, _ in getattr(error, "failures", {}).values():
        return _describe_error(cause)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while {error.filename} was written" if error.filename else ""
        return f"the disk is full{where} ({error.strerror}); free some space and continue with --resume"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
