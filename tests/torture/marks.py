"""Readers of a data folder during random changes to it.

Readers start, end, are stopped and are killed, between new variants, different videos, `prep use` and `prep gc`, in
random order. Every reader reads the same bytes from its start to its end. After `prep gc`, only the current variant and
the variants with readers remain; at the end, only the current variant remains, without marks.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.conftest import ROOT
from tests.torture import bases
from tests.torture.buckets import shared_server
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well
from tests.torture.commands import Ran
from tests.torture.workspace import Workspace, copy

PART = "marks"
_NUM_CASES = 30  # cases per location
_PLACES = ("local", "bucket")
_CRFS = (24, 35, 45)
_ACTIONS = ("begin", "begin", "begin", "named", "end", "kill", "stop", "make", "make", "videos", "use", "gc", "gc")
_LIMIT_S = 120.0


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases for each location, which are drawn from `seed`."""
    return {place: partial(_cases, seed, workspace, place) for place in _PLACES}


def _cases(seed: int, workspace: Workspace, place: str) -> Iterator[Case]:
    for number in range(_NUM_CASES):
        name = f"{PART}/{place}/{number:02d}"
        yield Case(name, place, partial(_try, workspace, place, seed=f"{seed}/{name}"))


@dataclass
class _Reader:
    """Process that runs `marked_reader`.

    Attributes:
        variant: Name of the variant that it has opened.
        digest: Digest of the samples that it read first.
    """

    process: "subprocess.Popen[str]"
    variant: str = ""
    digest: str = ""
    is_stopped: bool = False

    def line(self) -> str:
        """Return the next line of the reader's output; empty if the reader has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def read(self) -> str:
        """Let the reader read all samples, and return their digest."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("read\n")
            self.process.stdin.flush()
        return self.line()

    def end(self, *, is_killed: bool) -> None:
        """Stop the reader, by closing its input or with a signal."""
        assert self.process.stdin is not None
        if is_killed:
            self.process.kill()
        else:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
        self.process.wait(_LIMIT_S)


@dataclass
class _Trial:
    """Folder of a case and its readers; a context manager."""

    workspace: Workspace
    folder: Path
    random: Random
    data: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    readers: list[_Reader] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    crf: int = 24
    _stack: ExitStack = field(default_factory=ExitStack)

    def prep(self, *arguments: object) -> Ran:
        """Run `prep` and require success."""
        self.log.append(f"prep {' '.join(map(str, arguments[:3]))}")
        words = [*arguments, "--data", self.data]
        run = self.workspace.commands.run
        return ended_well(run("prep", words, scratch=self.folder / "tmp", environment=self.environment), status=0)

    def variants(self) -> tuple[str, set[str]]:
        """Return the current variant and all variants, as `prep status` lists them."""
        column: dict[str, Any] = json.loads(self.prep("status", "--json").stdout)["columns"]["video"]
        return column["current"], {variant["name"] for variant in column["variants"]}

    def begin_reader(self, *names: str) -> None:
        """Start a reader of the current variant, or of the variant in `names`."""
        words = [self.data, str(self.folder / "cache"), *names]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.marked_reader", *words],
            cwd=ROOT,
            env={**os.environ, **self.environment, "TMPDIR": str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.kill)
        reader = _Reader(process)
        reader.variant = reader.line()
        reader.digest = reader.read()
        self.log.append(f"reader {len(self.readers)} of {reader.variant}")
        if not reader.digest:
            process.kill()
            raise self.violation(
                f"a reader of {names or 'the current variant'} ended: {process.communicate()[1][-2000:]}"
            )
        self.readers.append(reader)

    def require_same(self) -> None:
        """Check that each reader still reads the samples that it read first."""
        for reader in self.readers:
            if not reader.is_stopped and reader.read() != reader.digest:
                reader.process.kill()
                raise self.violation(
                    f"a reader of {reader.variant} reads other bytes: {reader.process.communicate()[1]}"
                )

    def collect(self) -> None:
        """Run `prep gc`, and check that it keeps exactly the current variant and the variants with readers."""
        ran = self.prep("gc")
        current, names = self.variants()
        expected = {current, *(reader.variant for reader in self.readers)}
        if names != expected:
            raise self.violation(f"{names} are left, not {expected}: {ran.describe()}")

    def violation(self, what: str) -> Broken:
        return Broken(f"{what}\nafter: {', '.join(self.log)}")

    def __enter__(self) -> "_Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for reader in self.readers:
            reader.process.communicate()


def _act(trial: _Trial, action: str) -> None:
    random, readers = trial.random, trial.readers
    if action == "begin":
        trial.begin_reader()
    elif action == "named":
        trial.begin_reader(random.choice(sorted(trial.variants()[1])))
    elif action == "make":
        trial.crf = random.choice(_CRFS)
        trial.prep(*bases.CHUNK, "--crf", trial.crf, *bases.ENGINE)
    elif action == "videos":
        # Some shards of the current variant are replaced.
        trial.prep(*bases.manifest_arguments(trial.workspace, which=random.choice(("first", "later"))))
        trial.prep(*bases.CHUNK, "--crf", trial.crf, *bases.ENGINE)
    elif action == "use":
        trial.prep("use", random.choice(sorted(trial.variants()[1])))
        trial.crf = 24  # quality of the next new shards
    elif action == "gc":
        trial.collect()
    elif readers:
        reader = random.choice(readers)
        trial.log.append(f"{action} reader {readers.index(reader)}")
        if action == "stop":
            reader.is_stopped = not reader.is_stopped
            reader.process.send_signal(signal.SIGSTOP if reader.is_stopped else signal.SIGCONT)
        else:
            readers.remove(reader)
            reader.end(is_killed=action == "kill")


def _try(workspace: Workspace, place: str, folder: Path, *, seed: str) -> None:
    random = Random(seed)
    base = bases.with_chunks(workspace)
    with _Trial(workspace, folder, random) as trial:
        if place == "local":
            copy(base, folder)
            trial.data = str(folder / "data")
        else:
            trial.data, trial.environment = _upload(base / "data")
        for _ in range(random.randrange(6, 14)):
            _act(trial, random.choice(_ACTIONS))
            trial.require_same()
        for reader in trial.readers:
            reader.end(is_killed=random.random() < 0.5)
        trial.readers.clear()
        trial.prep(*bases.CHUNK, "--crf", trial.crf, *bases.ENGINE)
        trial.collect()
        text = trial.prep("gc").stdout
        if "nothing to remove" not in text:
            raise trial.violation(f"a second gc removes something: {text}")


def _upload(data: Path) -> tuple[str, dict[str, str]]:
    """Copy a data folder to a bucket; return its URL, and the environment in which commands can access it."""
    server = shared_server()
    address = server.make_bucket(f"marks-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}")
    paths = [path for path in data.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    for path in sorted(paths, key=lambda path: ("commits" in path.parts, path)):
        server.put(address, f"data/{path.relative_to(data).as_posix()}", path.read_bytes())
    return f"{address}/data", dict(server.environment())
