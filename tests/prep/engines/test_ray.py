"""Tests of the Ray engine on a cluster: requested resources, names, waiting, retries, versions.

The tests share a head with one CPU, to which they add nodes.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.prep.engines import Outcome, RefusedNode, worker_threads
from clipmill.prep.engines.admission import worker_ticket
from clipmill.prep.engines.choice import cluster_address
from clipmill.prep.engines.execution import Execution, Need, worker_need
from clipmill.prep.engines.ray import RayEngine, connect, count_cluster_gpus, import_ray, running_processes
from clipmill.prep.engines.ray_actors import Nodes
from clipmill.prep.sources.table import probe_sources, read_probes
from tests.prep.engines.conftest import cluster_of
from tests.prep.engines.test_engines import check_workers
from tests.prep.running import manifest, running, start, wait_until
from tests.prep.sources.test_readers import leasable, lease, waits_for_lease

__all__ = ["leasable"]


@pytest.fixture(scope="module")
def listing() -> Iterator[Any]:
    """Start a cluster whose dashboard lists its tasks and workers."""
    with socket.socket() as listener:  # the default port may be in use
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with cluster_of({"num_cpus": 1, "include_dashboard": True, "dashboard_port": port}) as cluster:
        yield cluster


@dataclass(frozen=True)
class Task:
    """Task that misbehaves in its first attempt if it is `slow` or `deadly`."""

    number: int
    folder: Path
    slow: bool = False
    deadly: bool = False


@dataclass(frozen=True)
class Place:
    """Process and resources with which a task ran."""

    pid: int
    node: str
    gpus: str | None
    threads: int


def work(task: Task) -> Place:
    import ray

    begun = task.folder / f"begun-{task.number}"
    is_first = not begun.exists()
    begun.touch()
    context = ray.get_runtime_context()
    if task.slow and is_first:
        (task.folder / "slow").write_text(f"{os.getpid()} {context.get_node_id()}")
        time.sleep(600)
    if task.deadly and is_first:
        (task.folder / "deadly").write_text(context.get_node_id())
        time.sleep(1 if task.slow else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return Place(os.getpid(), context.get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES"), worker_threads())


def name(task: Task) -> str:
    return f"numbered {task.number:06d}"


def run(engine: RayEngine, tasks: list[Task], *, notices: list[str] | None = None) -> dict[int, Outcome[Task, Place]]:
    told = notices if notices is not None else []
    outcomes = [
        outcome for outcome in engine.run(work, tasks, name=name, notify=told.append) if isinstance(outcome, Outcome)
    ]
    assert sorted(outcome.task.number for outcome in outcomes) == [task.number for task in tasks]
    return {outcome.task.number: outcome for outcome in outcomes}


@pytest.mark.nightly
def test_tasks_are_listed_by_their_names(listing: Any, tmp_path: Path) -> None:
    from ray.util.state import list_tasks

    run(RayEngine(num_workers=None, address=listing.address), [Task(number, tmp_path) for number in range(3)])
    names = {f"numbered {number:06d}" for number in range(3)}
    address, listed = f"http://{listing.head_node.webui_url}", set[str]()

    def are_listed() -> bool:
        listed.update(task.name for task in list_tasks(address=address, limit=1000))
        return names <= listed

    wait_until(are_listed)
    assert {task_name for task_name in listed if task_name.startswith("numbered ")} >= names


@pytest.mark.nightly
def test_workers_that_wait_for_room_tell_an_autoscaler_what_is_missing(listing: Any, tmp_path: Path) -> None:
    from ray.util.state import list_actors

    address, pending = f"http://{listing.head_node.webui_url}", list[Any]()
    engine = RayEngine(num_workers=None, address=listing.address)
    running: Any = engine.run(work, [Task(number, tmp_path, slow=True) for number in range(3)])
    for _ in islice(running, 60):
        pending = list_actors(address=address, filters=[("state", "=", "PENDING_CREATION")])
        if pending and (tmp_path / "slow").exists():
            break
    running.close()
    assert len(pending) == 1  # the worker for which a second CPU would be free


@pytest.mark.nightly
def test_gpus_that_are_still_to_come_are_awaited_and_shared(cluster: Any, tmp_path: Path) -> None:
    assert count_cluster_gpus(cluster.address) == 0
    need = Need(0, 0.5, 0)
    hasty = RayEngine(num_workers=None, address=cluster.address, need=need, execution=Execution(wait_for_nodes=0))
    with pytest.raises(UserError, match=r"1 node with 1 CPU and 0 GPUs.* but a worker requires 0\.5 GPU"):
        run(hasty, [Task(0, tmp_path)])

    patient = RayEngine(num_workers=None, address=cluster.address, need=need)
    notices, outcomes, node = list[str](), list[Any](), None
    for outcome in patient.run(work, [Task(number, tmp_path) for number in range(8)], notify=notices.append):
        outcomes += [outcome.result] if isinstance(outcome, Outcome) else []
        if node is None:
            assert notices[0].startswith("waiting up to 600 s for a node with 0.5 GPU")
            node = cluster.add_node(num_cpus=8, num_gpus=1)
    assert len(outcomes) == 8
    assert {(place.gpus, place.threads) for place in outcomes} == {("0", 4)}
    assert len({place.pid for place in outcomes}) <= 2  # two workers with half a GPU each
    assert count_cluster_gpus(cluster.address) == 1
    cluster.remove_node(node)


def test_a_worker_without_the_package_of_a_column_is_refused(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden" / "hidden_column").mkdir(parents=True)
    (tmp_path / "hidden" / "hidden_column" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "hidden")
    engine = RayEngine(num_workers=1, address=cluster.address)
    with worker_ticket(tmp_path, package="hidden_column") as ticket:
        assert ticket() is None
        with pytest.raises(UserError, match="the column's package hidden_column is not installed"):
            list(engine.run(work, [Task(0, tmp_path)], check=ticket))


def test_workers_keep_what_they_loaded_and_outlive_each_other(cluster: Any, tmp_path: Path) -> None:
    check_workers(RayEngine(num_workers=2, address=cluster.address, need=Need(0.5, 0, 0)), tmp_path)


def test_a_worker_that_keeps_dying_is_not_tried_for_ever(cluster: Any, tmp_path: Path) -> None:
    engine = RayEngine(num_workers=2, address=cluster.address, execution=Execution(task_retries=0))
    outcomes = run(engine, [Task(number, tmp_path, deadly=number == 1) for number in range(3)])
    assert {number for number, outcome in outcomes.items() if outcome.lost} == {1}
    assert "died" in str(outcomes[1].lost)


def die_on_a_bad_node(task: Task) -> int:
    import ray

    if ray.get_runtime_context().get_node_id() == (task.folder / "bad-node").read_text():
        (task.folder / f"died-{task.number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: len(list(task.folder.glob("died-*"))) >= 2, seconds=240)  # the bad node gets tasks
    return task.number


@pytest.mark.nightly
def test_a_node_whose_workers_die_gets_no_further_tasks(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    (tmp_path / "bad-node").write_text(node.node_id)
    # With one more attempt, a task that died on the bad node twice would be lost.
    engine = RayEngine(num_workers=2, address=cluster.address, execution=Execution(task_retries=1))
    events = list(engine.run(die_on_a_bad_node, [Task(number, tmp_path) for number in range(6)]))
    numbers = [event.result for event in events if isinstance(event, Outcome) and event.result is not None]
    assert sorted(numbers) == list(range(6))
    (refused,) = (event for event in events if isinstance(event, RefusedNode))
    assert refused.node.startswith(f"node {node.node_id[:8]}") and "its worker died" in refused.reason
    cluster.remove_node(node)


@pytest.mark.nightly
def test_a_task_is_not_to_blame_for_the_loss_of_its_node(cluster: Any, tmp_path: Path) -> None:
    node, is_lost = cluster.add_node(num_cpus=2), False
    engine = RayEngine(
        num_workers=1,
        address=cluster.address,
        need=Need(2, 0, 0),  # more CPUs than the head has
        execution=Execution(task_retries=0),
    )
    results, notices = list[Any](), list[str]()
    for outcome in engine.run(work, [Task(0, tmp_path, slow=True)], name=name, notify=notices.append):
        if isinstance(outcome, Outcome):
            results.append(outcome.result)
        elif not is_lost and (tmp_path / "slow").exists():
            cluster.remove_node(node, allow_graceful=False)
            is_lost = True
        elif notices and not cluster.worker_nodes:  # the engine notices the loss some seconds later
            cluster.add_node(num_cpus=2)
    assert len(results) == 1 and results[0] is not None
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)


@pytest.mark.nightly
def test_all_nodes_probe_the_sources_of_a_run(cluster: Any, leasable: Path, write_video: Callable[..., Path]) -> None:
    """A lease on the only file delays all probes, so that the waiting processes show where they run."""
    videos, data = leasable / "videos", leasable / "data"
    video = write_video(videos / "0.mp4", seconds=1)
    for number in range(1, 130):
        (videos / f"{number}.mp4").hardlink_to(video)
    manifest(data, videos)
    node = cluster.add_node(num_cpus=1)
    with lease(video):
        run = start("chunk", "--data", data, "--len", "1s", RAY_ADDRESS=cluster.address)
        wait_until(lambda: len(nodes_of_probes(run.pid)) == 2, seconds=180)
    wait_until((data / "probes.parquet").exists, seconds=180)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=120)
    cluster.remove_node(node)
    probes = read_probes(data)
    (leasable / "here").mkdir()
    assert len(probes) == 130 and probe_sources(leasable / "here", probes["path"], num_workers=2).equals(probes)


def nodes_of_probes(driver: int) -> set[int]:
    """Return the raylets whose descendants wait for a source; an empty set if the driver itself waits for one."""
    parents = {pid: parent for pid, parent, _ in running_processes()}
    raylets = {pid for pid in parents if (ray := running(pid)) and Path(ray.arguments[0]).name == "raylet"}
    node_ids = set()
    for reader in filter(waits_for_lease, parents):
        line = [reader]
        while line[-1] in parents:
            line.append(parents[line[-1]])
        if driver in line:
            return set()
        node_ids |= raylets.intersection(line[:4])
    return node_ids


def test_a_cluster_of_another_version_is_refused(cluster: Any) -> None:
    ray = import_ray()
    kv, key, namespace = ray.experimental.internal_kv, b"CLUSTER_METADATA", b"cluster"
    connect(ray, cluster.address)
    known = kv._internal_kv_get(key, namespace=namespace)
    kv._internal_kv_put(key, known.replace(ray.__version__.encode(), b"1.13.0"), True, namespace=namespace)
    ray.shutdown()
    try:
        with pytest.raises(
            UserError, match=r"the cluster runs Ray 1\.13\.0 and Python 3\..*, but this command runs Ray "
        ) as raised:
            connect(ray, cluster.address)
    finally:
        ray.shutdown()
        client = ray._raylet.GcsClient(address=cluster.address)
        client.internal_kv_put(key, known, True, namespace)
    assert "the same versions of Python and Ray on this machine" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("max_count", "num_gpus", "room"), [(3, 6, 12), pytest.param(-1, sys.maxsize, 1000, marks=pytest.mark.nightly)]
)
def test_gpus_that_an_autoscaler_may_start_count(cluster: Any, max_count: int, num_gpus: int, room: int) -> None:
    ray = import_ray()
    config: Any = importlib.import_module("ray.core.generated.autoscaler_pb2").ClusterConfig()
    config.node_group_configs.add(resources={"CPU": 4, "GPU": 2}, max_count=max_count)
    key, namespace = (
        name.encode()
        for name in (ray._raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, ray._raylet.GCS_AUTOSCALER_STATE_NAMESPACE)
    )
    client = ray._raylet.GcsClient(address=cluster.address)
    client.internal_kv_put(key, config.SerializeToString(), True, namespace)
    try:
        assert count_cluster_gpus(cluster.address) == num_gpus
        connect(ray, cluster.address)
        nodes = Nodes(ray, Need(0, 0.5, 10**9), instance_name="", wait_s=0, notify=print)
        assert nodes.capacities() == (0, room)
    finally:
        ray.shutdown()
        client.internal_kv_del(key, False, namespace)


def test_what_a_worker_takes() -> None:
    default = worker_need(Execution(), gpus=0, default_memory_gb=1.5)
    assert default == Need(1, 0, 1_500_000_000) and str(default) == "1 CPU and 1.5 GB of memory"
    assert worker_need(Execution(), gpus=0.5, default_memory_gb=0) == Need(0, 0.5, 0)
    asked = worker_need(Execution(task_cpus=4, task_memory=0), gpus=1, default_memory_gb=1.5)
    assert asked == Need(4, 1, 0) and asked.room({"CPU": 15, "GPU": 4, "memory": 1.0}) == 3
    assert asked.fits({"CPU": 4, "GPU": 1}) and not asked.fits({"CPU": 8})


def test_a_run_works_on_the_cluster_of_its_environment_or_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_address(None) is None and cluster_address("local") is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cluster_address(None) == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address(None) == "10.0.0.1:6379" and cluster_address("auto") == "auto"


def test_a_private_ray_is_given_a_token_and_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_cluster.py tests Ray's behaviour with these settings every night."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "of the user")

    def refuse() -> None:
        raise FailedWork("it is not to start")

    monkeypatch.setattr("clipmill.prep.engines.ray.import_ray", refuse)
    with pytest.raises(FailedWork, match="it is not to start"):
        list(RayEngine(num_workers=1, address=None).run(abs, [1]))
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(bytes.fromhex(os.environ["RAY_AUTH_TOKEN"])) == 32
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
