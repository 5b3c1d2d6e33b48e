"""Runner for the blocks of a page: it acts as a reader would, but calls `prep` and `train` in this process."""

import ast
import asyncio
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from clipmill.train.cli import main
from tests.prep.running import prep_here
from tests.small_tiny import restore
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import run_command
from tests.tutorials.page import Block, command_lines, missing_lines

_BIN = Path(sys.executable).parent


@dataclass
class Runner:
    """Reader's working folder, which is the current folder, and what the blocks have printed, defined and shown."""

    folder: Path
    setenv: Callable[[str, str], None]
    said: str = ""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    shown: list[str | bytes] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Run a block, or compare it with a file or an output."""
        if not block.is_run:
            return
        if block.language == "sh":
            self.said = "".join(self._ran(line) for line in command_lines(block.text))
        elif block.language == "python":
            self.said = asyncio.run(self._cell(block.text))
        elif block.language == "text":
            missing = missing_lines(block.text, self.said)
            assert not missing, f"not printed: {missing}\nprinted:\n{self.said}"
        elif block.file is not None:
            missing = missing_lines(block.text, (self.folder / block.file).read_text())
            assert not missing, f"not in {block.file}: {missing}"

    async def _cell(self, text: str) -> str:
        """Run a cell in a running event loop and show the value of its last line, as Jupyter does."""
        lines = ast.parse(text).body
        last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
        with redirect_stdout(StringIO()) as out:
            exec(compile(ast.Module(lines, []), "cell", "exec"), self.names)  # noqa: S102 - the program of the page
            if isinstance(last, ast.Expr):
                shown = eval(compile(ast.Expression(last.value), "cell", "eval"), self.names)  # noqa: S307 - likewise
                for form in ("_repr_html_", "_repr_png_"):
                    if hasattr(shown, form):
                        self.shown.append(getattr(shown, form)())
        return out.getvalue()

    def _ran(self, line: str) -> str:
        match [] if "<<" in line else shlex.split(line, comments=True):
            case ["prep", *arguments]:
                ran = prep_here(*(word for given in arguments for word in _expand(given)))
                return ran.stdout + ran.stderr
            case ["train", *arguments]:
                return _train(arguments)
            case ["torchrun", *arguments]:
                return self._torchrun(arguments)
            case ["export", setting]:
                self.setenv(*setting.split("=", 1))
                return ""
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euc", line], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\nstatus {done.returncode}: {done.stderr}"
        return done.stdout + done.stderr

    def _torchrun(self, arguments: list[str]) -> str:
        """Run as many ranks as torchrun would start on this machine; test_signals.py tests torchrun itself."""
        size = int(arguments[arguments.index("--nproc-per-node") + 1])
        out_path = self.folder / "torchrun.txt"
        out_path.unlink(missing_ok=True)
        program = arguments.index("train") if "--no-python" in arguments else -2
        end_well(fork_ranks(_rank, self.folder, out_path, *arguments[program:], size=size, folder=self.folder))
        return out_path.read_text()


def _expand(word: str) -> list[str]:
    """Expand a word as a shell does: variables and file patterns."""
    value = os.path.expandvars(word)
    paths = sorted(map(str, Path().glob(value))) if "*" in value and "/" in value else []
    return paths or [value]


def _rank(folder: Path, out_path: Path, program: str, *words: str) -> None:
    """Run a rank of `train` or of a script in the reader's folder; all ranks append their output to one file."""
    restore()  # the process that forked this rank has the small model
    os.chdir(folder)
    with out_path.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    if program == "train":
        run_command(*words)
    else:
        sys.argv = [program, *words]
        runpy.run_path(program, run_name="__main__")


def _train(arguments: list[str]) -> str:
    before = sys.argv
    sys.argv = ["train", *arguments]
    try:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            try:
                main()
                status = 0
            except SystemExit as left:
                status = int(left.code or 0)
    finally:
        sys.argv = before
    text = out.getvalue() + err.getvalue()
    assert status == 0, f"train {arguments}\nstatus {status}: {text[-3000:]}"
    return text
