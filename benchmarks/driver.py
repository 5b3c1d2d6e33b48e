"""Throughput and memory of the driver: tasks that do nothing, through the engines of `prep`.

    python -m benchmarks.driver [--tasks N] [--workers N] [--engines NAME ...] [--json FILE]

Each task has the size of one that makes a shard of chunks (a few kilobytes) and returns the result of a shard, so that
what is measured is everything around the work: serialisation, pipes, Ray's scheduling, the driver's loop. A shard takes
minutes; an engine of N tasks a second keeps N times as many workers busy as a shard has seconds. Each engine runs in a
process of its own.

`tasks/s` counts from the first outcome to the last, without the start of workers; `driver ms/task` is the CPU time of
the driver's process per task (Ray's engine has a process of its own, which is not counted), `driver MB` its peak
memory. The second table is on paper: what a driver keeps of each shard until the end (its row of the plan, its commit
before and after the run, its result), measured for 10,000 shards, times 10^6.
"""

import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass

from benchmarks.environment import REPOSITORY
from benchmarks.report import parser_for, print_report
from prep.core.plan import ShardPlan, ShardState
from prep.core.shard_result import ShardResult
from prep.engines import Outcome
from prep.engines.choice import open_engine
from shards.commits import Commit, ShardFiles

_NUM_COUNTED = 10_000


@dataclass(frozen=True)
class Nothing:
    """A task that does nothing; `content` stands for the description of the work."""

    shard_id: int
    content: bytes


def do_nothing(task: Nothing) -> ShardResult:
    """Return the result of a shard."""
    return ShardResult(task.shard_id, num_chunks=240, num_bytes=len(task.content))


def run_engine(engine: str, *, num_tasks: int, num_workers: int) -> dict[str, object]:
    """Run the tasks through one engine in this process and measure it."""
    tasks = (Nothing(number, os.urandom(3000)) for number in range(num_tasks))
    results: dict[int, ShardResult] = {}
    first_s = 0.0
    first_cpu_s = 0.0
    for outcome in open_engine(engine, address=None, workers=num_workers).run(do_nothing, tasks):
        if isinstance(outcome, Outcome) and outcome.result is not None:
            if not results:
                first_s, first_cpu_s = time.perf_counter(), time.process_time()
            results[outcome.result.shard_id] = outcome.result
    wall_s, cpu_s = time.perf_counter() - first_s, time.process_time() - first_cpu_s
    if results.keys() != set(range(num_tasks)):
        raise RuntimeError(f"{num_tasks - len(results)} results are missing")
    return {
        "engine": engine,
        "workers": num_workers,
        "tasks": num_tasks,
        "tasks/s": round((num_tasks - 1) / wall_s),
        "driver ms/task": cpu_s * 1000 / num_tasks,
        "driver MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }


def in_process(engine: str, *, num_tasks: int, num_workers: int) -> dict[str, object]:
    """Run `run_engine` in a process of its own, which imports this file under its name, as workers do."""
    call = f"run_engine({engine!r}, num_tasks={num_tasks}, num_workers={num_workers})"
    program = f"import json\nfrom benchmarks.driver import run_engine\nprint(json.dumps({call}))"
    environment = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def bytes_per_shard() -> list[dict[str, object]]:
    """Measure what the driver keeps of each shard."""
    sizes: dict[str, int] = {}
    for what, make in (("row of the plan", _plan), ("commit", _commit), ("result", _result)):
        tracemalloc.start()
        kept = {number: make(number) for number in range(_NUM_COUNTED)}
        sizes[what] = round(tracemalloc.get_traced_memory()[0] / len(kept))
        tracemalloc.stop()
    sizes["together, with two commits"] = sum(sizes.values()) + sizes["commit"]
    # A byte of each of 10^6 shards is a megabyte.
    return [{"of each shard": what, "bytes": size, "MB for 10^6 shards": size} for what, size in sizes.items()]


def _plan(number: int) -> ShardPlan:
    return ShardPlan(number, "train", ShardState.NEW, "not committed yet", f"{number:064x}", range(number), 240)


def _commit(number: int) -> Commit:
    stem = f"{number // 1000:03d}/{number:06d}-{number:08x}"
    files = ShardFiles(f"{stem}.tar", number, f"{number:064x}", f"{stem}.index.arrow", number, f"{number:064x}", 240)
    return Commit("video", number, "train", f"{number:064x}", files, ())


def _result(number: int) -> ShardResult:
    return ShardResult(number, num_chunks=240, num_reused=0, num_bytes=number, encoded_s=float(number), cpu_s=1.5)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--tasks", type=int, default=100_000, help="tasks of each engine (default 100000)")
    parser.add_argument("--workers", type=int, default=2, help="workers of each engine (default 2)")
    parser.add_argument("--engines", nargs="+", default=["processes", "ray"], help="engines (default processes ray)")
    arguments = parser.parse_args()
    rows = [
        in_process(engine, num_tasks=arguments.tasks, num_workers=arguments.workers) for engine in arguments.engines
    ]
    print_report(
        "Driver throughput",
        rows,
        notes=["Made tasks of 3 kB that do nothing."],
        json_path=arguments.json,
        further={"Memory of the driver by shard": bytes_per_shard()},
    )


if __name__ == "__main__":
    main()
