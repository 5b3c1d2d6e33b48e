"""The Ray engine. No other file imports Ray.

Workers are Ray actors, which take one task after another. The number of tasks in flight is bounded, and only a few
kilobytes are sent and returned per task. Without an address, the command starts a Ray instance on this machine, and
stops it at the end. With an address, the command joins a cluster, whose nodes need the same clipmill, the same ffmpeg,
and the data folder at the same path. Every worker is checked before its first task. The code of the check is sent with
it. The function and the task are not unpickled until the worker has passed the check. A node that fails the check is
excluded.

When Ray loses the cluster, it terminates the process in which it runs. The engine therefore runs in a separate process
(`IsolatedEngine`): the command survives and reports the loss, and Ray cannot print to the command's output.

Anyone who can send work to a Ray instance can run code as its user. A private instance therefore listens only on the
loopback interface, accepts work only with a token created for it, and keeps its sockets in a folder that is accessible
only to its user.

A raylet starts agents (for the dashboard and for runtime environments). When the raylet ends, its agents try for a
minute to report this to the head of the instance, although the head has ended too. Ray never removes the folder of an
instance. Therefore a small process, the sweeper, waits until the process that uses Ray has ended for any reason, kills
the agents, and removes the folder.
"""

import logging
import multiprocessing
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, chdir, redirect_stdout, suppress
from math import ceil
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from clipmill.manifests.errors import ClipmillError, FailedWork, UserError, first_line
from clipmill.manifests.progress import Activity
from clipmill.prep.engines import (
    TICK_S,
    Check,
    Engine,
    Outcome,
    R,
    RefusedNode,
    T,
    die_with_driver,
    exit_reason,
)
from clipmill.prep.engines.execution import Execution, Need
from clipmill.prep.engines.ray_actors import ActorRun, Nodes, Notify

_GROWTH = 2  # ratio of requested to current capacity if the autoscaler does not report its limit
_LAST_CHECKS_LIMIT_S = 10.0  # time limit at the end of a run for the checks of workers that are still starting


class RayEngine:
    """Engine that runs tasks in Ray actors. An actor keeps everything that the function has loaded, such as a model.

    Args:
        num_workers: Maximum number of workers; None for as many workers as fit.
        address: Address of an existing cluster (`auto`, or host:port); None to start a private instance.
        need: Resources of a worker.
        execution: Settings of the engine.
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
    ) -> Iterator[Outcome[T, R] | RefusedNode | None]:
        """See `clipmill.prep.engines.Engine`.

        Args:
            notify: Function that shows a message to the user, for example while the engine waits for nodes.
        """
        if self._address is None:
            # Ray reads the settings of a private instance when it is imported.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            # Even on Linux, only this variable makes all Ray processes listen on the loopback interface.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        ray = import_ray()
        default_name = getattr(function, "__name__", "task")
        named_tasks = ((task, name(task) if name is not None else default_name) for task in tasks)
        instance_name = name_of_cluster(self._address)
        # Standard output is reserved for results, but Ray reports lost workers on it, even during its shutdown.
        with redirect_stdout(sys.stderr):
            # With GPUs, the number of GPUs limits the number of actors, so the CPUs are not limited.
            num_cpus = None if self._need.gpus or not self._num_workers else ceil(self._num_workers * self._need.cpus)
            wait_s = self._execution.wait_for_nodes if self._address is not None else 0.0
            try:
                connect(ray, self._address, num_cpus=num_cpus)
                nodes = Nodes(ray, self._need, instance_name=instance_name, wait_s=wait_s, notify=notify)
                nodes.require_node(forces_check=True)
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
                    yield from run.check_late_workers(limit_s=_LAST_CHECKS_LIMIT_S)
            except (ray.exceptions.RayError, ConnectionError) as error:
                raise FailedWork(
                    f"{instance_name} was lost: {first_line(error)}; finished work is kept; run the same command "
                    "again to resume"
                ) from None
            finally:
                ray.shutdown()

    def _num_actors(self, nodes: Nodes) -> int:
        """Return the number of actors to request. If some actors do not fit, an autoscaler may start nodes for them."""
        room, largest_room = nodes.capacities()
        if self._address is None:
            return max(1, min(room, self._num_workers or room))
        return self._num_workers or max(1, room, largest_room or _GROWTH * room)


def isolated_ray_engine(*, num_workers: int | None, address: str | None, need: Need, execution: Execution) -> Engine:
    """Return a `RayEngine` that runs in a separate process."""
    engine = RayEngine(num_workers=num_workers, address=address, need=need, execution=execution)
    # On a cluster, `--wait-for-nodes` already limits the time until the first task.
    limit_s = START_LIMIT_S if address is None else None
    return IsolatedEngine(
        engine, name=name_of_cluster(address), start_note=describe_start(address), start_limit_s=limit_s
    )


def count_cluster_gpus(address: str) -> float:
    """Return the number of GPUs in a cluster, or the number that its autoscaler may provide, whichever is larger.

    Raises:
        UserError: No cluster is running at the address.
    """
    with Activity(describe_start(address)):
        num_gpus: float = call_isolated(_count_gpus, address, name=name_of_cluster(address))
    return num_gpus


def _count_gpus(address: str) -> float:
    ray = import_ray()
    connect(ray, address)
    try:
        largest_cluster = ray._private.state.state.get_max_resources_from_cluster_config() or {}
        return max(ray.cluster_resources().get("GPU", 0.0), largest_cluster.get("GPU", 0.0))
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Import Ray, after setting the environment variables that it reads on import.

    Raises:
        UserError: Ray is not installed.
    """
    # Disable usage statistics and accelerator warnings.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Time in seconds after which the head is considered lost; Ray's default is 60.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    # If a worker does not respond, wait until it is known whether only the worker or its node was lost. The head
    # detects the loss of a node after 15 s; Ray's default for this wait is one second.
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "60000")
    try:
        import ray
        import ray.exceptions
        import ray.experimental.internal_kv
    except ImportError:
        raise UserError("Ray is not installed", hint="install clipmill[prep], or use --engine processes") from None
    return ray


