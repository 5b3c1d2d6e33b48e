"""Cluster nodes that see different files than the rest of the machine, through private mounts of their processes."""

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_CLONE_NEWNS = 0x00020000  # from <sched.h>; `os.unshare` requires Python 3.12


def may_mount() -> bool:
    """Return True if a process may create private mounts."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def add_node_with(cluster: Any, mounts: Sequence[Sequence[object]], *, environment: Mapping[str, str]) -> Any:
    """Add a node with one CPU and with mounts that other processes do not see."""

    def start() -> Any:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        for words in (["--make-rprivate", "/"], *mounts):
            subprocess.run(["mount", *map(str, words)], check=True)
        return cluster.add_node(num_cpus=1, env_vars=dict(environment))

    with ThreadPoolExecutor(1) as thread:  # a thread can have private mounts, which its children inherit
        return thread.submit(start).result()


def write_failing_program(path: Path, program: Path, *, ending: str, num_good: int) -> Path:
    """Write a program that forwards some calls to another program, and then ends in a given way.

    Args:
        ending: Shell line that ends the program.
        num_good: Number of forwarded calls; calls for the version do not count.
    """
    log = path.with_suffix(".log")
    log.touch()
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *-version*) exec {program} "$@";; esac\n'
        f'echo >> {log}\n[ $(wc -l < {log}) -le {num_good} ] && exec {program} "$@"\n{ending}\n'
    )
    path.chmod(0o755)
    return path
