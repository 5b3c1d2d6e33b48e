"""Run the measurements in a separate process, and start another process for the remaining ones if it exits or hangs.

A process can no longer use its GPU after an illegal memory access, a kernel for a different version of torch may crash
the process, and a compiler may hang. The measurement in progress is then recorded as failed, and the others still run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.measurements import DeviceLost, Measurement, Record, Setup, run_measurements, say, skip_rest, write

# Environment variable of the measuring process: the end of its time, in seconds since the epoch.
_ENDS = "CLIPMILL_GPU_ENDS"
_LOST_STATUS = 3
_LOOKS_EVERY_S = 0.5
_SLOWER = 3.0  # a measurement is ended after this multiple of its estimated time
_LEAST_S = 90.0
_GRACE_S = 20.0  # extra time for a measurement that takes longer than estimated


def is_measuring() -> bool:
    """Return True in the measuring process."""
    return _ENDS in os.environ


def run_supervised(
    measurements: Sequence[Measurement],
    *,
    setup: Callable[[], Setup],
    is_dry_run: bool,
    minutes: float,
    path: Path,
) -> bool:
    """Call `run_measurements` in a new process of this program, with the same arguments; a dry run needs no process.

    Args:
        setup: Function that the measuring process calls, so that no other process uses the GPU.

    Returns:
        True if all measurements that were run succeeded.
    """
    if is_dry_run:
        return run_measurements(measurements, setup=setup(), minutes=minutes, path=path)
    if is_measuring():
        minutes_left = (float(os.environ[_ENDS]) - time.time()) / 60
        taken = [Record(**one) for one in _read(path).get("measurements", [])]
        try:
            return run_measurements(measurements, setup=setup(), minutes=minutes_left, path=path, taken=taken)
        except DeviceLost as lost:
            print(f"the GPU is lost for this process: {lost}", file=sys.stderr, flush=True)
            os._exit(_LOST_STATUS)  # destructors would access the GPU
    path.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, _end)
    return _supervise(measurements, path=path, ends_s=time.time() + 60 * minutes)


def _supervise(measurements: Sequence[Measurement], *, path: Path, ends_s: float) -> bool:
    limits_s = {one.name: max(_LEAST_S, _SLOWER * one.estimated_s) for one in measurements}
    environment = {**os.environ, _ENDS: str(ends_s)}
    # Start at most one process per measurement, for whatever reason the processes end.
    for _ in measurements:
        try:
            why, status = _watched(environment, path, limits_s=limits_s, ends_s=ends_s)
        except (KeyboardInterrupt, _TimeIsOver) as end:
            if not _cut(measurements, path=path):
                print("the time limit was reached before any measurement", file=sys.stderr, flush=True)
                return False
            if isinstance(end, KeyboardInterrupt):
                raise
            return not any(one["error"] for one in _read(path)["measurements"])
        content = _read(path)
        if why is None and status != _LOST_STATUS:
            return status == 0
        records = [Record(**one) for one in content.pop("measurements", [])]
        running = content.pop("running", None)
        if running is not None:
            record = Record(name=running, error=why)
            records.append(record)
            write(path, content, records)
            say(record)
        elif not records:
            print(f"{why} before any measurement", file=sys.stderr, flush=True)
            return False
        if len(records) == len(measurements):
            break
        if time.time() >= ends_s:
            _cut(measurements, path=path)
            break
    return False


class _TimeIsOver(Exception):
    """The time limit was reached during a measurement."""


def _cut(measurements: Sequence[Measurement], *, path: Path) -> bool:
    """Record the measurement in progress and the ones that were not started; return False if there is no file yet."""
    content = _read(path)
    if not content:
        return False
    records = [Record(**one) for one in content.pop("measurements", [])]
    num_taken = len(records)
    skip_rest(records, measurements, running=content.pop("running", None))
    write(path, content, records)
    for record in records[num_taken:]:
        say(record)
    return True


def _watched(
    environment: dict[str, str], path: Path, *, limits_s: dict[str, float], ends_s: float
) -> tuple[str | None, int]:
    """Run this program in a new process.

    Returns:
        The reason why the process ended early (None if it did not), and its exit status.

    Raises:
        _TimeIsOver: The process was ended at the time limit.
    """
    process = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment, start_new_session=True)
    since_s, running = time.monotonic(), None
    try:
        while process.poll() is None:
            time.sleep(_LOOKS_EVERY_S)
            now = _read(path).get("running")
            if now != running:
                since_s, running = time.monotonic(), now
            taken_s = time.monotonic() - since_s
            if time.time() > ends_s + _GRACE_S:
                raise _TimeIsOver
            if taken_s > limits_s.get(running or "", _LEAST_S):
                return f"it was killed after {taken_s:.0f} s", -signal.SIGKILL
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status = process.returncode
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}", status
    is_whole = _read(path).get("running", "") is None
    return (None if is_whole else f"its process exited with {status}"), status


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return found
