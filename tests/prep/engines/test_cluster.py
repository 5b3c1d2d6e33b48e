"""Tests of clusters with nodes that die during their work, or that must not work at all."""

import ipaddress
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import FailedWork
from clipmill.prep.engines import RefusedNode, ray_actors
from clipmill.prep.engines.ray import IsolatedEngine, RayEngine, import_ray, running_processes
from tests.conftest import ROOT
from tests.prep.engines.conftest import HEAD
from tests.prep.engines.nodes import add_node_with, may_mount
from tests.prep.running import Ran, chunk, contents, manifest, messages, prep, prep_here, processes, start, wait_until

SETTINGS = ("--len", "500ms", "--preset", "veryslow")


@dataclass(frozen=True)
class Listening:
    """Listening socket, and the program that holds it."""

    host: str
    port: int
    program: str


def listening_sockets(driver: int) -> list[Listening]:
    """Return the TCP sockets that a process and all of its descendants listen on."""
    parents = {pid: parent for pid, parent, _ in running_processes()}
    family = {driver}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            host, port = local.split(":")
            if state == "0A":
                words = [int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8)]
                address = ipaddress.ip_address(b"".join(words))
                mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
                addresses[f"socket:[{inode}]"] = str(mapped or address), int(port, 16)
    sockets = []
    for pid in family:
        with suppress(OSError):  # the process has ended
            program = Path("/proc", str(pid), "cmdline").read_text().partition("\0")[0]
            for descriptor in Path("/proc", str(pid), "fd").iterdir():
                if (address_of := addresses.get(str(descriptor.readlink()))) is not None:
                    sockets.append(Listening(*address_of, program))
    return sockets


