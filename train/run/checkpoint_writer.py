"""Write checkpoints asynchronously: copy the tensors to the CPU, write them in a thread, and rename the folder.

Buckets do not support renames. Each rank therefore uploads its part, and rank 0 uploads checkpoint.json last.
"""

import errno
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from clipmill.manifests.errors import ClipmillError, FailedWork
from clipmill.manifests.publish import TEMPORARY_PREFIX, publish_json, remove, replace, sync
from clipmill.manifests.storage.mirrors import mirror_of, refresh
from clipmill.train.distributed.storage import FailedElsewhere, Storage
from clipmill.train.distributed.world import World
from clipmill.train.run.checkpoint import (
    METADATA_FILE,
    TABLE_FILE,
    CheckpointMetadata,
    all_checkpoints,
    checkpoint_name,
    checkpoint_step,
    content_of,
    file_facts,
    is_checkpoint_name,
    is_intact,
)


class CheckpointWriter:
    """Writer of a run's checkpoints. All ranks must call the methods in the same order.

    Args:
        folder: Folder that contains the run's checkpoints.
        world: Ranks that write the checkpoints.
        keep: Number of latest checkpoints to keep.
        best: Metric that selects the best checkpoint, which is kept as well; None to keep only the latest checkpoints.
        lower_is_better: True if the lowest value of the metric is the best.
    """

    def __init__(
        self, folder: Path, *, world: World, keep: int, best: str | None, lower_is_better: bool = False
    ) -> None:
        self._folder, self._world, self._keep, self._best = folder, world, keep, best
        self._sign = -1 if lower_is_better else 1
        self._storage = Storage(world)
        self._is_remote = mirror_of(folder) is not None
        self._part = f"__{world.rank}_0.bin"
        self._retry: Callable[[Callable[[], object]], object] = lambda work: work()
        if self._is_remote:
            from clipmill.train.run.bucket import retry_until_response

            self._retry = retry_until_response
            # Use a unique name, so that a delayed upload from an earlier attempt cannot replace this part.
            self._part = f"__{world.rank}_{secrets.token_hex(4)}.bin"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            recover(folder)
        elif self._is_remote:
            _delete_temporaries(folder)

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        metadata: CheckpointMetadata,
        *,
        write_extras: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy the state to the CPU, and start writing a checkpoint in the background.

        This method waits until the previous checkpoint has been written, but does not wait for the new checkpoint.

        Args:
            tensors: Tensors of the state, keyed by their names in the checkpoint.
            metadata: Contents of the checkpoint other than tensors.
            write_extras: Function that writes further files of the checkpoint, outside its folder. The writing thread
                of rank 0 calls this function before the checkpoint is complete.

        Raises:
            FailedWork: A rank could not write the previous checkpoint.
        """
        self.wait()
        staged_tensors = self._storage.stage(tensors)
        self._writing = self._thread.submit(self._write, staged_tensors, metadata, write_extras)

    def wait(self) -> None:
        """Block until the last checkpoint has been written.

        Raises:
            FailedWork: A rank could not write the checkpoint. The error is raised on all ranks.
        """
        if self._writing is None:
            return
        error = self._writing.exception()
        self._writing = None
        is_local_error = error is not None and not isinstance(error, FailedElsewhere)
        reasons = self._world.gather_objects(_describe_error(error) if is_local_error else None)
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise FailedWork(f"rank {rank} could not write a checkpoint into {self._folder}: {reason}") from error

    def prune(self) -> None:
        """Remove superfluous checkpoints that a killed process left behind.

        Call this method only after the latest checkpoint has been read: if the latest checkpoint is damaged, earlier
        checkpoints are needed.
        """
        if self._world.is_first:
            self._prune()

    def close(self) -> None:
        """Shut down the writing thread after its current work. This method must also be called after a failure."""
        self._thread.shutdown(wait=True)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return True if the selected metric is better in `metrics` than in every existing checkpoint."""
        if self._best is None or self._best not in metrics:
            return False
        self.wait()
        score = self._sign * metrics[self._best]
        return self._world.first(lambda: all(score > saved for saved in self._scores().values()))

    def _write(
        self, staged_tensors: dict[str, torch.Tensor], metadata: CheckpointMetadata, write_extras: Callable[[], object]
    ) -> None:
        final = self._folder / checkpoint_name(metadata.step)
        temporary = self._folder / f"{TEMPORARY_PREFIX}{final.name}"
        part = temporary / self._part
        table = self._storage.write(part, staged_tensors)
        facts = {part.name: file_facts(part)}
        files = {name: entry for rank_facts in self._storage.gather(facts) for name, entry in rank_facts.items()}
        folder = temporary
        if self._is_remote:
            self._upload(part, final)
            folder = final
        if not self._world.is_first:
            return
        if self._is_remote:
            self._retry(partial(refresh, final))  # make the parts of other ranks visible
        self._retry(partial(publish_json, folder / TABLE_FILE, table))
        files[TABLE_FILE] = file_facts(folder / TABLE_FILE)
        self._retry(write_extras)
        self._retry(partial(publish_json, folder / METADATA_FILE, metadata.as_json(files)))
        if not self._is_remote:
            _publish(temporary, final)
        self._retry(self._prune)

    def _upload(self, part: Path, final: Path) -> None:
        """Upload this rank's part of a checkpoint, and return once all ranks have uploaded their parts."""
        error: Exception | None = None
        try:
            final.mkdir(exist_ok=True)
            self._retry(partial(replace, part, final / part.name))
            _delete(part.parent)
        except (OSError, ClipmillError) as raised:
            error = raised
        self._storage.agree(error)

    def _prune(self) -> None:
        checkpoints = all_checkpoints(self._folder)
        for step in superfluous_steps(list(checkpoints), keep=self._keep, scores=self._scores()):
            _remove(checkpoints[step])

    def _scores(self) -> dict[int, float]:
        """Return the values of the selected metric, keyed by step; negated if lower is better.

        Checkpoints without the metric are omitted.
        """
        scores: dict[int, float] = {}
        for step, path in all_checkpoints(self._folder).items() if self._best is not None else ():
            try:
                metrics = content_of(path)["numbers"]
            except (OSError, ValueError, KeyError):
                continue  # a damaged checkpoint is never the best; reading it reports the damage
            if self._best in metrics:
                scores[step] = self._sign * float(metrics[self._best])
        return scores


