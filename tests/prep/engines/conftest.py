"""Cluster that the tests of all files share.

It accepts work only with a token, as the documentation recommends.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.engines.ray import import_ray
from tests.conftest import ROOT
from tests.prep.running import MARK, processes

# Ray reads these variables once per process, when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# Head without the services that only a user would look at; each of them is a process.
HEAD = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
_open, _heads = ExitStack(), list[Any]()  # the shared cluster, after the first test that uses it


@contextmanager
def mark_processes() -> Iterator[str]:
    """Set a mark in the environment of the cluster's processes, and let them detect a dead node quickly."""
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            MARK: mark,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_initial_delay_ms": "500",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "8",  # a busy machine must not lose nodes
        }.items():
            patch.setenv(name, value)
        yield mark


@contextmanager
def cluster_of(head: dict[str, Any], *, shutdown_at_exit: bool = True) -> Iterator[Any]:
    """Start a cluster with only a head node.

    Only the main thread may request that the cluster stops when the process exits.
    """
    import_ray()
    from ray.cluster_utils import Cluster

    with mark_processes() as mark:
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=shutdown_at_exit)
    yield cluster
    cluster.shutdown()
    for process in processes(mark):
        process.kill()


@pytest.fixture
def mark() -> Iterator[str]:
    """Return the mark of the nodes that a test adds, or of its own Ray instance."""
    with mark_processes() as mark:
        yield mark


@pytest.fixture
def cluster(mark: str) -> Iterator[Any]:
    """Return the shared head with one CPU; nodes that a test adds carry its mark."""
    if not _heads:
        _heads.append(_open.enter_context(cluster_of(HEAD)))
    (head,) = _heads
    yield head
    for node in list(head.worker_nodes):
        head.remove_node(node)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the cluster after the last test of this folder, because its processes keep the CPU busy."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _open.close()
        _heads.clear()
