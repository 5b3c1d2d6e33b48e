"""Runs the measurements of one part within a number of minutes; each result is on disk before the next one begins.

The JSON file of a part:

    {"part": "speed", "environment": {machine, gpu, torch, commit, ...}, "is_dry_run": false,
     "measurements": [{"name", "seconds", "rows": [{column: value}], "notes": [text], "error": text or null,
                       "skipped": text or null}]}

A measurement that fails is recorded with its traceback and the next one begins: a GPU that is lent for half an hour is
not given back because of one exception.
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

from benchmarks.environment import surroundings
from manifests.publish import published


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all measurements of a part share.

    Attributes:
        device: where models run; a CPU in a dry run only.
        is_dry_run: tiny sizes and one round, to show that the program works; its figures mean nothing.
        data: the data folder with chunks, latents and text embeddings.
        scratch: a folder for files that are made on the way.
    """

    device: torch.device
    is_dry_run: bool
    data: Path
    scratch: Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one measurement: a table whose columns are the keys of the rows, and notes below it."""

    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One table to be measured.

    Attributes:
        estimated_s: how long it takes on a GPU; it is skipped, and said so, where less time is left.
    """

    name: str
    measure: Callable[[Setup], Result]
    estimated_s: float


@dataclass(kw_only=True)
class _Record:
    name: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    skipped: str | None = None


def run_part(part: str, measurements: Sequence[Measurement], *, setup: Setup, minutes: float, path: Path) -> bool:
    """Takes the measurements in order and writes `path` anew after each.

    Returns:
        Whether all that were taken succeeded.
    """
    ends_s = time.monotonic() + 60 * minutes
    content: dict[str, Any] = {"part": part, "environment": _environment(setup), "is_dry_run": setup.is_dry_run}
    records: list[_Record] = []
    for measurement in measurements:
        left_s = ends_s - time.monotonic()
        record = _Record(name=measurement.name)
        if not setup.is_dry_run and left_s < measurement.estimated_s:
            record.skipped = f"takes about {measurement.estimated_s:.0f} s, and {max(0, left_s):.0f} s were left"
        else:
            _take(measurement, record, setup)
        outcome = record.skipped or (record.error or "done").strip().splitlines()[-1]
        print(f"{part}: {record.name}: {outcome} ({record.seconds:.1f} s)", file=sys.stderr, flush=True)
        records.append(record)
        with published(path) as temporary:
            temporary.write_text(
                json.dumps({**content, "measurements": [asdict(one) for one in records]}, indent=1) + "\n"
            )
    return not any(one.error for one in records)


def _take(measurement: Measurement, record: _Record, setup: Setup) -> None:
    began_s = time.perf_counter()
    try:
        result = measurement.measure(setup)
        record.rows, record.notes = [dict(row) for row in result.rows], list(result.notes)
    except Exception:  # noqa: BLE001  whatever it is, the others shall still be measured
        record.error = traceback.format_exc()
    record.seconds = time.perf_counter() - began_s
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)


def _environment(setup: Setup) -> dict[str, str]:
    found = {**surroundings(), "torch": torch.__version__}
    if setup.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setup.device)
        found |= {
            "gpu": properties.name,
            "gpu_memory": f"{properties.total_memory / 1024**3:.0f} GiB",
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda or "none",
        }
    return found