START_LIMIT_S = 60.0  # time limit for Ray to start on this machine; on an idle machine, the start takes 5 s
_CONNECTION_LIMIT_S = 10.0
_START_HINT = "start a cluster with `ray start --head`, or use --engine processes to run only on this machine"
_TOKEN_HINT = "set RAY_AUTH_MODE=token, and use the same RAY_AUTH_TOKEN or ~/.ray/auth_token as the cluster's nodes"
_VERSION_HINT = "install the same versions of Python and Ray on this machine and on every node"


def name_of_cluster(address: str | None) -> str:
    """Return the name of a Ray instance, for use in messages."""
    return "Ray on this machine" if address is None else f'the Ray cluster at "{address}"'


def describe_start(address: str | None) -> str:
    """Return the text to show until Ray takes the first task."""
    name = name_of_cluster(address)
    return f"starting {name} (takes up to {START_LIMIT_S:g} s)" if address is None else f"connecting to {name}"


def connect(ray: Any, address: str | None, *, num_cpus: int | None = None) -> None:
    """Start a private instance with `num_cpus` CPUs, or connect to the cluster at `address`.

    Raises:
        UserError: Ray cannot start on this machine; nothing responds at the address; or the cluster has a different
            version or token.
        FailedWork: Ray did not start, for example because one of its processes was killed.
    """
    if address is None:
        try:
            parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            folder = Path(tempfile.mkdtemp(prefix="ray", dir=parent))
            start_sweeper(folder)
            # Ray makes its folder accessible to all users, so let it use a subfolder.
            _init(ray, address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=os.fspath(folder / "r"))
        except Exception as error:  # noqa: BLE001 - Ray also raises plain exceptions
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise UserError(  # for example, socket paths are limited to 107 bytes
                    f"Ray cannot start on this machine: {error}",
                    hint="set RAY_TMPDIR to a writable folder with a short path, or use --engine processes",
                ) from None
            raise FailedWork(  # for example, one of its processes was killed
                f"Ray did not start on this machine: {first_line(error).rstrip('.')}; run the same command again, "
                "or use --engine processes"
            ) from None
        send_agents(ray)
        return
    try:
        # Test the connection first: Ray retries for minutes if the cluster does not respond or refuses the token.
        server = address
        if address == "auto":  # the cluster that was started last on this machine; it may have ended
            server = ray._private.services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = server.rpartition(":")
        if host and port.isdigit() and "://" not in server:
            try:
                socket.create_connection((host, int(port)), timeout=_CONNECTION_LIMIT_S).close()
            except OSError as error:
                raise OSError(f"nothing responds at {server} ({error.strerror or error})") from None
            ray._raylet.GcsClient(address=server)
        _init(ray, address=address)
    except ray.exceptions.AuthenticationError:
        raise UserError(f'the Ray cluster at "{address}" requires a different token', hint=_TOKEN_HINT) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason, is_mismatch = first_line(error), "Version mismatch" in str(error)
        versions = re.findall(r"(Ray|Python): (\S+)", str(error))
        if is_mismatch and len(versions) == 4:
            cluster_versions, command_versions = (
                " and ".join(" ".join(pair) for pair in versions[begin : begin + 2]) for begin in (0, 2)
            )
            reason = f"the cluster runs {cluster_versions}, but this command runs {command_versions}"
        raise UserError(
            f'cannot connect to a Ray cluster at "{address}": {reason}',
            hint=_VERSION_HINT if is_mismatch else _START_HINT,
        ) from None


