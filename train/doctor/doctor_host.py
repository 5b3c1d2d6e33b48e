"""The host: processor, cores that this process may use, memory, shared memory, what torch.compile needs.

Only files of /proc and /sys are read. Where one is missing, which containers and sandboxes have in common, the value is
None and nothing is said of it.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from train.run.environment import processor

_CGROUP = Path("/sys/fs/cgroup")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Host:
    """What doctor looks at.

    Attributes:
        num_cores: of the machine.
        allowed_cores: those that this process may run on (its affinity).
        quota_cores: CPU time per time that its cgroup allows, where it sets a limit.
        memory_bytes, free_bytes: of the machine, or of the cgroup where that allows less.
        shm_bytes: size of /dev/shm.
        thread_variables: those of the environment that set a number of threads.
        compiler: path of a C compiler.
    """

    processor: str
    num_cores: int
    allowed_cores: int
    quota_cores: float | None
    memory_bytes: int | None
    free_bytes: int | None
    shm_bytes: int | None
    thread_variables: dict[str, str]
    compiler: str | None


def examine_host() -> Host:
    """Looks at this machine; takes milliseconds."""
    total, free = _memory()
    limit = _limit(_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes")
    if limit is not None and (total is None or limit < total):
        used = _limit(_CGROUP / "memory.current", _CGROUP / "memory/memory.usage_in_bytes") or 0
        total, free = limit, min(limit - used, free if free is not None else limit)
    return Host(
        processor=processor(),
        num_cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0)),
        quota_cores=_quota(),
        memory_bytes=total,
        free_bytes=free,
        shm_bytes=_shared_memory(),
        thread_variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        compiler=next((found for name in _compilers() if (found := shutil.which(name))), None),
    )


def quota_of(text: str) -> float | None:
    """Cores that a line of cpu.max allows ("200000 100000": 2.0); None without a limit."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _quota() -> float | None:
    found = quota_of(_read(_CGROUP / "cpu.max") or "")
    if found is not None:
        return found
    quota = (_read(_CGROUP / "cpu/cpu.cfs_quota_us") or "").strip()  # the first version of cgroups
    period = (_read(_CGROUP / "cpu/cpu.cfs_period_us") or "").strip()
    return quota_of(f"{quota} {period}")


def _limit(*paths: Path) -> int | None:
    for path in paths:
        text = (_read(path) or "").strip()
        if text.isdigit() and int(text) < 2**60:  # the first version says "no limit" by a huge number
            return int(text)
    return None


def _memory() -> tuple[int | None, int | None]:
    fields = {}
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        name, _, value = line.partition(":")
        number = value.split()
        if number and number[0].isdigit():
            fields[name] = int(number[0]) * 1024
    return fields.get("MemTotal"), fields.get("MemAvailable", fields.get("MemFree"))


def _shared_memory() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _compilers() -> list[str]:
    # Where torch.compile looks.
    return [name for name in (os.environ.get("CC"), os.environ.get("CXX"), "cc", "gcc", "clang", "g++") if name]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None
