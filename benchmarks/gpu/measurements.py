"""Runs measurements within a time limit; each result is on disk before the next one starts.

The JSON file:

    {"environment": {machine, gpu, torch, commit, ...}, "is_dry_run": false,
     "measurements": [{"name", "seconds", "rows": [{column: value}], "notes": [text],
                       "targets": [{"what", "figure", "goal", "is_at_most"}],
                       "error": text or null, "skipped": text or null}],
     "running": name of the measurement in progress, or null}

If a measurement fails, its traceback is recorded and the next one starts: one exception must not waste the rest of
limited GPU time. `benchmarks.gpu.supervised` does the same for a process that exits.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment
from clipmill.manifests.publish import publish_atomically

PACKAGES = ("torchvision", "transformers", "xformers", "open_clip_torch", "diffusers", "triton", "numpy")


class DeviceLost(Exception):
    """A recorded error after which this process can no longer use its GPU."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that all measurements share.

    Attributes:
        device: device of the models; a CPU in a dry run only.
        is_dry_run: tiny sizes and one round, to test the program; the figures are meaningless.
        data: the data folder with captioned chunks.
        scratch: folder for temporary files.
    """

    device: torch.device
    is_dry_run: bool
    data: Path
    scratch: Path


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure and its target.

    Attributes:
        figure: None if it could not be measured.
        goal: the minimum or maximum.
    """

    what: str
    figure: float | None
    goal: float
    is_at_most: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one measurement: a table whose columns are the keys of the rows, and notes below it.

    Attributes:
        rows: one that could not be measured has a one-line `error`.
    """

    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = ()
    targets: Sequence[Target] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One table to measure.

    Attributes:
        estimated_s: duration on a GPU; the measurement is skipped, with a remark, if less time is left.
    """

    name: str
    measure: Callable[[Setup], Result]
    estimated_s: float


@dataclass(kw_only=True)
class Record:
    """A measurement's record in the file."""

    name: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    skipped: str | None = None


def run_measurements(
    measurements: Sequence[Measurement],
    *,
    setup: Setup,
    minutes: float,
    path: Path,
    taken: Sequence[Record] = (),
) -> bool:
    """Run the measurements in order, and rewrite `path` after each.

    Args:
        taken: records already written by another process of the same run, which are not repeated.

    Returns:
        True if all measurements that were run succeeded.

    Raises:
        DeviceLost: an error has left the GPU unusable in this process.
    """
    ends_s = time.monotonic() + 60 * minutes
    content: dict[str, Any] = {"environment": _environment(setup), "is_dry_run": setup.is_dry_run}
    records = list(taken)
    done = {record.name for record in records}
    for measurement in measurements:
        if measurement.name in done:
            continue
        left_s = ends_s - time.monotonic()
        record = Record(name=measurement.name)
        if not setup.is_dry_run and left_s < measurement.estimated_s:
            record.skipped = f"takes about {measurement.estimated_s:.0f} s, and {max(0, left_s):.0f} s were left"
        else:
            write(path, content, records, running=measurement.name)
            try:
                _take(measurement, record, setup)
            except KeyboardInterrupt:
                skip_rest(records, measurements, running=measurement.name)
                write(path, content, records)
                raise
        records.append(record)
        write(path, content, records)
        say(record)
        if lost := _device_error(setup):
            raise DeviceLost(lost)
    return not any(one.error for one in records)


def skip_rest(records: list[Record], measurements: Sequence[Measurement], *, running: str | None) -> None:
    """Add records of the measurements without one: the one that was running, and those after it."""
    taken = {record.name for record in records}
    for one in measurements:
        if one.name not in taken:
            why = "interrupted" if one.name == running else "not started: no time was left"
            records.append(Record(name=one.name, skipped=why))


def write(path: Path, content: dict[str, Any], records: Sequence[Record], *, running: str | None = None) -> None:
    """Replace the file."""
    whole = {**content, "measurements": [asdict(one) for one in records], "running": running}
    with publish_atomically(path) as temporary:
        temporary.write_text(json.dumps(whole, indent=1) + "\n")


def say(record: Record) -> None:
    """Report the outcome of a measurement on stderr."""
    outcome = record.skipped or (record.error or "done").strip().splitlines()[-1]
    print(f"{record.name}: {outcome} ({record.seconds:.1f} s)", file=sys.stderr, flush=True)


def one_line(error: BaseException, *, most_chars: int = 300) -> str:
    """Format an error's type and message on one line."""
    text = " ".join(str(error).split())
    if len(text) > most_chars:
        text = f"{text[: most_chars - 4]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _take(measurement: Measurement, record: Record, setup: Setup) -> None:
    began_s = time.perf_counter()
    try:
        result = measurement.measure(setup)
        record.rows, record.notes = [dict(row) for row in result.rows], list(result.notes)
        record.targets = [asdict(target) for target in result.targets]
    except Exception:  # noqa: BLE001  whatever it is, the others are still measured
        record.error = traceback.format_exc()
    record.seconds = time.perf_counter() - began_s


def _device_error(setup: Setup) -> str | None:
    """Release the memory of a measurement; return the error if this fails, as after an illegal access."""
    if setup.device.type != "cuda":
        return None
    gc.collect()
    try:
        torch.cuda.synchronize(setup.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)
    except Exception as error:  # noqa: BLE001  of several types, by the version of torch
        return one_line(error)
    return None


def _environment(setup: Setup) -> dict[str, str]:
    found = {**describe_environment(), "torch": torch.__version__, **versions(PACKAGES)}
    if setup.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "gpu": properties.name,
            "gpu_memory": f"{properties.total_memory / 1024**3:.0f} GiB",
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda or "none",
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return found


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return versions by distribution; `none` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
