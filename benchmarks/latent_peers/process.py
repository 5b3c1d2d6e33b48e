"""Starting the programs of the ways, and asking them."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import REPOSITORY

_STDERR_CHARS = 3000


class NotInstalled(Exception):
    """The way's Python, or a package that it needs, is not there."""


class WayProcess:
    """One way's program, from start to end; it idles between requests.

    Args:
        python: the Python that runs it.
        module: of this package.
        words: further arguments.

    Raises:
        NotInstalled: there is no such Python.
    """

    def __init__(self, python: Path, module: str, *words: str, set_folder: Path, own_folder: Path) -> None:
        if not python.exists():
            raise NotInstalled(f"no {python}")
        self._module = module
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.latent_peers.{module}", set_folder, own_folder, *words],
            cwd=set_folder,
            env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer (benchmarks.latent_peers.contestant).

        Raises:
            NotInstalled: a package is missing.
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
