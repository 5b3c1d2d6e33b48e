"""Training runs in a bucket, disturbed at one of their requests; then the same command continues the run.

- `kill`: the request is dropped, and the command is killed;
- `frozen`: the request is dropped and the command is stopped until a successor on another machine has finished; then
  the command must not change anything. `late`: the server gets the request only then;
- `refuse`, `refuse-all`: the server answers the request, or this and all later requests, with 403;
- `lost`: the server executes the request, but its response is lost; `away`: the server returns errors for two seconds.

After each fault, every checkpoint that has a record has all of its parts. The exception is a record that arrives late:
readers ignore it, and the next command removes it. At the end the run has the weights and losses of an undisturbed run,
and no other parts.
"""

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.train.run.bucket import LOCK
from clipmill.train.run.folder import read_lines
from tests.conftest import ROOT
from tests.object_storage.faults import Fault, faulty
from tests.torture import bases
from tests.torture.buckets import SHORT_LEASES, leading_to, shared_server, signal_session
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well
from tests.torture.commands import Ran
from tests.torture.short_leases.sitecustomize import EXPIRY_S
from tests.torture.workspace import Workspace

PART = "runs"
FAULTS = ("kill", "frozen", "late", "refuse", "refuse-all", "lost", "away")
_SUBJECT = "train-bucket"
_LIMIT_S = 120.0
_RANDOM = re.compile(r"(?<=\.tmp-)[0-9a-f]{12}|(?<=__0_)[0-9a-f]{8}")


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases, in an order determined by `seed`."""
    return {_SUBJECT: partial(_cases_of, seed, workspace)}


def _cases_of(seed: int, workspace: Workspace) -> Iterator[Case]:
    points: list[str] = []

    def trace(folder: Path) -> None:
        with _Trial(workspace, folder) as trial:
            ended_well(trial.run("first"), status=0)
            trial.require_same()
            points.extend(_points_of(trial.proxy.seen().requests))

    workspace.made("requests-of-run", trace)
    pairs = [(point, fault) for point in points for fault in FAULTS]
    kinds = (lambda pair: pair[1], lambda pair: re.sub(r"\d+", "", pair[0]), lambda pair: pair[0])
    for point, fault in draw(pairs, seed=f"{seed}/{PART}", kinds=kinds):
        yield Case(f"{PART}/{_SUBJECT}/{point}/{fault}", fault, partial(_try, workspace, point, fault))


def _points_of(requests: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the requests for objects of the run, `METHOD:key#n`, between the first and the last write of its lock."""
    counts: dict[str, int] = {}
    points = []
    for method, path in requests:
        name = f"{method}:{_RANDOM.sub('*', re.sub('^/[^/?]+', '', path))}"
        counts[name] = counts.get(name, 0) + 1
        points.append(f"{name}#{counts[name]}")
    locks = [number for number, point in enumerate(points) if point.startswith(f"PUT:/run/{LOCK}")]
    inside = points[locks[2] : locks[-1]]  # the first two writes create the lock
    return [point for point in inside if not point.partition("#")[0].endswith(LOCK) and "?" not in point]


def _fault_at(point: str, fault: str) -> Fault:
    method, _, rest = point.partition(":")
    key, _, number = rest.rpartition("#")
    path = f"^/[^/?]+{re.escape(key).replace(re.escape('*'), '[0-9a-f]+')}$"
    dropped = Fault("hang", method=method, path=path, skip=int(number) - 1, times=1)
    if fault in ("refuse", "refuse-all"):
        return replace(dropped, kind="error", status=403, code="AccessDenied", spreads=fault == "refuse-all")
    if fault == "away":
        return replace(dropped, kind="error", times=None, for_s=2.0)
    if fault == "late":
        return replace(dropped, kind="late")
    return replace(dropped, kind="lost") if fault == "lost" else dropped


