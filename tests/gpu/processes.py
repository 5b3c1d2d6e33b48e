"""Processes for the tests of this folder: forked off a server that has the imports and has not touched the GPU.

Where there is no GPU to touch, they are forked off the tests themselves, which saves the server's imports.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.train.distributed.forked import Rank

_IMPORTS = ["tests.gpu.commands", "clipmill.train.commands.launch", "clipmill.train.report.results", "torch._dynamo"]


def start(run: Callable[..., None], *arguments: Any, said: Path, environment: dict[str, str] | None = None) -> Rank:
    """Starts a process that calls `run`; what it says goes to the file `said`."""
    said.touch()
    given = (run, arguments, {**os.environ, **(environment or {})}, said)
    process: BaseProcess
    if torch.cuda.is_available():
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(_IMPORTS)
        process = server.Process(target=_run, args=given, daemon=True)
    else:
        process = multiprocessing.get_context("fork").Process(target=_run, args=given, daemon=True)
    process.start()
    return Rank(process, said)


def _run(run: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str], said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    run(*arguments)
