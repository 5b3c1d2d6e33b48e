"""Processes for the tests of this folder: forked off a server that has the imports and has not touched the GPU."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.train.distributed.forked import Rank

_IMPORTS = ["tests.gpu.commands", "train.commands", "train.report", "torch._dynamo"]


def start(run: Callable[..., None], *arguments: Any, said: Path, environment: dict[str, str] | None = None) -> Rank:
    """Starts a process that calls `run`; what it says goes to the file `said`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    said.parent.mkdir(parents=True, exist_ok=True)
    said.touch()
    process = context.Process(
        target=_run, args=(run, arguments, {**os.environ, **(environment or {})}, said), daemon=True
    )
    process.start()
    return Rank(process, said)


def _run(run: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str], said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    run(*arguments)
