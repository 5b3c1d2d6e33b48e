"""Run measurements within a time limit, and write each result to disk before the next measurement starts.

The JSON file:

    {"environment": {machine, gpu, torch, commit, ...}, "is_dry_run": false,
     "measurements": [{"name", "seconds", "rows": [{column: value}], "notes": [text],
                       "targets": [{"what", "figure", "goal", "is_at_most"}],
                       "error": text or null, "skipped": text or null}],
     "running": name of the measurement in progress, or null}

If a measurement fails, its traceback is recorded and the next measurement starts, because an exception must not waste
the remaining GPU time. `benchmarks.gpu.supervised` does the same if the process exits.
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
    """Error, already recorded, after which this process can no longer use its GPU."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that all measurements share.

    Attributes:
        device: Device of the models; the CPU only in a dry run.
        is_dry_run: True for tiny sizes and one round, to test the program; the figures are meaningless.
        data: Data folder with captioned chunks.
        scratch: Folder for temporary files.
    """

    device: torch.device
    is_dry_run: bool
    data: Path
    scratch: Path


@dataclass(frozen=True, kw_only=True)
class Target:
    """Figure with a target.

    Attributes:
        what: Description of the figure.
        figure: Measured value; None if it could not be measured.
        goal: Minimum or maximum of the figure.
        is_at_most: True if `goal` is a maximum.
    """

    what: str
    figure: float | None
    goal: float
    is_at_most: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a measurement: a table whose columns are the keys of the rows, and notes below the table.

    Attributes:
        rows: Rows of the table. A row that could not be measured has an `error` of one line.
    """

    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = ()
    targets: Sequence[Target] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of a table.

    Attributes:
        estimated_s: Estimated time on a GPU in seconds. The measurement is skipped if less time is left.
    """

    name: str
    measure: Callable[[Setup], Result]
    estimated_s: float


@dataclass(kw_only=True)
class Record:
    """Record of a measurement in the file."""

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
    """Run the measurements in order, and rewrite `path` after each measurement.

    Args:
        taken: Records that another process of this run has written. These measurements are not repeated.

    Returns:
        True if all measurements that were run succeeded.

    Raises:
        DeviceLost: This process can no longer use the GPU after an error.
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
            record.skipped = f"takes about {measurement.estimated_s:.0f} s, but only {max(0, left_s):.0f} s were left"
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
    """Add a record for each measurement without a record: the one that was running, and all later ones."""
    taken = {record.name for record in records}
    for one in measurements:
        if one.name not in taken:
            why = "interrupted" if one.name == running else "not started: no time was left"
            records.append(Record(name=one.name, skipped=why))


def write(path: Path, content: dict[str, Any], records: Sequence[Record], *, running: str | None = None) -> None:
    """Write the file again, with the records so far."""
    whole = {**content, "measurements": [asdict(one) for one in records], "running": running}
    with publish_atomically(path) as temporary:
        temporary.write_text(json.dumps(whole, indent=1) + "\n")


def say(record: Record) -> None:
    """Report the outcome of a measurement on stderr."""
    outcome = record.skipped or (record.error or "done").strip().splitlines()[-1]
    print(f"{record.name}: {outcome} ({record.seconds:.1f} s)", file=sys.stderr, flush=True)


def one_line(error: BaseException, *, most_chars: int = 300) -> str:
    """Format the type and the message of an error on one line."""
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
    except Exception:  # noqa: BLE001  the other measurements must run after any error
        record.error = traceback.format_exc()
    record.seconds = time.perf_counter() - began_s


def _device_error(setup: Setup) -> str | None:
    """Release the memory of a measurement; return the error if this fails, for example after an illegal access."""
    if setup.device.type != "cuda":
        return None
    gc.collect()
    try:
        torch.cuda.synchronize(setup.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)
    except Exception as error:  # noqa: BLE001  the type of the error depends on the version of torch
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
    """Return the versions of packages by name; `none` for a package that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