def _init(ray: Any, **options: Any) -> None:
    """Call `ray.init` from a folder without Python files.

    Workers import from the caller's folder first, so they would run a file such as `numpy.py` in it.
    """
    with chdir(sys.prefix):
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


_SWEEPER = """
import os, shutil, signal, sys, time
for process in sys.stdin.read().split():  # read until the other end of the pipe is closed
    pid, began = process.split(":")
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == began:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
for _ in range(100):  # processes of the instance that are still shutting down write their logs to the folder
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
_sweepers: "list[subprocess.Popen[str]]" = []  # their pipes stay open until this process ends


def start_sweeper(folder: Path) -> None:
    """Start a process that kills the agents from `send_agents` and removes `folder` once the caller has ended."""
    null = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _SWEEPER, os.fspath(folder)]
    sweeper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, text=True
    )
    _sweepers.append(sweeper)


def send_agents(ray: Any) -> None:
    """Send the PIDs and start times of the agents, which are children of the raylet, to the newest sweeper."""
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    pipe = _sweepers[-1].stdin
    assert pipe is not None
    processes = running_processes()
    pipe.write(" ".join(f"{pid}:{start_ticks}" for pid, parent, start_ticks in processes if parent == raylet))
    pipe.flush()


def running_processes() -> "list[tuple[int, int, str]]":
    """Return (PID, PID of the parent, start time in ticks) of all processes."""
    processes = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # the folder does not describe a process, or the process has ended
            pid = int(folder.name)
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            processes.append((pid, int(fields[1]), fields[19]))
    return processes


_CONTEXT = multiprocessing.get_context("spawn")
_STOP_LIMIT_S = 15.0  # time limit for the engine to stop the processes that it started


class NotifyingEngine(Protocol):
    """An engine that reports messages for the user."""

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
        notify: Callable[[str], None] = ...,
    ) -> Iterator[Outcome[T, R] | RefusedNode | None]:
        """See `clipmill.prep.engines.Engine`."""
        ...


class IsolatedEngine:
    """Engine that runs another engine in a separate process, and prints its messages.

    Args:
        engine: Engine to run. It must be picklable.
        name: Name of the program that runs in the process, used in the message if the process ends unexpectedly.
        start_note: Text to show until the engine takes the first task; None to show nothing.
        start_limit_s: Time limit in seconds for the engine to take the first task; None for no limit.
    """

    def __init__(
        self,
        engine: NotifyingEngine,
        *,
        name: str,
        start_note: str | None = None,
        start_limit_s: float | None = None,
    ) -> None:
        self._engine, self._name, self._start_note = engine, name, start_note
        self._start_limit_s = start_limit_s

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
    ) -> Iterator[Outcome[T, R] | RefusedNode | None]:
        """See `clipmill.prep.engines.Engine`."""
        numbered_tasks = enumerate(tasks)
        sent_tasks = dict[int, T]()
        activity = ExitStack()
        if self._start_note is not None:
            activity.enter_context(Activity(self._start_note))
        process, command_pipe = _start_process(_serve, self._engine, function, check, name is not None)
        deadline_s = None if self._start_limit_s is None else time.monotonic() + self._start_limit_s
        try:
            while True:
                if not command_pipe.poll(TICK_S):
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        process.kill()  # the process may be waiting for Ray instead of reading the pipe
                        raise _start_failure(self._name, f"within {self._start_limit_s:g} s")
                    yield None
                    continue
                kind, value = _receive(command_pipe, process, name=self._name, is_starting=deadline_s is not None)
                if kind == "next":
                    activity.close()
                    deadline_s = None
                    item = next(numbered_tasks, None)
                    if item is not None:
                        sent_tasks[item[0]] = item[1]
                    command_pipe.send(item and (*item, name(item[1]) if name is not None else None))
                elif kind == "outcome":
                    number, *result_values = value
                    yield Outcome(sent_tasks.pop(number), *result_values)
                elif kind == "refused":
                    yield value
                elif kind == "notice":
                    sys.stderr.write(f"{value}\n")
                elif kind == "error":
                    raise value
                elif kind == "end":
                    return
        finally:
            activity.close()
            command_pipe.close()  # the other process detects this, and stops its workers
            _end(process)


def call_isolated(function: Callable[..., Any], *arguments: object, name: str) -> Any:
    """Call `function(*arguments)` in a separate process, and return its result.

    Args:
        name: Name of the program that runs in the process, used in the message if the process ends unexpectedly.

    Raises:
        FailedWork: The process ended without a result.
        Exception: The function raised this exception.
    """
    process, command_pipe = _start_process(_serve_call, function, arguments)
    try:
        kind, value = _receive(command_pipe, process, name=name)
    finally:
        command_pipe.close()
        _end(process)
    if kind == "error":
        raise value
    return value


def _start_process(target: Callable[..., None], *arguments: object) -> tuple[SpawnProcess, Connection]:
    """Start `target(*arguments, pipe)` in a new process; return the process and this process's end of the pipe."""
    command_pipe, process_pipe = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=target, args=(*arguments, process_pipe))
    process.start()
    process_pipe.close()  # so that the pipe is closed when the other process ends
    return process, command_pipe


