"""Commands that write to a bucket, frozen or cut off at each of their requests until a successor has finished.

A command runs through a proxy. At one request it is

- `frozen`: the request is dropped, and all processes of the command are stopped (SIGSTOP);
- `cut-off`: this request and all later ones get no response, while the processes keep running;
- `late`: the command is frozen, and the server gets the request after the successor has finished.

The lease of the command expires, and a successor takes it over and finishes. Then the first command continues. It must
not change anything that its successor wrote, and it must not exit with success unless its work was already done. Leases
expire within seconds here (`short_leases`).
"""

import atexit
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

from clipmill.manifests.storage.objects import Objects, open_objects
from tests.conftest import ROOT
from tests.object_storage.faults import Fault, Faults, faulty
from tests.object_storage.folders import contents_of, upload
from tests.object_storage.server import S3Server, s3_server
from tests.torture import bases
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well, same_contents
from tests.torture.commands import Commands, Ran
from tests.torture.short_leases.sitecustomize import EXPIRY_S
from tests.torture.workspace import Workspace

PART = "buckets"
SHORT_LEASES = Path(__file__).parent / "short_leases"
_SIGNED = "&X-Amz-*"  # in the names of requests: times and signatures differ between runs
CHANGING = ("PUT", "POST", "DELETE")
_OWN_END = re.compile(r"\.lock$|\.tmp-")
_LIMIT_S = 120.0
_lock, _starting = threading.Lock(), threading.Lock()


@dataclass(frozen=True)
class Subject:
    """Command and its successor.

    Attributes:
        base: Function that creates the data folder that both commands start from.
        faults: Kinds of faults; see the module. "late" requires that the successor is the same command, because it then
            creates the same objects.
        column_lock: Name of the lock that both commands take.
    """

    name: str
    base: Callable[[Workspace], Path]
    writer: Callable[[Workspace], Sequence[object]]
    successor: Callable[[Workspace], Sequence[object]]
    faults: tuple[str, ...] = ("frozen", "cut-off")
    column_lock: str = ".lock"


_CHUNK, _SCORES = (*bases.CHUNK, *bases.ENGINE), ("scores", *bases.ENGINE)
_ALL = ("frozen", "cut-off", "late")
SUBJECTS = (
    Subject(
        "late-manifest",
        bases.with_chunks,
        partial(bases.manifest_arguments, which="later"),
        partial(bases.manifest_arguments, which="first"),
    ),
    Subject("late-gc", bases.with_garbage, lambda _: ("gc",), lambda _: _CHUNK),
    Subject("late-gc-twice", bases.with_garbage, lambda _: ("gc",), lambda _: ("gc",), _ALL),
    Subject("late-chunk", bases.with_manifest, lambda _: _CHUNK, lambda _: _CHUNK, _ALL),
    Subject("late-scores", bases.with_chunks, lambda _: _SCORES, lambda _: _SCORES, _ALL, ".scores.lock"),
)


