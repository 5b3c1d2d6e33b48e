"""Step times of a training run, read from the files in its folder, since prep does not import train."""

import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError

METRICS_FILE, SETTINGS_FILE, FACTS_FILE = "metrics.jsonl", "settings.yaml", "run.json"
_WARM_UP_SHARE = 0.1
_PROCESSES = re.compile(r"(\d+)(?:, \w+(?:, (\d+) x \d+ stages.*)?)?")  # as train writes them: "4, ddp, 2 x 2 stages"
_BATCH = re.compile(r"^batch: *(\d+) *$", re.MULTILINE)


@dataclass(frozen=True)
class RunSteps:
    """Step statistics of a run.

    Attributes:
        step_s: median seconds per step without the wait for data.
        batch: clips per step, of all processes.
        num_readers: processes that read data: all of them, or the first stage of each pipeline.
    """

    step_s: float
    num_steps: int
    batch: int | None
    num_readers: int | None


def read_run_steps(run: Path) -> RunSteps:
    """Read `metrics.jsonl` and `settings.yaml` of a run; the first tenth, at least one step, counts as warm-up.

    Raises:
        UserError: the folder does not belong to a run, or the run has too few steps.
    """
    hint = "give a run folder written by train, or --step-time SECONDS"
    path = run / METRICS_FILE
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}", hint=hint) from None
    steps = [step for step in map(_step_s, lines) if step is not None]
    steps = steps[max(1, int(len(steps) * _WARM_UP_SHARE)) :]
    if not steps:
        raise UserError(f"{path} has no steps after the warm-up", hint=hint)
    step_s = statistics.median(steps)
    if step_s <= 0:
        raise UserError(f"the step time in {path} is {step_s:g} s without the wait for data", hint=hint)
    return RunSteps(step_s, len(steps), _batch(run / SETTINGS_FILE), _num_readers(run / FACTS_FILE))


def _step_s(line: str) -> float | None:
    """Return the seconds of one step without its wait for data; None for a line that lacks them or is truncated."""
    try:
        values: Any = json.loads(line)
        seconds = float(values["step_s"]) - float(values["data_wait_s"])
    except (ValueError, TypeError, KeyError):
        return None
    return seconds if math.isfinite(seconds) else None


def _batch(path: Path) -> int | None:
    try:
        found = _BATCH.search(path.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def _num_readers(path: Path) -> int | None:
    try:
        found = _PROCESSES.fullmatch(json.loads(path.read_bytes())["processes"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return int(found[2] or found[1]) if found else None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
