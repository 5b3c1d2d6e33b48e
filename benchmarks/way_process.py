"""Ways to do the same work, each a program that stays alive between its turns: starting, asking, answering.

A request and its answer are one JSON object a line each. This file needs the standard library only, because the other
ways' Python has no clipmill.
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
    """The way's Python, or something that it needs, is not there."""


class WayProcess:
    """One way's program, from start to end; it idles between requests.

    Args:
        python: the Python that runs it.
        module: full name of the program.
        words: its arguments.
        folder: where it runs.
        environment: variables beside those of this process.

    Raises:
        NotInstalled: there is no such Python.
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
        """Sends one request and waits for its answer.

        Raises:
            NotInstalled: something is missing.
            RuntimeError: the program ended instead of answering.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, as the missing answer will show
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace")[-_STDERR_CHARS:]
            raise RuntimeError(f"{self._module} ended with {self._process.returncode} when asked to {do}:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise NotInstalled(answer["missing"])
        return answer

    def end(self) -> None:
        """Ends the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._stderr.close()


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other end: answers requests until there are no more."""
    # Libraries print as they like: what they print goes to stderr, and stdout is for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except ImportError as error:
            answered = {"missing": str(error)}
        answers.write(json.dumps(answered) + "\n")
