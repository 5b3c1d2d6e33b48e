"""Clusters of a good and a bad node; the bad node fails from the start, or after some work.

`prep chunk` must create every chunk, with the bytes of an undisturbed run, and report only the bad node.
"""

import atexit
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video.ffmpeg import find_ffmpeg
from tests.object_storage.faults import Fault, faulty
from tests.torture.buckets import shared_server
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, no_litter, samples
from tests.torture.workspace import Workspace, copy

PART = "nodes"
_NUM_CASES = 20  # cases per subject
_NUM_VIDEOS = 8  # one per shard
_CHUNK = ("chunk", "--len", "100ms", "--preset", "ultrafast", "--short-side", 32)
# Ways in which ffmpeg fails on a bad node.
_ENDINGS = {
    "crash": "kill -ILL $$",
    "worker": "kill -KILL $PPID",
    "missing": "echo 'error while loading shared libraries: libx264.so' >&2; exit 127",
}
_one_at_a_time = threading.Lock()  # a cluster holds the nodes of one case at a time


@dataclass(frozen=True)
class Spoilt:
    """Environment and mounts of the bad node."""

    mounts: tuple[tuple[object, ...], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases for each kind of bad node, drawn from `seed`; empty where mounts are not permitted."""
    from tests.prep.engines.nodes import may_mount

    kinds = ("scratch", "sources", "keys", *_ENDINGS)
    return {kind: partial(_cases, seed, workspace, kind) for kind in kinds} if may_mount() else {}


def _cases(seed: int, workspace: Workspace, kind: str) -> Iterator[Case]:
    for number in range(_NUM_CASES):
        name = f"{PART}/{kind}/{number:02d}"
        yield Case(name, kind, partial(_try, workspace, kind, random=Random(f"{seed}/{name}")))


@cache
def _cluster() -> Any:
    """Return a head node with one CPU.

    It stops when this process exits; its token is in the environment.
    """
    from tests.prep.engines.conftest import HEAD, cluster_of

    stack = ExitStack()
    atexit.register(stack.close)
    with patch.dict(os.environ, shared_server().environment()):
        return stack.enter_context(cluster_of(HEAD, shutdown_at_exit=False))


def _undisturbed_data(workspace: Workspace) -> Path:
    def make(folder: Path) -> None:
        for number in range(_NUM_VIDEOS):
            video = FrameNumberVideo(num_frames=48, fps=Fraction(30), width=64, height=64, first_number=50 * number)
            (folder / "videos").mkdir(exist_ok=True)
            video.write(folder / "videos" / f"{number}.mp4")
        for words in (("manifest", "folder", folder / "videos"), (*_CHUNK, "--engine", "processes")):
            ran = workspace.commands.run("prep", [*words, "--data", folder / "data"], scratch=folder / "tmp")
            ended_well(ran, status=0)

    return workspace.made("nodes", make)


def _try(workspace: Workspace, kind: str, folder: Path, *, random: Random) -> None:
    made = _undisturbed_data(workspace)
    copy(made / "videos", folder / "videos")
    with _one_at_a_time, ExitStack() as stack:
        cluster = _cluster()
        sources, spoilt = str(folder / "videos"), Spoilt()
        if kind == "keys":
            server = shared_server()
            bucket = server.make_bucket(f"nodes-{os.getpid()}-{random.getrandbits(40):x}")
            for path in (folder / "videos").iterdir():
                server.put(bucket, path.name, path.read_bytes())
            proxy = stack.enter_context(faulty(server.port))
            expired = Fault("error", skip=random.randrange(30), status=400, code="ExpiredToken", spreads=True)
            proxy.set(expired)
            sources, spoilt = bucket, Spoilt(environment=(("AWS_ENDPOINT_URL", proxy.endpoint),))
        elif kind == "sources":
            spoilt = Spoilt((("-t", "tmpfs", "tmpfs", folder / "videos"),))
        elif kind == "scratch":
            (folder / "scratch").mkdir()
            size = f"size={random.choice((16, 40, 400))}k"
            spoilt = Spoilt(
                (("-t", "tmpfs", "-o", size, "tmpfs", folder / "scratch"),), (("TMPDIR", str(folder / "scratch")),)
            )
        else:
            spoilt = Spoilt((("--bind", _program(folder, kind, num_good=random.choice((0, 0, 1, 3))), _real()),))
        _run(workspace, cluster, folder, sources=sources, spoilt=spoilt)
    if samples(folder / "data") != samples(made / "data"):
        raise Broken("the chunks differ from the chunks of an undisturbed run")
    no_litter(folder / "data")


def _real() -> Path:
    return Path(find_ffmpeg().path).resolve()


def _program(folder: Path, kind: str, *, num_good: int) -> Path:
    from tests.prep.engines.nodes import write_failing_program

    copied = folder / "copied-ffmpeg"
    shutil.copy2(_real(), copied)
    return write_failing_program(folder / "ffmpeg", copied, ending=_ENDINGS[kind], num_good=num_good)


def _run(workspace: Workspace, cluster: Any, folder: Path, *, sources: str, spoilt: Spoilt) -> None:
    from tests.prep.engines.nodes import add_node_with

    environment = {
        **shared_server().environment(),
        "RAY_ADDRESS": cluster.address,
        **{name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")},
    }

    def run(*words: object, expects: int = 0) -> Any:
        scratch = folder / "driver"
        ran = workspace.commands.run(
            "prep", [*words, "--data", folder / "data"], scratch=scratch, environment=environment, is_fresh=True
        )
        return ended_well(ran, status=expects)

    run("manifest", "folder", sources)
    node = add_node_with(cluster, spoilt.mounts, environment=dict(spoilt.environment))
    try:
        ran = run(*_CHUNK, "--json")
    finally:
        cluster.remove_node(node)
    summary = json.loads(ran.stdout)
    places = {refused["place"].split()[1] for refused in summary["refused_workers"]}
    if summary["failures"] or not places <= {node.node_id[:8]}:
        raise Broken(f"failures {summary['failures']}, and {places} excluded, not {node.node_id[:8]}: {ran.describe()}")
