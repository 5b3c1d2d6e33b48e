"""Runs the `prep` command as a user does, and examines the files and processes that it leaves."""

import atexit
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from clipmill.manifests.errors import run_command
from clipmill.prep import cli
from clipmill.prep.engines import Engine

MARK = "CLIPMILL_TEST_MARK"
ENGINES = ("processes", "ray")


@dataclass(frozen=True)
class Ran:
    """Outcome of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        """Output of `--json`."""
        return dict(json.loads(self.stdout))

    @property
    def error(self) -> str:
        """Message of a user error, or of a refusal by a bucket; the output must be exactly two lines."""
        lines = messages(self.stderr)
        assert self.status in (2, 3), f"status {self.status}: {self.stderr}"
        assert len(lines) == 2, self.stderr
        assert lines[0].startswith("error: ") and lines[1].startswith("hint: "), self.stderr
        return lines[0].removeprefix("error: ")


def messages(stderr: str) -> list[str]:
    """Return the lines on standard error that do not report progress."""
    return [line for line in stderr.splitlines() if not re.match(r"\S+Z \[[0-9:]+\] ", line)]


def prep(*arguments: object, status: int | None = 0, **environment: str) -> Ran:
    """Run `prep` to completion; fail if the exit status is not `status` (None accepts any)."""
    process = start(*arguments, **environment)
    stdout, stderr = process.communicate(timeout=240)
    assert status is None or process.returncode == status, f"status {process.returncode}\n{stdout}\n{stderr}"
    return Ran(process.returncode, stdout, stderr)


@cache
def folder_of_a_user() -> Path:
    """Create a folder with Python files that neither a command nor its workers may import."""
    folder = Path(mkdtemp())
    atexit.register(shutil.rmtree, folder)
    for name in ("clipmill", "numpy", "prep", "shards", "statistics", "av", "ffmpeg"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    return folder


def start(*arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """Start `prep` without waiting for it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "clipmill.prep.cli", *map(str, arguments)],
        cwd=folder_of_a_user(),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _no_ray(**settings: object) -> Engine:
    raise AssertionError("run a command with --engine ray by `prep`")


def prep_here(*arguments: object, status: int | None = 0) -> Ran:
    """Run `prep` in this process, which has already imported it.

    Ray takes seconds to start, so the command must not start it.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as stdout,
        redirect_stderr(StringIO()) as stderr,
    ):
        patch.setattr("clipmill.prep.engines.ray.isolated_ray_engine", _no_ray)
        try:
            run_command(lambda: cli._run([str(argument) for argument in arguments]))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    ran = Ran(code, stdout.getvalue(), stderr.getvalue())
    assert status is None or ran.status == status, f"status {ran.status}\n{ran.stdout}\n{ran.stderr}"
    return ran


def manifest(data: Path, videos: Path, *options: object) -> None:
    """Run `prep manifest folder`, whatever it removes."""
    prep_here("manifest", "folder", videos, "--data", data, "--yes", *options)


def chunk(
    data: Path, *settings: object, engine: str = "processes", status: int | None = 0, **environment: str
) -> dict[str, Any]:
    """Run `prep chunk --json`; return its summary.

    The command runs in a separate process if it needs an `environment`, or Ray, which would otherwise stay in this
    process.
    """
    flags = ("chunk", "--data", data, "--json", "--engine", engine, "--workers", 2, *settings)
    if engine == "ray" or environment:
        return prep(*flags, status=status, **environment).summary
    return prep_here(*flags, status=status).summary


def variant_folder(data: Path, summary: dict[str, Any]) -> Path:
    """Return the folder of the variant that a run made."""
    return data / "video" / str(summary["variant"])


def contents(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder by its relative path, without the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (inode, change time in ns) of every file in a folder; the values stay the same for untouched files."""
    states = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (state.st_ino, state.st_mtime_ns) for name, state in states.items() if not name.endswith(".lock")}


@dataclass(frozen=True)
class Process:
    """Running process of a command that was started with a mark in its environment."""

    pid: int
    parent: int
    arguments: list[str]

    @property
    def is_ffmpeg(self) -> bool:
        return "ffmpeg" in Path(self.arguments[0]).name and "-progress" in self.arguments

    def kill(self) -> None:
        """Send SIGKILL; the process may already have ended."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def processes(mark: str) -> Iterator[Process]:
    """Yield all running processes with `mark` in the environment variable MARK, except zombies."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}\0".encode() not in (folder / "environ").read_bytes() + b"\0":
                continue
        except OSError:
            continue
        if (process := running(int(folder.name))) is not None:
            yield process


def running(pid: int) -> Process | None:
    """Return the process with an ID; None if it has ended or is a zombie."""
    folder = Path("/proc", str(pid))
    try:
        arguments = (folder / "cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), arguments) if fields[0] != "Z" and arguments[0] else None


def wait_until_none(find: Callable[[], Sequence[object]], *, seconds: float) -> None:
    """Wait until `find` returns nothing; otherwise fail with what remains."""
    deadline_s = time.monotonic() + seconds
    while remaining := find():
        assert time.monotonic() < deadline_s, f"not gone: {remaining}"
        time.sleep(0.05)


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait for a condition that must become true; fail if it does not."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.05)


@contextmanager
def failing(call: str, error: int, *, of: str) -> Iterator[None]:
    """Let an operating system call fail for files whose path ends with `of`, also under a temporary name."""
    real = getattr(os, call)

    def fail(target: object, *arguments: object, **options: object) -> object:
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target
        if str(path).endswith(of) and not (isinstance(target, int) and stat.S_ISDIR(os.fstat(target).st_mode)):
            raise OSError(error, os.strerror(error), *([] if isinstance(target, int) else [str(path)]))
        return real(target, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fail)
        yield
