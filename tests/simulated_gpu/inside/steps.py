"""Runs of `train` whose steps are followed, and the same runs on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clipmill.train.commands import launch as command
from clipmill.train.distributed import launch
from clipmill.train.engine.failures import FailureLog, SyncedBatch
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from tests.simulated_gpu.device import simulation
from tests.simulated_gpu.inside.runs import NUM_STEPS
from tests.simulated_gpu.journal import Journal, Note
from tests.train.running import train

LOCAL_RANK = 2
# Steps before the first of these send what is the same in all steps; the numbers of the last one are read at once.
STEADY = range(2, NUM_STEPS)


@contextmanager
def _without_files(*, keeps_checkpoints: bool = False) -> Iterator[None]:
    """Leave out checkpoints and the results page, which take most of the time of a short run and compute nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if not keeps_checkpoints:
            patch.setattr(CheckpointWriter, "save", lambda *_, **__: None)
        patch.setattr(command, "write_page", lambda _: None)
        yield


@contextmanager
def follow_steps(*, keeps_checkpoints: bool = False) -> Iterator[Journal]:
    """Simulate GPUs for a rank that owns one of them, and number the steps of training."""
    next_batch, make_group = FailureLog.next_batch, launch.dist.init_process_group

    def begin(self: FailureLog, *args: Any, **kwargs: Any) -> SyncedBatch:
        journal.step += 1
        return next_batch(self, *args, **kwargs)

    files = _without_files(keeps_checkpoints=keeps_checkpoints)
    with simulation() as journal, files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailureLog, "next_batch", begin)
        # NCCL needs a real GPU; a rank that is alone exchanges nothing.
        patch.setattr(launch.dist, "init_process_group", lambda _, **options: make_group("gloo", **options))
        for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", LOCAL_RANK), ("MASTER_PORT", 0)):
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        try:
            yield journal
        finally:
            if launch.dist.is_initialized():  # a command that failed has left it
                launch.dist.destroy_process_group()


def steady(notes: list[Note]) -> list[str]:
    """The notes of steady steps."""
    return [str(note) for note in notes if note.step in STEADY]


def run(*words: object, keeps_checkpoints: bool = False) -> Journal:
    """The journal of a command on simulated GPUs that ends well."""
    with follow_steps(keeps_checkpoints=keeps_checkpoints) as journal:
        assert train(*words) == 0
    journal.finish()
    return journal


def run_on_cpu(*words: object) -> None:
    """The same command on the CPU."""
    with _without_files():
        assert train(*words, "--device", "cpu") == 0
