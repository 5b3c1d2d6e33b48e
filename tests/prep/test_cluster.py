"""A cluster of two nodes, one of which dies while it works."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.prep.running import MARK, Ran, chunk, contents, manifest, processes, start, wait_until

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