def _end(process: SpawnProcess) -> None:
    process.join(_STOP_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()


def _start_failure(name: str, reason: str) -> FailedWork:
    return FailedWork(f"{name} did not start {reason}; run the same command again, or use --engine processes")


def _receive(pipe: Connection, process: SpawnProcess, *, name: str, is_starting: bool = False) -> tuple[str, Any]:
    """Return the kind and the value of the next message from the process.

    Raises:
        FailedWork: The process has ended.
    """
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        if is_starting:
            raise _start_failure(name, f"({exit_reason(process.exitcode)})") from None
        raise FailedWork(
            f"{name} was lost ({exit_reason(process.exitcode)}); finished work is kept; "
            "run the same command again to resume"
        ) from None
    return kind, value


class _Disconnected(Exception):
    """The command has exited, or stopped reading results."""


def _serve(
    engine: NotifyingEngine, function: Callable[[Any], Any], check: Check | None, is_named: bool, pipe: Connection
) -> None:
    _detach()
    with suppress(_Disconnected):
        try:
            for outcome in engine.run(
                _TaskFunction(function),
                _tasks(pipe),
                check=check,
                name=(lambda task: task[2]) if is_named else None,
                notify=lambda line: _send(pipe, "notice", line),
            ):
                if isinstance(outcome, Outcome):
                    _send(pipe, "outcome", (outcome.task[0], outcome.result, outcome.lost, outcome.crashed))
                elif outcome is not None:
                    _send(pipe, "refused", outcome)
                elif pipe.poll():  # the command sends data only on request, so it has closed the pipe
                    raise _Disconnected
            _send(pipe, "end", None)
        except _Disconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the command raises it
            _send_error(pipe, error)


def _serve_call(function: Callable[..., Any], arguments: tuple[object, ...], pipe: Connection) -> None:
    _detach()
    with suppress(_Disconnected):
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001 - the command raises it
            _send_error(pipe, error)
        else:
            _send(pipe, "result", result)


def _detach() -> None:
    die_with_driver()
    # Ctrl-C reaches all processes of the group, but the command decides what happens to this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null_device, stream)


class _TaskFunction:
    """Wrapper that applies a function to the task in a tuple (number, task, name)."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", "task")

    def __call__(self, task: tuple[int, Any, str]) -> Any:
        return self._function(task[1])


def _tasks(pipe: Connection) -> Iterator[tuple[int, Any, str]]:
    """Yield (number, task, name) of the command's tasks. Each task is requested from the command when it is needed."""
    while True:
        _send(pipe, "next", None)
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            raise _Disconnected from None
        if item is None:
            return
        yield item


def _send_error(pipe: Connection, error: Exception) -> None:
    if not isinstance(error, ClipmillError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        _send(pipe, "error", error)
    except (AttributeError, TypeError, ValueError):  # the error cannot be pickled
        _send(pipe, "error", RuntimeError("".join(traceback.format_exception(error))))


def _send(pipe: Connection, kind: str, value: Any) -> None:
    try:
        pipe.send((kind, value))
    except OSError:
        raise _Disconnected from None
