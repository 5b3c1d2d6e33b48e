"""Persistent benchmark processes: starting them, sending requests, and answering.

A request and its answer are one line of JSON each. This file requires only the standard library, because clipmill is
not installed in the peers' environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import REPOSITORY

PEERS_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
_STDERR_CHARS = 3000


class NotInstalled(Exception):
    """The program's Python interpreter, or one of its dependencies, is missing."""


class PeerProcess:
    """A running program; it is idle between requests.

    Args:
        python: the Python that runs it.
        module: full name of the program.
        words: its command-line arguments.
        folder: its working directory.
        environment: additional environment variables.

    Raises:
        NotInstalled: the interpreter does not exist.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        *words: str | Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not python.exists():
            raise NotInstalled(f"no {python}")
        self._module = module
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [python, "-m", module, *words],
            cwd=folder,
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.fspath(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            NotInstalled: a dependency is missing.
            RuntimeError: the program exited instead of answering.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has exited, as the missing answer will show
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            stderr = self._stderr.read().decode(errors="replace")[-_STDERR_CHARS:]
            raise RuntimeError(f"{self._module} exited with {self._process.returncode} on request {do!r}:\n{stderr}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise NotInstalled(answer["missing"])
        return answer

    def end(self) -> None:
        """Terminate the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._stderr.close()


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input ends (the program's side)."""
    # Libraries may print: their output goes to stderr, and stdout is reserved for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except ImportError as error:
            answered = {"missing": str(error)}
        answers.write(json.dumps(answered) + "\n")
