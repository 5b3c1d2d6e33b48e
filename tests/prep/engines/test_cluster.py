"""Clusters of nodes that die while they work, or must not work at all."""

import ctypes
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.prep.running import MARK, Ran, chunk, contents, manifest, messages, prep, processes, start, wait_until

SETTINGS = ("--len", "500ms", "--preset", "veryslow")


# A head without what only a user would look at: each of these is a process.
HEAD = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}


@contextmanager
def marked() -> Iterator[str]:
    """A mark in the environment of the cluster's processes, which are to see a dead node soon."""
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            MARK: mark,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_initial_delay_ms": "500",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "3",
        }.items():
            patch.setenv(name, value)
        yield mark


@pytest.fixture
def mark() -> Iterator[str]:
    """Of a test with a Ray of its own."""
    with marked() as mark:
        yield mark


@pytest.fixture(scope="module")
def head() -> Iterator[Any]:
    """A cluster of one CPU, for the tests that leave it so."""
    from ray.cluster_utils import Cluster

    with marked():
        cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def cluster(head: Any, mark: str) -> Iterator[Any]:
    """The shared head, and the nodes that a test adds, which have its mark."""
    yield head
    for node in list(head.worker_nodes):
        head.remove_node(node)


def test_a_run_outlives_one_of_two_nodes(
    cluster: Any, mark: str, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number, name in enumerate("abc"):
        write_video(videos / f"{name}.mp4", seconds=10, first_number=1000 * number)
    manifest(data, videos)
    shutil.copytree(data, tmp_path / "undisturbed")
    chunk(tmp_path / "undisturbed", *SETTINGS)

    second = cluster.add_node(num_cpus=1)
    node = {process.pid for process in processes(mark)}
    run = start("chunk", "--data", data, "--json", "--address", cluster.address, *SETTINGS)

    def parents_of_encoders() -> set[int]:
        workers = {process.pid: process.parent for process in processes(mark)}
        return {workers.get(process.parent, 0) for process in processes(mark) if process.is_ffmpeg}

    wait_until(lambda: parents_of_encoders() & node)
    cluster.remove_node(second, allow_graceful=False)
    stdout, stderr = run.communicate(timeout=120)
    ran = Ran(run.returncode, stdout, stderr)
    assert ran.status == 0, ran.stderr
    assert ran.summary["num_encoded"] == 60 and ran.summary["failures"] == {}
    assert contents(data) == contents(tmp_path / "undisturbed")


AddNode = Callable[..., None]
_CLONE_NEWNS = 0x00020000  # of <sched.h>; `os.unshare` comes with Python 3.12


@pytest.fixture
def add_node(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> AddNode:
    """Adds a node of one CPU after some mounts, of which nobody else sees anything."""
    # Only the main thread may say what to do at the end. The nodes end with the head at the latest.
    monkeypatch.setattr(cluster, "_shutdown_at_exit", False)

    def start(mounts: Sequence[Sequence[object]]) -> None:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        for words in (["--make-rprivate", "/"], *mounts):
            subprocess.run(["mount", *map(str, words)], check=True)
        cluster.add_node(num_cpus=1)

    def add(*mounts: Sequence[object]) -> None:
        with ThreadPoolExecutor(1) as thread:  # which can have mounts of its own, and hands them on
            thread.submit(start, mounts).result()

    return add


def require_private_mounts() -> None:
    """Skips where a process may not have mounts of its own."""
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("mounts of one process alone are not permitted here")


def other_source(folder: Path) -> Path:
    """A copy of the packages that differs from this one in a comment."""
    for package in ("manifests", "shards", "prep"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "prep" / "spans.py").open("a") as file:
        file.write("# of another version\n")
    return folder


def test_nodes_that_cannot_do_the_work_are_named_and_get_none(
    cluster: Any, add_node: AddNode, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    require_private_mounts()
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number in range(4):  # of a shard each, so that each node would get one
        write_video(videos / f"{number}.mp4", seconds=1.6, first_number=1000 * number)
    manifest(data, videos)
    settings = ("--len", "100ms", "--preset", "ultrafast")
    shutil.copytree(data, tmp_path / "undisturbed")
    assert chunk(tmp_path / "undisturbed", *settings)["num_shards"] == 4
    arguments = ("--json", "--address", cluster.address, *settings)
    add_node(["-t", "tmpfs", "tmpfs", data])

    # A data folder that the driver alone sees.
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, "-m", "clipmill.prep.cli", *map(str, ("chunk", "--data", alone, *arguments))]
    mounted = f"mount -t tmpfs tmpfs {alone} && cp -r {data}/manifest {alone} && exec {shlex.join(command)}"
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    error, hint = ended.stderr.splitlines()[-2:]
    assert ended.returncode == 2 and hint.startswith("hint: each node needs "), ended.stderr
    assert error.startswith("error: no usable workers: node ") and error.count(" on ") == 2
    assert "Traceback" not in ended.stderr and list(alone.iterdir()) == []

    copy = other_source(tmp_path / "copy")
    # Ray lets workers see the modules that the driver sees, where they are.
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


def test_ray_that_is_told_to_stop_says_one_line_and_leaves_no_process(
    mark: str, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    for name, seconds in {"a": 1, "b": 10}.items():
        write_video(tmp_path / "videos" / f"{name}.mp4", seconds=seconds)
    manifest(tmp_path / "data", tmp_path / "videos")
    run = start("chunk", "--data", tmp_path / "data", "--workers", 1, *SETTINGS)
    wait_until(lambda: list((tmp_path / "data").glob("video/*/commits/*.json")) or run.poll() is not None)
    run.send_signal(signal.SIGTERM)
    _, stderr = run.communicate(timeout=120)
    lines = messages(stderr)
    assert run.returncode == 143 and len(lines) == 1, stderr
    assert lines[0].startswith("stopped: finished work is kept")
    wait_until(lambda: not list(processes(mark)))
    assert list((tmp_path / "data").glob("video/*/commits/*.json"))
