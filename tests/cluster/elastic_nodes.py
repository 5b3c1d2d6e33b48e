"""Nodes on one machine: network namespaces that are joined by a pair of virtual interfaces. Needs root and iproute2.

    node0  10.77.0.1 ---- veth ---- 10.77.0.2  node1

Each node has its own interfaces, hosts file, host name and mounts; they share the disk, the clock and the processors. A
launch is a torchrun process on a node, with its output in a file.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NUM_NODES = 2
PORT = 29_511
_PREFIX, _LINK = "clipmill-node", "clipmill"
# torchrun sends the address of its store only in the first round; a node that joins later would wait for it forever.
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_PROGRAMS = Path(sys.executable).parent


@dataclass
class Launch:
    """torchrun process on a node, and the file with the output of the process and its ranks."""

    node: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, *, within_s: float = 600) -> int:
        """Return the exit status; if the process does not exit, kill it and fail with its output."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            kill_node(self.node)
            raise AssertionError(
                f"node {self.node} did not end within {within_s:g} s:\n{self.output[-4000:]}"
            ) from None


def name_of(node: int) -> str:
    """Return the name of a node's namespace."""
    return f"{_PREFIX}{node}"


def address_of(node: int) -> str:
    return f"10.77.0.{node + 1}"


@contextmanager
def nodes() -> Iterator[None]:
    """Create the two nodes; at the end, remove them with all of their processes."""
    remove_nodes()
    try:
        for node in range(NUM_NODES):
            _run("ip", "netns", "add", name_of(node))
            folder = Path("/etc/netns") / name_of(node)
            folder.mkdir(parents=True, exist_ok=True)
            lines = [f"{address_of(other)} node{other}" for other in range(NUM_NODES)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _run("ip", "link", "add", f"{_LINK}0", "type", "veth", "peer", "name", f"{_LINK}1")
        for node in range(NUM_NODES):
            link, inside = f"{_LINK}{node}", ("ip", "-n", name_of(node))
            _run("ip", "link", "set", link, "netns", name_of(node))
            _run(*inside, "address", "add", f"{address_of(node)}/24", "dev", link)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", link, "up")
        yield
    finally:
        remove_nodes()


def remove_nodes() -> None:
    """Kill the processes on the nodes and remove the nodes, if they exist."""
    for node in range(NUM_NODES):
        if (Path("/run/netns") / name_of(node)).exists():
            kill_node(node)
            subprocess.run(["ip", "netns", "del", name_of(node)], check=False)
        shutil.rmtree(Path("/etc/netns") / name_of(node), ignore_errors=True)


def launch(
    node: int,
    command: Sequence[object],
    *,
    log: Path,
    nodes: str = "2",
    port: int = PORT,
    max_restarts: int = 3,
    processes: int = 1,
    conf: str = "last_call_timeout=5",
    before: str = "",
    environment: Mapping[str, str] | None = None,
    host: int = 0,
) -> Launch:
    """Start torchrun on a node.

    Args:
        command: Arguments of `train`, without the program.
        nodes: Value of --nnodes.
        before: Shell command in the mount namespace of the launch, such as a bind mount.
        host: Node of the rendezvous.
    """
    words = [
        *(_PROGRAMS / "torchrun", "--nnodes", nodes, "--nproc-per-node", processes, "--max-restarts", max_restarts),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"node{host}:{port}",
            "--rdzv-id",
            "elastic",
            "--rdzv-conf",
            conf,
        ),
        *("--no-python", _PROGRAMS / "train", *command),
    ]
    script = f"hostname node{node}; {before or ':'} && exec {shlex.join(map(str, words))}"
    variables = {**ELASTIC, "OMP_NUM_THREADS": "1", "PATH": f"{_PROGRAMS}{os.pathsep}{os.environ['PATH']}"}
    variables |= environment or {}
    with log.open("ab") as file:
        process = subprocess.Popen(
            ["ip", "netns", "exec", name_of(node), "unshare", "--uts", "--mount", "bash", "-c", script],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )
    return Launch(node, process, log)


def kill_node(node: int) -> None:
    """Kill every process of a node with SIGKILL, including torchrun."""
    listing = subprocess.run(["ip", "netns", "pids", name_of(node)], check=False, capture_output=True, text=True)
    for pid in listing.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def ranks_of(node: int) -> list[int]:
    """Return the process IDs of the ranks on a node."""
    listing = subprocess.run(["ip", "netns", "pids", name_of(node)], check=True, capture_output=True, text=True)
    return [pid for pid in map(int, listing.stdout.split()) if b"RANK" in _environment(pid)]


def set_link(node: int, state: str) -> None:
    """Take a node's network interface down or up; its peers see neither the end of a connection nor a reset."""
    _run("ip", "-n", name_of(node), "link", "set", f"{_LINK}{node}", state)


def lose_node(node: int) -> None:
    """Lose a node as in a power cut: its connections stay open on the other side."""
    set_link(node, "down")
    kill_node(node)


def wait_until(is_so: Callable[[], bool], *, what: str, within_s: float = 400) -> float:
    """Wait and return the seconds that it took.

    Raises:
        AssertionError: The condition did not become true in time.
    """
    began_s = time.monotonic()
    while not is_so():
        if time.monotonic() - began_s > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - began_s


def _environment(pid: int) -> set[bytes]:
    try:
        return {line.partition(b"=")[0] for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    except OSError:
        return set()


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
