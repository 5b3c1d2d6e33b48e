"""Persistent benchmark processes: start them, send requests, and respond to requests.

A request and its response are one line of JSON each. This module needs only the standard library, because clipmill is
not installed in the environment of `make peers`.
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
    """The Python interpreter or a dependency of a program is missing."""


class PeerProcess:
    """Running program, which is idle between requests.

    Args:
        python: Python interpreter that runs the program.
        module: Full name of the program's module.
        words: Command-line arguments.
        folder: Working directory.
        environment: Additional environment variables.

    Raises:
        NotInstalled: The interpreter does not exist.
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
        """Send a request, and wait for the response.

        Raises:
            NotInstalled: A dependency of the program is missing.
            RuntimeError: The program exited without a response.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the program has exited, so the response will be missing
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            stderr = self._stderr.read().decode(errors="replace")[-_STDERR_CHARS:]
            raise RuntimeError(f"{self._module} exited with {self._process.returncode} at request {do!r}:\n{stderr}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise NotInstalled(answer["missing"])
        return answer

    def end(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._stderr.close()


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Respond to requests until the input ends. The program calls this function."""
    # Libraries may print to stdout. Redirect their output to stderr, and reserve stdout for responses.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except ImportError as error:
            answered = {"missing": str(error)}
        answers.write(json.dumps(answered) + "\n")
