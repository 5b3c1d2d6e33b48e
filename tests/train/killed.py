"""Runs of the plane task in processes that are killed when they change a name on the disk."""

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import Stopped
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.outcomes import LoadedBatch
from tests import workers
from tests.train.plane import LoadedPoints, settings, train_plane

# Functions that change names on the disk. os.replace is counted as os.rename, and Path.unlink as os.remove.
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


class StoppedPoints(LoadedPoints):
    """Points that send SIGTERM in the second step, as a time limit does; the run completes the step before it stops."""

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        for number, loaded in enumerate(super().batches(position=position, max_failures=max_failures)):
            if number == 2:  # one batch is prefetched
                os.kill(os.getpid(), signal.SIGTERM)
            yield loaded


def three_steps(out: Path) -> TrainingSettings:
    """Return settings for three steps. Each step saves a checkpoint, and only one checkpoint is kept."""
    return settings(out, steps=3, batch=4, checkpoint_every=1, keep_checkpoints=1, workers=1)


def train_and_stop(chosen: TrainingSettings) -> None:
    """Train until SIGTERM arrives in the second step, which also makes a checkpoint."""
    with suppress(Stopped):
        train_plane(chosen, kind=StoppedPoints)


def killed_at(number: int, work: Callable[..., None], *arguments: Any, folder: Path) -> int | None:
    """Run `work` in a process that is killed before its `number`-th change of names in `folder`.

    Returns:
        Exit status of the process.
    """
    process = workers.process(target=_work, args=(number, work, arguments, folder))
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode


def _work(number: int, work: Callable[..., None], arguments: tuple[Any, ...], folder: Path) -> None:
    torch.set_num_threads(1)
    seen = 0

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal seen
        # shutil.rmtree passes names relative to an open folder, which is the last argument.
        if event in _CHANGES and (given[-1] >= 0 or os.fspath(given[0]).startswith(os.fspath(folder))):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work(*arguments)