class _Trial:
    """A bucket, a proxy in front of it, and commands; a context manager."""

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self._workspace, self._folder, self._stack = workspace, folder, ExitStack()
        self._server = shared_server()
        self.proxy = self._stack.enter_context(faulty(self._server.port))
        name = f"torture-run-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        self.address = f"{self._server.make_bucket(name)}/run"
        with leading_to(self._server):
            self.objects: Objects = open_objects(self.address)

    def run(self, machine: str, *, is_direct: bool = False) -> Ran:
        """Start or continue the run on a machine, through the proxy or directly."""
        environment = self._server.environment(endpoint=None if is_direct else self.proxy.endpoint)
        environment |= {"CLIPMILL_SHORT_LEASES": "1", "PYTHONPATH": f"{SHORT_LEASES}{os.pathsep}{ROOT}"}
        data = bases.with_columns(self._workspace) / "data"
        words = (*bases.TRAIN, "--shards", data, "--out", self.address, "--resume", "auto")
        scratch = self._folder / machine
        return self._workspace.commands.run("train", words, scratch=scratch, environment=environment)

    def finish(self) -> None:
        """Continue the run on another machine until it is complete; the lock of a killed process expires first."""
        end_s = time.monotonic() + _LIMIT_S
        while True:
            ran = self.run(f"machine-{time.monotonic_ns()}", is_direct=True)
            if "another command is writing" not in ran.output or time.monotonic() > end_s:
                ended_well(ran, status=0)
                return
            time.sleep(EXPIRY_S)

    def session(self) -> int:
        """Return the session of the process that holds the lock."""
        return os.getsid(int(json.loads(self.objects.read(LOCK))["process"]))

    def contents(self) -> dict[str, bytes]:
        """Return all objects except the lock."""
        return {info.key: self.objects.read(info.key) for info in self.objects.list() if info.key != LOCK}

    def require_whole(self) -> dict[str, bytes]:
        """Check that each checkpoint with a record is complete; return all objects."""
        contents = self.contents()
        for key in [key for key in contents if key.endswith("/checkpoint.json")]:
            folder = key.rpartition("/")[0]
            for name, facts in json.loads(contents[key])["files"].items():
                content = contents.get(f"{folder}/{name}")
                if content is None or hashlib.sha256(content).hexdigest() != facts["sha256"]:
                    raise Broken(f"{key} exists, and {name} is missing or other than recorded")
        return contents

    def require_same(self) -> None:
        """Check that the run is complete, with the same parts and losses as an undisturbed run on a local disk."""
        contents, whole = self.require_whole(), bases.with_run(self._workspace) / "run"
        result = {_RANDOM.sub("0", key): content for key, content in contents.items() if "/__" in key}
        parts = {path.relative_to(whole).as_posix(): path.read_bytes() for path in whole.rglob("__*")}
        if parts != result:
            raise Broken(f"parts are {sorted(result)}, and not the bytes of {sorted(parts)}")
        metrics = self._folder / "metrics.jsonl"
        metrics.write_bytes(contents["metrics.jsonl"])
        losses = [
            [(line["step"], line["loss"]) for line in read_lines(path)] for path in (metrics, whole / metrics.name)
        ]
        if losses[0] != losses[1]:
            raise Broken(f"steps and losses are {losses[0]}, and not {losses[1]}")
        if missing := {"index.html", "run.json", "settings.yaml", "failures.jsonl"} - contents.keys():
            raise Broken(f"missing: {missing}")

    def __enter__(self) -> "_Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _try(workspace: Workspace, point: str, fault: str, folder: Path) -> None:
    with _Trial(workspace, folder) as trial, ThreadPoolExecutor(1) as pool:
        trial.proxy.set(_fault_at(point, fault))
        writer = pool.submit(trial.run, "first")
        session: int | None = None
        try:
            if fault in ("kill", "frozen", "late"):
                while not trial.proxy.seen().num_faults:
                    if writer.done():
                        raise Broken(f"it did not come to this point: {writer.result().describe()}")
                    time.sleep(0.02)
                session = trial.session()
                signal_session(signal.SIGKILL if fault == "kill" else signal.SIGSTOP, session)
                if fault != "kill":
                    trial.require_whole()
                    trial.finish()
            elif writer.result() and not trial.proxy.seen().num_faults:
                raise Broken(f"it did not come to this point: {writer.result().describe()}")
        finally:
            left = trial.contents()
            trial.proxy.set()
            if session is not None:
                signal_session(signal.SIGCONT, session)
        allowed = {"kill": {-signal.SIGKILL}, "lost": {0}, "away": {0}, "refuse": {0, 1, 2, 3}, "refuse-all": {1, 2, 3}}
        ended_well(writer.result(), status=allowed.get(fault, {1}))
        if fault == "frozen" and trial.contents() != left:
            raise Broken(f"it has changed what its successor left\n{writer.result().describe()}")
        if fault != "late":
            trial.require_whole()
        if fault != "frozen":
            trial.finish()
        trial.require_same()
