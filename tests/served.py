"""Command lines that are run one after another in one program, so that its imports are paid for once."""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.conftest import ROOT

Commands = Callable[..., tuple[int, str, str]]


def serve(name: str, main: Callable[[], None]) -> None:
    """Answer each JSON list on standard input with the exit status, output and errors of `name` with these words."""
    answers = sys.stdout
    for line in sys.stdin:
        sys.argv = [name, *json.loads(line)]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                main()
                status = 0
            except SystemExit as left:
                status = int(left.code or 0)
        print(json.dumps([status, out.getvalue(), err.getvalue()]), file=answers, flush=True)


@contextlib.contextmanager
def served(name: str, *, python: str = sys.executable, **environment: str) -> Iterator[Commands]:
    """Start `prep` or `train` in an environment; run command lines in it."""
    with subprocess.Popen(
        [python, "-m", "tests.served", name],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def run(*arguments: object) -> tuple[int, str, str]:
            print(json.dumps([*map(str, arguments)]), file=commands, flush=True)
            status, out, err = json.loads(answers.readline())
            return status, out, err

        yield run
        commands.close()


if __name__ == "__main__":
    if sys.argv[1] == "prep":
        engine: Any = importlib.import_module("clipmill.prep.engines.processes")
        engine._CONTEXT = multiprocessing.get_context("fork")  # workers without imports of their own
    serve(sys.argv[1], importlib.import_module(f"clipmill.{sys.argv[1]}.cli").main)
