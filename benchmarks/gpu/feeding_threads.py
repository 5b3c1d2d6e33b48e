"""The loader with 1 to 16 threads compared with as many processes, and the use of the interpreter lock."""

import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.gpu.feeding_data import require_repeated
from benchmarks.gpu.feeding_server import LoaderServer, Shown
from benchmarks.gpu.parts import Result, Setup, Target

_NUMBERS = (1, 2, 4, 8, 16)
_ENOUGH = 0.9  # minimum fraction of the throughput of as many processes
_FOUR = Shown(num_frames=4, sampling="uniform", size_px=224, batch=64)
_SIXTEEN = Shown(num_frames=16, sampling="stride", size_px=224, batch=32)


def worker_counts(cores: int, *, is_dry_run: bool) -> list[int]:
    """Return the numbers of threads and processes that are meaningful on this machine."""
    return [1, 2] if is_dry_run else [number for number in _NUMBERS if number <= max(cores, 2)]


def shapes(*, is_dry_run: bool) -> dict[str, Shown]:
    """Return the kinds of clips to load, by their name in the table."""
    found = {"4 frames": _FOUR, "16 frames, stride 4": _SIXTEEN}
    if is_dry_run:
        return {name: replace(shown, size_px=32, batch=4) for name, shown in found.items()}
    return found


def measure_threads(setup: Setup, server: LoaderServer) -> Result:
    """Measure clips per second of threads, processes and the ring of worker processes, in turns."""
    require_repeated(setup)
    numbers = worker_counts(_cores(), is_dry_run=setup.is_dry_run)
    num_rounds, seconds = (1, 0.02) if setup.is_dry_run else (3, 1.0)
    rows: list[dict[str, Any]] = []
    targets = []
    notes = [_CACHE_NOTE, f"{_cores()} cores; medians of {num_rounds} interleaved rounds, {seconds:g} s per turn"]
    for name, shown in shapes(is_dry_run=setup.is_dry_run).items():
        variants = [(variant, number) for number in numbers for variant in ("threads", "processes")]
        variants.append(("ring", numbers[-1]))
        rates: dict[tuple[str, int], list[float]] = {variant: [] for variant in variants}
        cpu_ms: dict[tuple[str, int], list[float]] = {variant: [] for variant in variants}
        for turn in range(num_rounds):
            for variant in variants[turn % len(variants) :] + variants[: turn % len(variants)]:
                found = server.ask(variant[0], shown, number=variant[1], seconds=seconds)
                rates[variant].append(found["clips_per_s"])
                cpu_ms[variant].append(found["cpu_ms"])
        for variant in variants:
            rows.append(_row(name, variant, rates, cpu_ms))
        is_same = server.ask("same", shown, number=min(2, numbers[-1]))["is_same"]
        notes.append(f"{name}: the ring's batches are {'' if is_same else 'NOT '}those of the threads")
        most = numbers[-1]
        reached = ratio(rates["threads", most], rates["processes", most])
        targets.append(Target(what=f"{name}: {most} threads / {most} processes", figure=reached, goal=_ENOUGH))
        if not setup.is_dry_run:
            notes.append(
                decision(name, most, threads=reached, ring=ratio(rates["ring", most], rates["processes", most]))
            )
    return Result(rows=rows, notes=notes, targets=targets)


def measure_lock(setup: Setup, server: LoaderServer) -> Result:
    """Measure the fraction of time that the interpreter lock is held, and derive the limit of throughput from it."""
    require_repeated(setup)
    cores = _cores()
    numbers = [number for number in (1, 4, 8, 15) if number < cores] or [1]
    seconds = 0.1 if setup.is_dry_run else 1.0
    rows = []
    for name, shown in shapes(is_dry_run=setup.is_dry_run).items():
        for number in numbers[:1] if setup.is_dry_run else numbers:
            found = server.ask("lock", shown, number=number, seconds=seconds)
            rows.append(lock_row(name, number, **found))
    return Result(
        rows=rows,
        notes=[
            "measured: the share of time that the lock is held, by a sampling thread that occupies a core",
            f"load average: {os.getloadavg()[0]:.1f}; on a busy machine a thread may hold the lock without running",
            "derived: held us a clip = share / (clips/s); threads at most = 1 / share of one thread, at which the lock "
            "is always held. Handing the lock over also takes time, so the actual limit is lower",
        ],
    )


def lock_row(clips: str, number: int, *, held_share: float, clips_per_s: float) -> dict[str, Any]:
    """Return a row of the lock table; the limit is given for one thread, which never waits for the lock."""
    return {
        "clips": clips,
        "threads": number,
        "clips/s": round(clips_per_s),
        "lock held": round(held_share, 3),
        "held us a clip": round(1e6 * held_share / clips_per_s) if clips_per_s else None,
        "threads at most": round(1 / held_share, 1) if number == 1 and held_share else None,
    }


def _row(
    clips: str,
    variant: tuple[str, int],
    rates: dict[tuple[str, int], list[float]],
    cpu_ms: dict[tuple[str, int], list[float]],
) -> dict[str, Any]:
    name, number = variant
    return {
        "clips": clips,
        "way": name,
        "number": number,
        "clips/s": round(median(rates[variant])),
        "lowest": round(min(rates[variant])),
        "highest": round(max(rates[variant])),
        "/ one thread": round(ratio(rates[variant], rates["threads", 1]), 2),
        "/ processes": round(ratio(rates[variant], rates["processes", number]), 2),
        "CPU ms a clip": round(median(cpu_ms[variant]), 2) if name != "ring" else None,
    }


def ratio(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return median(one / other for one, other in zip(own, others, strict=True))


def decision(name: str, most: int, *, threads: float, ring: float) -> str:
    """State what follows from the throughput of `most` threads, and of the ring, relative to processes."""
    if threads >= _ENOUGH:
        return f"{name}: {most} threads reach {threads:.2f} of {most} processes, at least {_ENOUGH}: threads suffice"
    better = "worker processes are worth building" if ring > threads else "this ring would not help"
    reached = f"{most} threads reach {threads:.2f} of {most} processes, less than {_ENOUGH}"
    return f"{name}: {reached}; the ring {ring:.2f}: {better}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


_CACHE_NOTE = (
    "the chunks are fresh copies of a small set, so all reads are from the page cache: disk speed is not measured"
)