def test_a_run_outlives_one_of_two_nodes(
    cluster: Any, mark: str, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number, name in enumerate("abc"):
        write_video(videos / f"{name}.mp4", seconds=5, first_number=1000 * number)
    manifest(data, videos)
    shutil.copytree(data, tmp_path / "undisturbed")
    chunk(tmp_path / "undisturbed", *SETTINGS)

    second = cluster.add_node(num_cpus=1)
    node = {process.pid for process in processes(mark)}
    run = start("chunk", "--data", data, "--json", *SETTINGS, RAY_ADDRESS=cluster.address)

    def parents_of_encoders() -> set[int]:
        workers = {process.pid: process.parent for process in processes(mark)}
        return {workers.get(process.parent, 0) for process in processes(mark) if process.is_ffmpeg}

    wait_until(lambda: parents_of_encoders() & node)
    cluster.remove_node(second, allow_graceful=False)
    stdout, stderr = run.communicate(timeout=120)
    ran = Ran(run.returncode, stdout, stderr)
    assert ran.status == 0, ran.stderr
    assert ran.summary["num_encoded"] == 30 and ran.summary["failures"] == {}
    (lost,) = ran.summary["refused_workers"]
    assert lost["reason"].startswith("it was lost; ") and f"{lost['place']} is excluded from the run: " in ran.stderr
    assert contents(data) == contents(tmp_path / "undisturbed")


AddNode = Callable[..., None]


@pytest.fixture
def add_node(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> AddNode:
    """Return a function that adds a node with one CPU and with mounts that other processes do not see."""
    # Only the main thread may choose what happens at exit. The nodes stop with the head at the latest.
    monkeypatch.setattr(cluster, "_shutdown_at_exit", False)

    def add(*mounts: Sequence[object], **environment: str) -> None:
        add_node_with(cluster, mounts, environment=environment)

    return add


def require_private_mounts() -> None:
    """Skip the test where a process may not create private mounts."""
    if not may_mount():
        pytest.skip("private mounts are not permitted here")


def other_source(folder: Path) -> Path:
    """Copy the packages with a changed comment."""
    for package in ("manifests", "shards", "prep"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "prep" / "spans.py").open("a") as file:
        file.write("# of another version\n")
    return folder


@pytest.mark.nightly
def test_nodes_that_cannot_do_the_work_are_named_and_get_none(
    cluster: Any, add_node: AddNode, tmp_path: Path, write_video: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_private_mounts()
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number in range(4):  # one shard per video, so that each node would get a shard
        write_video(videos / f"{number}.mp4", seconds=1.6, first_number=1000 * number)
    manifest(data, videos)
    settings = ("--len", "100ms", "--preset", "ultrafast")
    shutil.copytree(data, tmp_path / "undisturbed")
    assert chunk(tmp_path / "undisturbed", *settings)["num_shards"] == 4
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    arguments = ("--json", *settings)
    add_node(["-t", "tmpfs", "tmpfs", data])

    # The data folder is visible only to the driver.
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, "-m", "clipmill.prep.cli", *map(str, ("chunk", "--data", alone, *arguments))]
    mounted = f"mount -t tmpfs tmpfs {alone} && cp -r {data}/manifest {alone} && exec {shlex.join(command)}"
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    error, hint = ended.stderr.splitlines()[-2:]
    assert ended.returncode == 2 and hint.startswith("hint: install the same versions of clipmill and"), ended.stderr
    assert error.startswith("error: no usable workers: node ") and error.count(": the data folder is not shared") == 2
    assert "Traceback" not in ended.stderr and list(alone.iterdir()) == []

    copy = other_source(tmp_path / "copy")
    # Ray's workers import modules from the paths where the driver has them.
    add_node(["--bind", copy / "prep", ROOT / "prep"])
    add_node(*(["-t", "tmpfs", "tmpfs", ROOT / package] for package in ("manifests", "shards", "prep")))

    ran = prep("chunk", "--data", data, *arguments)
    reasons = [refused["reason"] for refused in ran.summary["refused_workers"]]
    assert sorted(reason.split(" (source ")[0].split(":")[0] for reason in reasons) == [
        f"clipmill {version('clipmill')}",
        "clipmill is not installed",
        "the data folder is not shared",
    ], ran.stderr
    assert len({refused["place"] for refused in ran.summary["refused_workers"]}) == 3
    assert all(f"{refused['place']} is excluded from" in ran.stderr for refused in ran.summary["refused_workers"])
    assert ran.summary["failures"] == {} and ran.summary["num_chunks"] == 64
    assert contents(data) == contents(tmp_path / "undisturbed")


@pytest.mark.nightly
def test_a_node_that_fails_what_others_do_is_named_and_left_out(
    cluster: Any, add_node: AddNode, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    require_private_mounts()
    videos, data, scratch = tmp_path / "videos", tmp_path / "data", tmp_path / "scratch"
    for number in range(8):  # one shard per video
        write_video(videos / f"{number}.mp4", seconds=1.6, first_number=1000 * number)
    manifest(data, videos)
    scratch.mkdir()
    add_node(["-t", "tmpfs", "-o", "size=16k", "tmpfs", scratch], TMPDIR=str(scratch))
    settings = ("--len", "100ms", "--preset", "ultrafast", "--address", cluster.address)
    ran = prep("chunk", "--data", data, "--json", *settings)
    assert ran.summary["failures"] == {} and ran.summary["num_chunks"] == 128
    (full,) = ran.summary["refused_workers"]
    assert "its tasks fail, but succeed on other nodes: disk_full: " in full["reason"]
    assert f"{full['place']} is excluded from the run: " in ran.stderr

    # A command without the token is rejected, and the command that continues the run uses the same cluster.
    next(data.glob("video/*/commits/*.json")).unlink()
    error = prep("retry", "--data", data, status=2, RAY_AUTH_TOKEN="0" * 64).error
    assert error == f'the Ray cluster at "{cluster.address}" requires a different token'


@pytest.mark.nightly
def test_a_node_on_which_no_worker_starts_is_named_and_left_out(
    cluster: Any, add_node: AddNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_private_mounts()
    program = Path(import_ray().__file__).parent / "_private/workers/default_worker.py"
    (ends := tmp_path / "ends.py").write_text("raise SystemExit(1)\n")
    add_node(["--bind", ends, program])
    (node,) = cluster.worker_nodes
    monkeypatch.setattr(ray_actors, "_START_LIMIT_S", 15.0)
    refused: list[RefusedNode] = []
    engine = RayEngine(num_workers=2, address=cluster.address)
    for event in engine.run(time.sleep, takewhile(lambda _: not refused, repeat(0.5))):
        if isinstance(event, RefusedNode):
            refused.append(event)
    assert [event.node.split()[1] for event in refused] == [node.node_id[:8]]
    assert refused[0].reason.startswith("no worker started within 15 s")


def test_ray_that_does_not_start_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        engine = IsolatedEngine(RayEngine(num_workers=1, address=None), name="Ray on this machine", start_limit_s=0)
        with pytest.raises(FailedWork, match=r"Ray on this machine did not start within 0 s; .* --engine processes"):
            list(engine.run(abs, [1]))
        wait_until(lambda: not list(Path(folder).iterdir()))


class EndsAtTheStart:
    """Engine that exits the process, as Ray does if its own server does not respond."""

    def run(self, *arguments: object, **options: object) -> Iterator[None]:
        yield os._exit(1)


def test_ray_that_ends_while_it_starts_leads_to_the_other_engine() -> None:
    engine = IsolatedEngine(EndsAtTheStart(), name="Ray on this machine", start_limit_s=60)
    with pytest.raises(FailedWork, match=r"did not start \(exit status 1\); .* or use --engine processes"):
        list(engine.run(abs, [1]))


@pytest.mark.nightly
def test_a_cluster_that_is_lost_is_one_line(
    mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    address = cluster.address
    try:
        write_video(tmp_path / "videos" / "a.mp4", seconds=12)
        manifest(tmp_path / "data", tmp_path / "videos")
        run = start("chunk", "--data", tmp_path / "data", "--address", cluster.address, *SETTINGS)
        wait_until(lambda: any(process.is_ffmpeg for process in processes(mark)))
        for process in processes(mark):
            if "gcs_server" in process.arguments[0] or "raylet" in Path(process.arguments[0]).name:
                process.kill()
        _, stderr = run.communicate(timeout=120)
    finally:
        for process in processes(mark):
            process.kill()
        cluster.shutdown()
    lines = messages(stderr)
    assert run.returncode == 1 and len(lines) == 1, stderr
    assert lines[0].startswith("failed: the ") and f'"{address}"' in lines[0]
    assert "finished work is kept" in lines[0]


# Client of an address, as another user of this machine could start it.
CLIENT = "import sys, ray; ray._raylet.GcsClient(address=sys.argv[1])"


@pytest.mark.nightly
def test_private_ray_listens_to_nobody_else_and_leaves_nothing(
    mark: str, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    for name, seconds in {"a": 1, "b": 60}.items():
        write_video(tmp_path / "videos" / f"{name}.mp4", seconds=seconds)
    data = tmp_path / "data"
    manifest(data, tmp_path / "videos")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # paths of sockets must be short
        run = start("chunk", "--data", data, "--engine", "ray", "--workers", 1, *SETTINGS, RAY_TMPDIR=folder)
        wait_until(lambda: list(data.glob("video/*/commits/*.json")) or run.poll() is not None)
        sockets = listening_sockets(run.pid)
        (gcs,) = (socket for socket in sockets if "gcs_server" in socket.program)
        assert {socket.host for socket in sockets} <= {"127.0.0.1", "::1"}, sockets
        for token in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
            command = [sys.executable, "-c", CLIENT, f"127.0.0.1:{gcs.port}"]
            client = subprocess.run(command, env={**os.environ, **token}, capture_output=True, text=True)
            assert client.returncode == 1 and "InvalidAuthToken" in client.stderr
        (instance,) = Path(folder).iterdir()
        assert instance.stat().st_mode & 0o777 == 0o700

        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=120)
        lines = messages(stderr)
        assert run.returncode == 143 and len(lines) == 1, stderr
        assert lines[0].startswith("stopped: finished work is kept")
        wait_until(lambda: not list(processes(mark)))
        wait_until(lambda: not list(Path(folder).iterdir()))
    assert list(data.glob("video/*/commits/*.json"))
    # The command that continues the run names its engine.
    assert " --engine ray --data " in prep_here("status", "--data", data).stdout.splitlines()[-1]
