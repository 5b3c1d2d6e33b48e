"""`python -m benchmarks.gpu --first` on simulated GPUs: its measuring processes, and their programs."""

import json
from pathlib import Path

import pytest

from tests.simulated_gpu.runtime import run_simulated

EVERYWHERE = Path(__file__).parent / "everywhere"
# The program at tiny sizes, in processes as on a real GPU, with measurements that fail among its first ones.
PROGRAM = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
import torch
from benchmarks.gpu import __main__ as program, first
from benchmarks.gpu.measurements import Measurement, Setup

run, folder = first._run, Path(sys.argv[1])
first._run = lambda *words, setup, **options: run(*words, setup=replace(setup, is_dry_run=False), **options)
program.Setup = lambda **given: Setup(**{**given, "is_dry_run": True})

def mixed(setup): torch.ones(2, device=setup.device) + torch.ones(2, device="cuda:1")
def crashed(setup): os.abort()
def hanging(setup): time.sleep(10**6)

# Resumption takes 120 steps, minutes where all operators are simulated; inside/test_steps.py has a run that goes on.
doctor, *others = (one for one in program.FIRST if one.name != "Resumption")
mistakes = [Measurement(name=one.__name__, measure=one, estimated_s=1) for one in (mixed, crashed, hanging)]
program.FIRST = (doctor, *mistakes, *others)
program.run(program.Request(
    json=folder / "first.json", data=folder / "none", minutes=60, is_dry_run=False, is_first=True
))
"""
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_a_measurement_that_fails_costs_no_other_its_result(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{EVERYWHERE}:{repository}")
    done = run_simulated(("-c", PROGRAM, str(tmp_path)), folder=tmp_path)
    assert (tmp_path / "first.json").exists(), f"{done.stdout[-3000:]}{done.stderr[-5000:]}"
    record = json.loads((tmp_path / "first.json").read_text())
    errors = {entry["name"]: entry["error"] for entry in record["measurements"]}
    assert "MixedDevices" in errors.pop("mixed")
    assert errors.pop("crashed") == "its process was killed by SIGABRT"
    assert errors.pop("hanging").startswith("it was killed after ")
    assert {name: error for name, error in errors.items() if error} == {}
    assert record["running"] is None and len(errors) == 9
    failures = [row for entry in record["measurements"][1:] for row in entry["rows"] if "error" in row]
    assert failures == []  # the doctor tries SDPA's own kernels, which are not simulated
