"""Processes for the tests of this folder: forked off a server that has the imports, no threads and no hold on a GPU."""

import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests import workers
from tests.train.distributed.forked import Rank

_IMPORTS = ["tests.gpu.commands", "clipmill.train.commands.launch", "clipmill.train.report.results", "torch._dynamo"]


def start(
    run: Callable[..., None], *arguments: Any, stderr_path: Path, environment: dict[str, str] | None = None
) -> Rank:
    """Starts a process that calls `run`; what it says goes to the file `said`."""
    stderr_path.touch()
    forkserver.set_forkserver_preload(_IMPORTS)
    process = workers.process(target=_run, args=(run, arguments, stderr_path), daemon=True, **(environment or {}))
    process.start()
    return Rank(process, stderr_path)


def _run(run: Callable[..., None], arguments: tuple[Any, ...], stderr_path: Path) -> None:
    with stderr_path.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    run(*arguments)
