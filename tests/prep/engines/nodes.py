"""Nodes of a cluster that see other files than the rest of the machine: mounts that only their processes have."""

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_CLONE_NEWNS = 0x00020000  # of <sched.h>; `os.unshare` comes with Python 3.12


def may_mount() -> bool:
    """Return True if a process may have mounts of its own."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def add_node_with(cluster: Any, mounts: Sequence[Sequence[object]], *, environment: Mapping[str, str]) -> Any:
    """Add a node of one CPU after some mounts that no other process sees."""

    def start() -> Any:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
        for words in (["--make-rprivate", "/"], *mounts):
            subprocess.run(["mount", *map(str, words)], check=True)
        return cluster.add_node(num_cpus=1, env_vars=dict(environment))

    with ThreadPoolExecutor(1) as thread:  # which can have mounts of its own, and hands them on
        return thread.submit(start).result()


def write_failing_program(path: Path, program: Path, *, ending: str, num_good: int) -> Path:
    """Write a program that does what another one does for some calls, and then ends in a way of its own.

    Args:
        ending: line of a shell.
        num_good: number of calls before; those for the version do not count.
    """
    log = path.with_suffix(".log")
    log.touch()
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *-version*) exec {program} "$@";; esac\n'
        f'echo >> {log}\n[ $(wc -l < {log}) -le {num_good} ] && exec {program} "$@"\n{ending}\n'
    )
    path.chmod(0o755)
    return path
