"""The Ray engine, the only file that imports Ray. Its workers are actors, which take one task after another.

The number of tasks in flight is bounded, and only kilobytes are sent and returned for each. Without an address, the
command starts a Ray instance on this machine and stops it at the end. With an address, it joins a cluster, whose nodes
need the same clipmill, the same ffmpeg and the data folder under the same path. Every worker is checked before its
first task. The check is sent by value; until a worker has passed it, function and task remain unpickled bytes. A
node that fails the check is excluded from then on.

Anyone who can send work to a Ray instance can run code as its user. A private instance therefore listens only on the
loopback interface, accepts work only with a token created for it, and keeps its sockets in a folder of its user.

A raylet starts agents (for the dashboard and for runtime environments). When it ends, they try to report the end to the
head of the instance, which has ended too, and give up only after a minute. Ray never removes the folder of an instance.
Therefore a small process, the sweeper, waits until the process that uses Ray has ended for any reason, then kills the
agents and removes the folder.
"""

import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, redirect_stdout, suppress
from math import ceil
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.manifests.progress import Activity
from clipmill.prep.engines import Check, Engine, Outcome, R, Refused, T
from clipmill.prep.engines.execution import Execution, Need
from clipmill.prep.engines.isolated import IsolatedEngine, call_isolated
from clipmill.prep.engines.ray_actors import ActorRun, Nodes, Notify

_GROWTH = 2  # factor between requested and present capacity if the autoscaler does not report its limit
_LATE_LIMIT_S = 10.0  # time limit at the end for workers that are still starting, whose nodes may be refused


class RayEngine:
    """Engine that runs tasks in Ray actors, which keep everything that the function has loaded.

    Args:
        num_workers: Maximum number of workers; None for as many as fit.
        address: Address of an existing cluster (`auto`, or host:port); None to start a private instance.
        need: Resources of a worker.
    """

    def __init__(
        self,
        *,
        num_workers: int | None,
        address: str | None,
        need: Need = Need(cpus=1, gpus=0, memory_bytes=0),  # noqa: B008 - frozen
        execution: Execution = Execution(),  # noqa: B008 - frozen
    ) -> None:
        self._num_workers, self._address = num_workers, address
        self._need, self._execution = need, execution

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
        notify: Notify = lambda line: None,
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `clipmill.prep.engines.Engine`.

        Args:
            notify: Function that is called with lines for the user, for example while the engine waits for nodes.
        """
        if self._address is None:
            # Ray reads the settings of a private instance when it is imported.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            # This variable is the only way to make all Ray processes listen on the loopback interface, even on Linux.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        ray = import_ray()
        default_name = getattr(function, "__name__", "task")
        named_tasks = ((task, name(task) if name is not None else default_name) for task in tasks)
        where = name_of_cluster(self._address)
        # Ray reports lost workers on standard output, which is reserved for results, even during its shutdown.
        with redirect_stdout(sys.stderr):
            # The number of actors with GPUs is limited by the GPUs, not by the CPUs.
            num_cpus = None if self._need.gpus or not self._num_workers else ceil(self._num_workers * self._need.cpus)
            wait_s = self._execution.wait_for_nodes if self._address is not None else 0.0
            try:
                connect(ray, self._address, num_cpus=num_cpus)
                nodes = Nodes(ray, self._need, where=where, wait_s=wait_s, notify=notify)
                nodes.require_one(at_once=True)
                run = ActorRun(
                    ray,
                    nodes,
                    function,
                    check,
                    task_retries=self._execution.task_retries,
                    num_actors=lambda: self._num_actors(nodes),
                )
                yield from run.outcomes(named_tasks)
                if check is not None and self._address is not None:
                    yield from run.late_refusals(limit_s=_LATE_LIMIT_S)
            except (ray.exceptions.RayError, ConnectionError) as error:
                raise FailedWork(
                    f"{where} is lost: {first_line(error)}; finished work is kept; run the same command again to resume"
                ) from None
            finally:
                ray.shutdown()

    def _num_actors(self, nodes: Nodes) -> int:
        """Return the number of actors to request; actors that do not fit make an autoscaler start nodes."""
        room, largest_room = nodes.capacities()
        if self._address is None:
            return max(1, min(room, self._num_workers or room))
        return self._num_workers or max(1, room, largest_room or _GROWTH * room)


def isolated_ray_engine(*, num_workers: int | None, address: str | None, need: Need, execution: Execution) -> Engine:
    """Return a `RayEngine` in a separate process, since Ray ends its process when it loses the cluster."""
    engine = RayEngine(num_workers=num_workers, address=address, need=need, execution=execution)
    # On a cluster, `--wait-for-nodes` limits the time until the first task.
    limit_s = START_LIMIT_S if address is None else None
    return IsolatedEngine(engine, name=name_of_cluster(address), starting=starting_text(address), start_limit_s=limit_s)


def count_cluster_gpus(address: str) -> float:
    """Return the number of GPUs in a cluster, or the number that its autoscaler may start, if it is larger.

    Raises:
        UserError: No cluster is running at the address.
    """
    with Activity(starting_text(address)):
        num_gpus: float = call_isolated(_count_gpus, address, name=name_of_cluster(address))
    return num_gpus


def _count_gpus(address: str) -> float:
    ray = import_ray()
    connect(ray, address)
    try:
        largest = ray._private.state.state.get_max_resources_from_cluster_config() or {}
        return max(ray.cluster_resources().get("GPU", 0.0), largest.get("GPU", 0.0))
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Import Ray, after setting the environment variables that Ray reads when it is imported.

    Raises:
        UserError: Ray is not installed.
    """
    # Disable usage statistics and accelerator warnings.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Time in seconds after which the head counts as lost; Ray's default is 60.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    # The head detects the loss of a node after 15 s. A call whose worker does not respond waits until it is known
    # whether the worker or the node was lost; Ray's default is one second.
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "60000")
    try:
        import ray
        import ray.exceptions
        import ray.experimental.internal_kv
    except ImportError:
        raise UserError("Ray is not installed", hint="install clipmill[prep], or use --engine processes") from None
    return ray


