"""Ray nodes of a trial: real `ray start` processes, which are terminated by a mark in their environment."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.prep.running import MARK, processes

BIN = Path(sys.executable).parent
FAKE_NODES = {
    "cluster_name": "trial",
    "provider": {"type": "fake_multinode"},
    "head_node_type": "ray.head.default",
    "max_workers": 8,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.2,
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{
        name: []
        for name in (
            "initialization_commands",
            "setup_commands",
            "head_setup_commands",
            "worker_setup_commands",
            "head_start_ray_commands",
            "worker_start_ray_commands",
            "cluster_synced_files",
            "rsync_exclude",
            "rsync_filter",
        )
    },
}


@dataclass(frozen=True)
class RayCluster:
    """Addresses of a head, and the environment of all its processes."""

    port: int
    dashboard_port: int
    environment: dict[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start_node(self, *options: str, prefix: Sequence[str] = ()) -> None:
        """Run `ray start --address`; `prefix` is a command that runs it, such as `unshare -m`."""
        command = [*prefix, os.fspath(BIN / "ray"), "start", "--address", self.address, *options]
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def run(self, *command: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a program with this Python's environment, and print its output."""
        words = [str(word) for word in command]
        print("$", " ".join(words), flush=True)
        program = [os.fspath(BIN / words[0]), *words[1:]]
        ran = subprocess.run(program, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(ran.stdout, f"exit status {ran.returncode}\n", flush=True)
        assert not check or ran.returncode == 0
        return ran


@contextmanager
def started_head(*options: str, autoscaling: dict[str, Any] | None = None) -> Iterator[RayCluster]:
    """Start a head with a dashboard; stop it and all its nodes at the end of the block.

    Args:
        autoscaling: Node types of Ray's fake multi-node provider, whose nodes are processes on this machine.
    """
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        MARK: mark,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    # The nodes of the fake provider expect their head on Ray's default port.
    cluster = RayCluster(free_port() if autoscaling is None else 6379, free_port(), environment)
    arguments = ["--head", "--port", str(cluster.port), "--dashboard-port", str(cluster.dashboard_port), *options]
    if autoscaling is not None:
        head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
        config = {**FAKE_NODES, "available_node_types": {**autoscaling, "ray.head.default": head}}
        path = Path(os.environ.get("TMPDIR", "/tmp")) / f"autoscaling-{mark}.json"
        path.write_text(json.dumps(config))
        arguments += ["--autoscaling-config", os.fspath(path)]
        environment |= {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
        }
    try:
        subprocess.run([BIN / "ray", "start", *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)
        yield cluster
    finally:
        for process in processes(mark):
            process.kill()


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def made_manifest(folder: Path, *, num_videos: int = 6, minutes: float = 1.0) -> Path:
    """Create a data folder with a manifest of synthetic videos."""
    data = folder / "data"
    command = [
        "-m",
        "clipmill.prep.cli",
        "manifest",
        "synthetic",
        "--videos",
        str(num_videos),
        "--minutes",
        str(minutes),
    ]
    subprocess.run([sys.executable, *command, "--data", os.fspath(data)], cwd=ROOT, check=True)
    return data


def where(number: int) -> tuple[int, str | None, str]:
    """Return the number, the GPUs of the worker, and its node."""
    import ray

    time.sleep(2)
    return number, os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_runtime_context().get_node_id()[-8:]
