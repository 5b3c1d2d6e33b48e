"""Command lines that are run one after another in one program, so that its imports are paid for once."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
def run_commands(name: str, *, python: Path, **environment: str) -> Iterator[Commands]:
    """Start `prep` or `train` in an environment, by `Forks.python`; run command lines in it."""
    program = f"from clipmill.{name}.cli import main; from tests.served import serve; serve({name!r}, main)"
    with subprocess.Popen(
        [python, "-m", "tests.fresh", program],
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
