"""Runs the blocks of a page as its reader would, but `prep` and `train` in this process, which has imported them."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from tests.prep.running import prep_here
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import run_command
from tests.tutorials.page import Block, command_lines, missing_lines
from train.cli import app, main

_BIN = Path(sys.executable).parent


@dataclass
class Runner:
    """A reader's working folder, which is the current one, and what the blocks have printed and defined so far."""

    folder: Path
    setenv: Callable[[str, str], None]
    said: str = ""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def run(self, block: Block) -> None:
        """Run a block, or compare it."""
        if not block.is_run:
            return
        if block.language == "sh":
            self.said = "".join(self._ran(line) for line in command_lines(block.text))
        elif block.language == "python":
            with redirect_stdout(StringIO()) as out:
                exec(compile(block.text, "page", "exec"), self.names)  # noqa: S102 - the program of the page
            self.said = out.getvalue()
        elif block.language == "text":
            missing = missing_lines(block.text, self.said)
            assert not missing, f"not printed: {missing}\nprinted:\n{self.said}"
        elif block.file is not None:
            missing = missing_lines(block.text, (self.folder / block.file).read_text())
            assert not missing, f"not in {block.file}: {missing}"

    def _ran(self, line: str) -> str:
        match shlex.split(line, comments=True):
            case ["prep", *arguments]:
                ran = prep_here(*arguments)
                return ran.stdout + ran.stderr
            case ["train", command, *_] if command not in app:
                assert command == "quickstart", f"train has no command {command}"
                return ""  # a command that comes with a later version
            case ["train", *arguments]:
                return _train(arguments)
            case ["torchrun", *arguments]:
                return self._torchrun(arguments)
            case ["export", setting]:
                self.setenv(*setting.split("=", 1))
                return ""
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            ["bash", "-euc", line], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{line}\nstatus {ran.returncode}: {ran.stderr}"
        return ran.stdout + ran.stderr

    def _torchrun(self, arguments: list[str]) -> str:
        """Run as many ranks as torchrun would start on this machine; test_signals.py starts torchrun itself."""
        assert "--no-python" in arguments
        size = int(arguments[arguments.index("--nproc-per-node") + 1])
        ranks = fork_ranks(run_command, *arguments[arguments.index("train") + 1 :], size=size, folder=self.folder)
        end_well(ranks)
        return "".join(rank.said.read_text() for rank in ranks)


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
    said = out.getvalue() + err.getvalue()
    assert status == 0, f"train {arguments}\nstatus {status}: {said[-3000:]}"
    return said