START_LIMIT_S = 60.0  # time limit for Ray to start on this machine, which takes 5 s if the machine is idle
_ANSWER_LIMIT_S = 10.0
_START_HINT = "start one with `ray start --head`, or give --engine processes to use this machine only"
_TOKEN_HINT = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token as on the nodes of the cluster"
_VERSION_HINT = "install the same Python and the same Ray on every node and where this command runs"


def name_of_cluster(address: str | None) -> str:
    """Return the name of a Ray instance for messages."""
    return "Ray on this machine" if address is None else f'the Ray cluster at "{address}"'


def starting_text(address: str | None) -> str:
    """Return the text that is shown until Ray takes the first task."""
    name = name_of_cluster(address)
    return f"starting {name} (takes up to {START_LIMIT_S:g} s)" if address is None else f"connecting to {name}"


def connect(ray: Any, address: str | None, *, num_cpus: int | None = None) -> None:
    """Start a private instance with `num_cpus` CPUs, or connect to the cluster at `address`.

    Raises:
        UserError: Ray cannot start here, nothing answers at the address, or the cluster has another version or token.
        FailedWork: Ray did not start, for example because one of its processes was killed.
    """
    if address is None:
        try:
            parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            folder = Path(tempfile.mkdtemp(prefix="ray", dir=parent))
            start_sweeper(folder)
            # Ray makes its folder accessible to all users, so it gets a subfolder.
            _init(ray, address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=os.fspath(folder / "r"))
        except Exception as error:  # noqa: BLE001 - Ray also raises plain exceptions
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise UserError(  # for example, socket paths are limited to 107 bytes
                    f"Ray cannot start on this machine: {error}",
                    hint="set RAY_TMPDIR to a writable folder with a short path, or use --engine processes",
                ) from None
            raise FailedWork(  # for example, one of its processes was killed
                f"Ray did not start on this machine: {first_line(error).rstrip('.')}; run the same command again, "
                "or with --engine processes"
            ) from None
        name_agents(ray)
        return
    try:
        # Ray would try for minutes to reach a cluster that does not respond, or that refuses the token.
        server = address
        if address == "auto":  # the last cluster that was started on this machine, which may have ended
            server = ray._private.services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = server.rpartition(":")
        if host and port.isdigit() and "://" not in server:
            try:
                socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()
            except OSError as error:
                raise OSError(f"nothing answers at {server} ({error.strerror or error})") from None
            ray._raylet.GcsClient(address=server)
        _init(ray, address=address)
    except ray.exceptions.AuthenticationError:
        raise UserError(f'the Ray cluster at "{address}" requires another token', hint=_TOKEN_HINT) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason, is_mismatch = first_line(error), "Version mismatch" in str(error)
        versions = re.findall(r"(Ray|Python): (\S+)", str(error))
        if is_mismatch and len(versions) == 4:
            theirs, ours = (" and ".join(" ".join(pair) for pair in versions[begin : begin + 2]) for begin in (0, 2))
            reason = f"it runs {theirs}, but this command runs {ours}"
        raise UserError(
            f'cannot connect to a Ray cluster at "{address}": {reason}',
            hint=_VERSION_HINT if is_mismatch else _START_HINT,
        ) from None


def _init(ray: Any, **options: Any) -> None:
    """Call `ray.init` from a folder without Python files.

    Workers search the caller's folder first when they import, so they would run a `numpy.py` in it.
    """
    with chdir(sys.prefix):
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


_SWEEPER = """
import os, shutil, signal, sys, time
for process in sys.stdin.read().split():  # until the other end of the pipe is closed
    pid, began = process.split(":")
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == began:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
for _ in range(100):  # processes of the instance that are still ending write their logs there
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
_sweepers: "list[subprocess.Popen[str]]" = []  # this process holds their pipes open


def start_sweeper(folder: Path) -> None:
    """Start a process that removes `folder`, and kills the agents from `name_agents`, once this process has ended."""
    null = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _SWEEPER, os.fspath(folder)]
    sweeper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, text=True
    )
    _sweepers.append(sweeper)


def name_agents(ray: Any) -> None:
    """Send the process ids of the children of this process's raylet to the last sweeper."""
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    pipe = _sweepers[-1].stdin
    assert pipe is not None
    pipe.write(" ".join(f"{pid}:{times}" for pid, parent, times in running_processes() if parent == raylet))
    pipe.flush()


def running_processes() -> "list[tuple[int, int, str]]":
    """Return PID, PID of the parent, and start time (in ticks) of all processes."""
    processes = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # the folder is not a process, or the process has ended
            pid = int(folder.name)
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            processes.append((pid, int(fields[1]), fields[19]))
    return processes
