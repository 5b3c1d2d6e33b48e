"""Runner that starts `prep` and `train` as separate processes, and waits for all processes that they start."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.forks import Forks
from tests.torture.cases import Broken

INTERPOSER = Path(__file__).parent / "interposer"
MARK = "CLIPMILL_TEST_MARK"
_LIMIT_S = 240.0
_ENDING_S = 30.0
_RAYS_OWN = re.compile(r"/ray/|^ray::\w+Agent|^ray::IDLE")
_KEPT = ("PATH", "HOME", "LANG", "CLIPMILL_FFMPEG", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Ran:
    """Outcome of a command; `status` is negative for a signal."""

    command: str
    status: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def describe(self) -> str:
        """Describe the command, its exit and its last output lines, for the message of a `Broken`."""
        tail = "\n".join(self.output.strip().splitlines()[-25:])
        return f"`{self.command}` ended with {self.status}:\n{tail}"


class Commands:
    """Launcher of commands, as forks of the server `forks`; `close` terminates a server that was created here."""

    def __init__(self, folder: Path, forks: Forks | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock, self._count = folder, threading.Lock(), 0
        self._forks, self._is_own = forks or Forks(folder / "forks"), forks is None

    def run(
        self,
        program: str,
        arguments: Sequence[object],
        *,
        scratch: Path,
        environment: Mapping[str, str] | None = None,
        is_fresh: bool = False,
    ) -> Ran:
        """Run `prep` or `train` to completion, and wait for the processes that it leaves running.

        Args:
            scratch: Folder used as $TMPDIR; created if missing.
            is_fresh: True to use a new interpreter and new workers, as in production, instead of a fork with all
                modules imported.

        Raises:
            Broken: The command did not exit, or some of its processes outlived it.
        """
        with self._lock:
            self._count += 1
            number = self._count
        scratch.mkdir(parents=True, exist_ok=True)
        words = [str(argument) for argument in arguments]
        mark = f"torture-{os.getpid()}-{number}"
        surroundings = {name: os.environ[name] for name in _KEPT if name in os.environ}
        surroundings |= {"TMPDIR": str(scratch), MARK: mark}
        surroundings |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{INTERPOSER}{os.pathsep}{ROOT}", **(environment or {})}
        outputs = self._folder / f"{number}.out", self._folder / f"{number}.err"
        start = self._start_fresh if is_fresh else self._start_fork
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
            surroundings["RAY_TMPDIR"] = short  # socket paths are limited to 107 bytes
            status, session = start(program, words, surroundings, outputs)
            texts = [path.read_text("utf-8", "replace") for path in outputs]
            for path in outputs:
                path.unlink()
            ran = Ran(" ".join([program, *words]), -signal.SIGKILL if status is None else status, *texts)
            if status is None:
                raise Broken(f"did not end within {_LIMIT_S:.0f} s\n{ran.describe()}")
            _wait_for_all(session, mark, ran)
        return ran

    def _start_fresh(
        self, program: str, words: list[str], environment: Mapping[str, str], outputs: tuple[Path, Path]
    ) -> tuple[int | None, int]:
        with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{program}.cli", *words],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            return process.wait(_LIMIT_S), process.pid
        except subprocess.TimeoutExpired:
            _kill_session(process.pid)
            process.wait()
            return None, process.pid

    def _start_fork(
        self, program: str, words: list[str], environment: Mapping[str, str], outputs: tuple[Path, Path]
    ) -> tuple[int | None, int]:
        with Path(os.devnull).open("rb") as nothing, outputs[0].open("wb") as out, outputs[1].open("wb") as err:
            connection = self._forks.start(
                f"{program}.cli",
                words,
                environment=environment,
                folder=ROOT,
                descriptors=(nothing.fileno(), out.fileno(), err.fileno()),
                limit_s=_LIMIT_S,
            )
        with connection, connection.makefile() as lines:
            session = int(lines.readline())
            try:
                return int(lines.readline()), session
            except TimeoutError:
                _kill_session(session)
                return None, session

    def close(self) -> None:
        """Terminate the fork server, unless the caller passed it."""
        if self._is_own:
            self._forks.close()


def _wait_for_all(session: int, mark: str, ran: Ran) -> None:
    deadline_s = time.monotonic() + _ENDING_S
    while left := _processes(session, mark):
        daemons = [pid for pid, name in left.items() if _RAYS_OWN.search(name)]
        if len(daemons) == len(left) and ran.status == -signal.SIGKILL:
            # Ray's processes exit some time after their driver was killed; they do not write to these folders.
            for pid in daemons:
                _kill(pid)
        elif time.monotonic() > deadline_s:
            for pid in left:
                _kill(pid)
            raise Broken(f"processes outlive it: {sorted(left.values())}\n{ran.describe()}")
        time.sleep(0.02)


def _processes(session: int, mark: str) -> dict[int, str]:
    """Map process IDs to names, for the processes of a session or with the mark in their environment.

    Zombies are omitted.
    """
    processes = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            if int(fields[3]) == session or f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                processes[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        except OSError:
            continue
    return processes


def _kill_session(session: int) -> None:
    for pid in _processes(session, "none"):
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