def recover(folder: Path) -> None:
    """Publish the complete checkpoints that a killed process left behind, and remove the incomplete checkpoints.

    Only rank 0 may call this function.
    """
    if (mirror := mirror_of(folder)) is not None:
        _delete_temporaries(folder)
        complete = all_checkpoints(folder)
        for path in folder.glob("step_*"):
            if checkpoint_step(path) not in complete:
                _remove(path)
        mirror.abort_uploads(folder)
        return
    for path in sorted(folder.glob(f"{TEMPORARY_PREFIX}*")):
        name = path.name.removeprefix(TEMPORARY_PREFIX)
        if is_checkpoint_name(name) and is_intact(path):
            _publish(path, folder / name)
        else:
            _delete(path)


def superfluous_steps(steps: list[int], *, keep: int, scores: Mapping[int, float]) -> list[int]:
    """Return the steps whose checkpoints can be removed: all but the last `keep` and the earliest with the best score.

    Args:
        scores: Score of each evaluated step; higher is better.
    """
    kept_steps = set(sorted(steps)[-keep:])
    if scores:
        kept_steps.add(max(sorted(scores), key=lambda step: scores[step]))
    return [step for step in steps if step not in kept_steps]


def _publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name.

    If an intact checkpoint with this name already exists, it is kept, and the new checkpoint is deleted.
    """
    sync(temporary)
    if final.exists():
        if is_intact(final):
            _delete(temporary)
            return
        # Replace a damaged checkpoint. If this process is killed between the two renames, `recover` does the second.
        _remove(final)
    temporary.rename(final)
    sync(final.parent)


def _delete_temporaries(folder: Path) -> None:
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        _delete(path)


def _remove(path: Path) -> None:
    if (mirror := mirror_of(path)) is not None:
        remove(path / METADATA_FILE)  # first, because a checkpoint in a bucket exists as long as this file does
        mirror.remove(path)
    # Rename the folder before deleting it, so that readers never see an incomplete checkpoint.
    temporary = path.with_name(f"{TEMPORARY_PREFIX}old-{path.name}")
    path.rename(temporary)
    _delete(temporary)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _describe_error(error: BaseException | None) -> str:
    # torch.distributed.checkpoint pairs the error of each rank with a traceback.
    for cause, _ in getattr(error, "failures", {}).values():
        return _describe_error(cause)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        location = f" while {error.filename} was written" if error.filename else ""
        return f"the disk is full{location} ({error.strerror}); free some space and continue with --resume"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