@dataclass(frozen=True)
class Point:
    """Request of a command: `METHOD:key#n`, the n-th one of this method and key; `*` is a random part of the key.

    Attributes:
        is_last: True if only the deletion of temporary objects and of the lock follows.
    """

    name: str
    is_last: bool

    def fault(self, kind: str) -> Fault:
        """Return the fault that happens at this request."""
        match = re.fullmatch(r"(\w+):(.*)#(\d+)", self.name, re.DOTALL)
        assert match is not None
        path = re.escape(match[2]).replace(re.escape(_SIGNED), "&X-Amz-.*").replace(re.escape("*"), "[0-9a-f]{12}")
        return Fault(
            "late" if kind == "late" else "hang",
            method=match[1],
            path=f"^/[^/?]+{path}$",
            skip=int(match[3]) - 1,
            times=1,
            spreads=kind == "cut-off",
        )


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each command, in an order determined by `seed`."""
    return {subject.name: partial(_cases_of, subject, seed, workspace) for subject in SUBJECTS}


def _cases_of(subject: Subject, seed: int, workspace: Workspace) -> Iterator[Case]:
    points: list[Point] = []

    def trace(folder: Path) -> None:
        with _Trial(subject, workspace, folder) as trial:
            ended_well(trial.run(subject.writer, "writer", port=trial.proxy.port), status=0)
            points.extend(points_of(trial.proxy.seen().requests, subject.column_lock))

    workspace.made(f"requests-{subject.name}", trace)
    pairs = [(point, fault) for point in points for fault in subject.faults]
    kinds = (lambda pair: f"{pair[0].name.partition(':')[0]}/{pair[1]}", lambda pair: pair[0].name)
    for point, fault in draw(pairs, seed=f"{seed}/{PART}/{subject.name}", kinds=kinds):
        name = f"{PART}/{subject.name}/{point.name}/{fault}"
        yield Case(name, fault, partial(_try, subject, workspace, point, fault))


def points_of(requests: Sequence[tuple[str, str]], column_lock: str) -> list[Point]:
    """Return the requests of a command while it holds its lock."""
    unsigned = (re.sub("&X-Amz-.*", _SIGNED, re.sub("^/[^/?]+", "", path)) for _, path in requests)
    keys = (re.sub(r"\.tmp-[0-9a-f]{12}", ".tmp-*", key) for key in unsigned)
    named = [(method, key) for (method, _), key in zip(requests, keys, strict=True)]
    locks = [
        number for number, (method, key) in enumerate(named) if method == "PUT" and key.endswith(f"/{column_lock}")
    ]
    changes = [number for number, (method, key) in enumerate(named) if method in CHANGING and not _OWN_END.search(key)]
    # At its end, a command deletes its token. A command that writes nothing exists to delete objects.
    written = [number for number in changes if named[number][0] == "PUT"]
    last = max(written or changes)
    counts: Counter[str] = Counter()
    points = []
    for number, (method, key) in enumerate(named):
        counts[f"{method}:{key}"] += 1
        if locks[0] < number < locks[-1] and not key.endswith(".lock"):
            points.append(Point(f"{method}:{key}#{counts[f'{method}:{key}']}", is_last=number > last))
    return points


class _Trial:
    """A bucket, a proxy in front of it, and commands; a context manager."""

    def __init__(self, subject: Subject, workspace: Workspace, folder: Path) -> None:
        self._subject, self._workspace, self._folder = subject, workspace, folder
        self._server = shared_server()
        self._stack = ExitStack()
        self.proxy: Faults = self._stack.enter_context(faulty(self._server.port))
        name = f"torture-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        self.address = f"{self._server.make_bucket(name)}/data"
        with leading_to(self._server):
            self.objects: Objects = open_objects(self.address)
            upload(subject.base(workspace) / "data", self.address)

    def run(self, arguments: Callable[[Workspace], Sequence[object]], name: str, *, port: int | None = None) -> Ran:
        """Run a command as if on another machine, through the proxy at a port or directly."""
        endpoint = None if port is None else f"http://127.0.0.1:{port}"
        environment = self._server.environment(endpoint=endpoint)
        environment |= {"CLIPMILL_SHORT_LEASES": "1", "PYTHONPATH": f"{SHORT_LEASES}{os.pathsep}{ROOT}"}
        commands: Commands = self._workspace.commands
        words = [*arguments(self._workspace), "--data", self.address]
        return commands.run("prep", words, scratch=self._folder / name, environment=environment)

    def contents(self) -> dict[str, str]:
        """Return the contents of the bucket without locks and temporary objects, which the next command removes."""
        with leading_to(self._server):
            contents = contents_of(self.address)
        return {key: digest for key, digest in contents.items() if "/.tmp-" not in f"/{key}"}

    def session(self) -> int:
        """Return the session of the command that holds the lock."""
        return os.getsid(int(json.loads(self.objects.read(self._subject.column_lock))["process"]))

    def __enter__(self) -> "_Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _try(subject: Subject, workspace: Workspace, point: Point, fault: str, folder: Path) -> None:
    with _Trial(subject, workspace, folder) as trial, ThreadPoolExecutor(1) as pool:
        trial.proxy.set(point.fault(fault))
        writer = pool.submit(trial.run, subject.writer, "writer", port=trial.proxy.port)
        session: int | None = None
        try:
            while not trial.proxy.seen().num_faults:
                if writer.done():
                    raise Broken(f"it did not come to this point: {writer.result().describe()}")
                time.sleep(0.02)
            if fault != "cut-off":
                session = trial.session()
                signal_session(signal.SIGSTOP, session)
            left = _run_successor(trial, subject)
        finally:
            trial.proxy.set()
            if session is not None:
                signal_session(signal.SIGCONT, session)
        ran = writer.result()
        ended_well(ran, status={0, 1} if point.is_last else 1)
        try:
            same_contents(trial.contents(), left)
        except Broken as broken:
            raise Broken(f"the late writer has changed what its successor left: {broken}\n{ran.describe()}") from None


def _run_successor(trial: _Trial, subject: Subject) -> dict[str, str]:
    """Run the successor as soon as the lease has expired; return the contents of the bucket afterwards."""
    end_s = time.monotonic() + _LIMIT_S
    while True:
        time.sleep(EXPIRY_S)
        ran = trial.run(subject.successor, f"successor-{time.monotonic_ns()}")
        if "another command is writing" not in ran.output or time.monotonic() > end_s:
            ended_well(ran, status=0)
            return trial.contents()


def signal_session(number: int, session: int) -> None:
    """Send a signal to all processes of a session."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _session_of(int(path.name)) == session:
            os.kill(int(path.name), number)


def _session_of(process: int) -> int | None:
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return None


def shared_server() -> S3Server:
    """Return the server that all cases share; it stops when this process exits."""
    with _starting:  # two cases may request it at once
        return _start_server()


@cache
def _start_server() -> S3Server:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(s3_server())


def leading_to(server: S3Server) -> ExitStack:
    """Return a context manager during which clients in this process use the server."""
    stack = ExitStack()
    stack.enter_context(_lock)
    stack.enter_context(patch.dict(os.environ, server.environment()))
    return stack
