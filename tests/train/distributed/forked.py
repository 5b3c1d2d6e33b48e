"""Ranks that are forked from a process with their modules already imported."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests import workers


@dataclass(frozen=True)
class Rank:
    """A rank, and the file that receives its stderr."""

    process: BaseProcess
    stderr_path: Path

    def end(self, *, within_s: float = 240) -> tuple[int | None, str]:
        """Wait for the rank to end, and kill it after `within_s` seconds.

        Returns:
            Exit status, or None if the rank was killed because it did not end; and its stderr.
        """
        self.process.join(within_s)
        status = self.process.exitcode
        self.process.kill()
        return status, self.stderr_path.read_text()


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def fork_ranks(run: Callable[..., None], *arguments: Any, size: int, folder: Path) -> list[Rank]:
    """Start `size` ranks that call `run`, with the environment that torchrun sets; their stderr goes to `folder`."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(size):
        stderr_path = folder / f"said-by-{rank}-of-{size}.txt"
        stderr_path.touch()
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = workers.process(target=_run, args=(run, arguments, stderr_path), daemon=True, **environment)
        process.start()
        ranks.append(Rank(process, stderr_path))
    return ranks


def end_well(ranks: list[Rank]) -> None:
    """Wait for all ranks. If a rank fails, fail with its stderr."""
    try:
        for rank in ranks:
            status, stderr = rank.end()
            assert status == 0, f"status {status}: {stderr[-3000:]}"
    finally:
        for rank in ranks:
            rank.process.kill()


def _run(run: Callable[..., None], arguments: tuple[Any, ...], stderr_path: Path) -> None:
    with stderr_path.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    run(*arguments)
