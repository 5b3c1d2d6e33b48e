"""The one door of Java: whether it is there, and a program of it that answers line by line."""

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType


class Absent(Exception):
    """A metric cannot be computed here; the message says why."""


def java() -> str:
    """The java program.

    Raises:
        Absent: none on the PATH.
    """
    path = shutil.which("java")
    if path is None:
        raise Absent("no java program on the PATH")
    return path


def jar_of_pycocoevalcap(name: str) -> Path:
    """A jar that pycocoevalcap brings, by its path within the package.

    Raises:
        Absent: the package, or the jar in it, is not there.
    """
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise Absent("the package pycocoevalcap is not installed (pip install 'clipmill[caption-metrics]')")
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise Absent(f"pycocoevalcap has no {name}")
    return path


class Dialogue:
    """A program that answers each line with a line."""

    def __init__(self, command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
        """Starts the program.

        Args:
            folder: where it runs.
            timeout_s: when it is killed, whatever it does.
        """
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed at the end
        self._process = subprocess.Popen(
            [*command],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            errors="replace",
        )
        self._timer = threading.Timer(timeout_s, self._process.kill)
        self._timer.start()

    def say(self, line: str) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def hear(self) -> str:
        """The next line of its answers."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return line.strip()

    def __enter__(self) -> "Dialogue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # what was not sent yet
                pass

    def _ended(self) -> Absent:
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        return Absent(f"java ended with status {status}{last_line(self._errors.read())}")


def run(command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
    """Runs a program to its end.

    Raises:
        Absent: it failed, or took longer than `timeout_s`.
    """
    try:
        ended = subprocess.run([*command], cwd=folder, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise Absent(f"java took longer than {timeout_s:.0f} s") from error
    if ended.returncode:
        raise Absent(f"java ended with status {ended.returncode}{last_line(ended.stderr.decode(errors='replace'))}")


def last_line(text: str) -> str:
    """What a program said last, after a colon; nothing when it said nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The first line of a Java traceback says what happened, those after it say where.
    while len(lines) > 1 and lines[-1].startswith(("at ", "... ")):
        lines.pop()
    return f": {lines[-1][:200]}" if lines else ""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="train-caption-") as folder:
        yield Path(folder)
