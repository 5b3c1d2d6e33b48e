"""Clusters of nodes that die while they work, or must not work at all."""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.prep.running import MARK, Ran, chunk, contents, manifest, messages, prep, processes, start, wait_until

SETTINGS = ("--len", "500ms", "--preset", "veryslow")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of the cluster's processes, which are to see a dead node soon."""
    mark = secrets.token_hex(8)
    for name, value in {
        MARK: mark,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
    }.items():
        monkeypatch.setenv(name, value)
    return mark


@pytest.fixture
def cluster(mark: str) -> Iterator[Any]:
    """A head with one CPU."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def test_a_run_outlives_one_of_two_nodes(
    cluster: Any, mark: str, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number, name in enumerate("abc"):
        write_video(videos / f"{name}.mp4", seconds=10, first_number=1000 * number)
    manifest(data, videos)
    shutil.copytree(data, tmp_path / "undisturbed")
    chunk(tmp_path / "undisturbed", *SETTINGS)

    before = {process.pid for process in processes(mark)}
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    node = {process.pid for process in processes(mark)} - before
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


Node = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def add_node(cluster: Any, mark: str) -> Iterator[Node]:
    """Starts a node of one CPU after a shell command, of whose mounts nobody else sees anything."""
    nodes = []

    def add(*, first: str) -> "subprocess.Popen[bytes]":
        ray = [os.fspath(Path(sys.executable).with_name("ray")), "start", "--address", cluster.address]
        command = f"{first} && exec {shlex.join([*ray, '--num-cpus', '1', '--block'])}"
        there = num_alive()
        nodes.append(
            subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        # One after another: raylets that start at once may choose the same port.
        wait_until(lambda: num_alive() > there)
        return nodes[-1]

    def num_alive() -> int:
        return sum(node["Alive"] for node in cluster.global_state.node_table())

    yield add
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    for node in nodes:
        node.wait()


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
    cluster: Any, add_node: Node, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    require_private_mounts()
    videos, data = tmp_path / "videos", tmp_path / "data"
    for number in range(8):
        write_video(videos / f"{number}.mp4", seconds=4, first_number=1000 * number)
    manifest(data, videos)
    shutil.copytree(data, tmp_path / "undisturbed")
    chunk(tmp_path / "undisturbed", *SETTINGS)
    add_node(first=shlex.join(["mount", "-t", "tmpfs", "tmpfs", os.fspath(data)]))
    copy = other_source(tmp_path / "copy")
    # Ray lets workers see the modules that the driver sees, where they are.
    add_node(first=shlex.join(["mount", "--bind", os.fspath(copy / "prep"), os.fspath(ROOT / "prep")]))

    packages = [ROOT / package for package in ("manifests", "shards", "prep")]
    add_node(first=" && ".join(shlex.join(["mount", "-t", "tmpfs", "tmpfs", os.fspath(path)]) for path in packages))

    arguments = ("chunk", "--data", data, "--json", "--address", cluster.address, *SETTINGS)
    ran = prep(*arguments)
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

    # A data folder that the driver alone sees.
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, "-m", "prep.cli", *map(str, ("chunk", "--data", alone, *arguments[3:]))]
    mounted = f"mount -t tmpfs tmpfs {alone} && cp -r {data}/manifest {alone} && exec {shlex.join(command)}"
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    error, hint = ended.stderr.splitlines()[-2:]
    assert ended.returncode == 2 and hint.startswith("hint: each node needs "), ended.stderr
    assert error.startswith("error: no usable workers: node ") and error.count(" on ") >= 3
    assert "Traceback" not in ended.stderr and list(alone.iterdir()) == []


def test_a_cluster_that_is_lost_is_one_line(
    mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    address = cluster.address
    try:
        write_video(tmp_path / "videos" / "a.mp4", seconds=60)
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
    for name in "ab":
        write_video(tmp_path / "videos" / f"{name}.mp4", seconds=30)
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
