"""Processes of `multiprocessing`, forked off one that has imported what they need.

The imports of a rank or of a worker cost more than all that it does in a test.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

# What is not named here is imported by each process. `torch._dynamo` is what a first step imports by itself.
_IMPORTED = [
    "tests.train.distributed.runs",
    "tests.train.distributed.stage_runs",
    "tests.train.killed",
    "tests.train.losses.runs",
    "tests.train.optim.sharded_steps",
    "train.commands.launch",
    "train.tasks.mae.evaluation",
    "train.report.results",
    "torch._dynamo",
    "prep.video.worker",
    "prep.latents.worker",
    "prep.latents.vae",
    "prep.text.run",
    "diffusers.models.autoencoders.autoencoder_tiny",
    "open_clip",
]


_CONTEXT = multiprocessing.get_context("forkserver")


def process(
    *, target: Callable[..., object], args: tuple[Any, ...] = (), daemon: bool | None = None, **environment: str
) -> BaseProcess:
    """Return a process, to be started, with the environment that this one has now and `environment`."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return _CONTEXT.Process(target=_run, args=(target, args, {**os.environ, **environment}), daemon=daemon)


def fsync_at_once(descriptor: int) -> None:
    """`os.fsync` without the disk: a process that tests kill loses nothing that was written; only a machine would."""
    os.fstat(descriptor)


def _run(target: Callable[..., object], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.fsync = fsync_at_once  # type: ignore[assignment]
    target(*args)


class ForkedContext:
    """What `prep.engines` use of a context of `multiprocessing`."""

    def Pipe(self) -> tuple[Connection, Connection]:
        return _CONTEXT.Pipe()

    def Process(self, *, target: Callable[..., object], args: tuple[Any, ...], daemon: bool = False) -> BaseProcess:
        return process(target=target, args=args, daemon=daemon)
