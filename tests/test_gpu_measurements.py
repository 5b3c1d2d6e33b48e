"""The measurements of a GPU lose nothing to what fails in it: an exception, a variant, a whole process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import FIRST, MEASUREMENTS, Request, require_possible
from benchmarks.gpu.implementations import Implementation, faster_than, rows_of, take_turns
from benchmarks.gpu.measurements import Measurement, Result, Setup, Target, run_measurements
from clipmill.manifests.errors import UserError

CPU = torch.device("cpu")


def setup(tmp_path: Path, *, is_dry_run: bool = False) -> Setup:
    return Setup(device=CPU, is_dry_run=is_dry_run, data=tmp_path, scratch=tmp_path)


def figures(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def measure(setup: Setup) -> Result:
    return Result(rows=[{"way": "ours", "ms": 1.5}], notes=["a note"], targets=[Target(what="x", figure=2.0, goal=1.7)])


def failing(setup: Setup) -> Result:
    raise ValueError("there is no such kernel")


def test_a_measurement_that_fails_does_not_cost_the_others_and_each_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path, seen = tmp_path / "gpu.json", []

    def looking(setup: Setup) -> Result:
        seen.append(figures(path))
        return Result(rows=[])

    measurements = [
        Measurement(name="first", measure=measure, estimated_s=1),
        Measurement(name="second", measure=failing, estimated_s=1),
        Measurement(name="third", measure=looking, estimated_s=1),
    ]
    assert not run_measurements(measurements, setup=setup(tmp_path), minutes=1, path=path)
    assert [entry["name"] for entry in seen[0]["measurements"]] == ["first", "second"]
    assert seen[0]["running"] == "third"
    first, second, third = figures(path)["measurements"]
    assert (first["rows"], first["notes"]) == ([{"way": "ours", "ms": 1.5}], ["a note"])
    assert first["targets"] == [{"what": "x", "figure": 2.0, "goal": 1.7, "is_at_most": False}]
    assert "there is no such kernel" in second["error"] and second["rows"] == []
    assert third["error"] is None and figures(path)["running"] is None


def test_what_the_time_does_not_suffice_for_is_skipped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    measurements = [
        Measurement(name="long", measure=failing, estimated_s=120),
        Measurement(name="short", measure=measure, estimated_s=10),
    ]
    assert run_measurements(measurements, setup=setup(tmp_path), minutes=1, path=path)
    long, short = figures(path)["measurements"]
    assert long["skipped"].startswith("takes about 120 s, but only ") and short["skipped"] is None
    # A dry run leaves nothing out.
    assert not run_measurements(measurements, setup=setup(tmp_path, is_dry_run=True), minutes=0, path=path)
    assert [entry["skipped"] for entry in figures(path)["measurements"]] == [None, None]


def test_a_way_that_fails_has_its_error_in_one_line_and_the_others_their_times(tmp_path: Path) -> None:
    calls = []

    def fails_later() -> None:
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("no kernel\n  for these inputs")

    def not_installed() -> Implementation:
        raise ImportError("No module named 'xformers'")

    openings = {
        "ours": lambda: Implementation(step=lambda: sum(range(10_000)), num_flops=100),
        "missing": not_installed,
        "later": lambda: Implementation(step=fails_later),
    }
    taken = take_turns(openings, setup(tmp_path), num_rounds=2, num_steps=1)
    ours, missing, later = rows_of(taken, setup(tmp_path), items=8, unit="clips", beside=["missing"])
    assert ours["clips/s"] == pytest.approx(8000 / ours["ms a step"]) and "error" not in ours
    assert (missing["error"], missing["ms a step"]) == ("ImportError: No module named 'xformers'", None)
    assert (later["error"], later["clips/s"]) == ("RuntimeError: no kernel for these inputs", None)
    assert ours["/ missing"] is None and faster_than(taken, "ours", "ours") == 1.0


def test_flops_of_a_step_are_those_that_training_counts(tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(4, 8), torch.randn(2, 4)
    opening = {"ours": lambda: Implementation(step=lambda: layer(x).sum().backward(), model=layer)}
    taken = take_turns(opening, setup(tmp_path, is_dry_run=True))
    assert taken["ours"].num_flops == 3 * 2 * 2 * 4 * 8


PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from benchmarks.gpu.measurements import DeviceLost, Measurement, Result, Setup
from benchmarks.gpu.supervised import run_supervised

folder = Path(sys.argv[1])
def ended(setup): os.abort()
def lost(setup): raise DeviceLost("an illegal memory access")
def fine(setup): return Result(rows=[{"process": os.getpid()}])
measurements = [Measurement(name=one.__name__ + str(at), measure=one, estimated_s=1)
                for at, one in enumerate([fine, ended, fine, fine])]
def setup(): return Setup(device=torch.device("cpu"), is_dry_run=False, data=folder, scratch=folder)
sys.exit(not run_supervised(measurements, setup=setup, is_dry_run=False, minutes=2, path=folder / "f.json"))
"""


@pytest.mark.nightly
def test_a_process_that_ends_costs_the_measurement_it_took_and_another_one_takes_the_rest(
    tmp_path: Path, repository: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=repository)
    assert done.returncode == 1, done.stderr
    first, ended, third, fourth = figures(tmp_path / "f.json")["measurements"]
    assert ended["error"] == "its process was killed by SIGABRT"
    assert first["rows"] != third["rows"] == fourth["rows"]


def test_what_an_interruption_cuts_is_named_and_on_disk(tmp_path: Path) -> None:
    def interrupt(setup: Setup) -> Result:
        raise KeyboardInterrupt

    path = tmp_path / "gpu.json"
    measurements = [
        Measurement(name=work.__name__, measure=work, estimated_s=1) for work in (measure, interrupt, failing)
    ]
    with pytest.raises(KeyboardInterrupt):
        run_measurements(measurements, setup=setup(tmp_path), minutes=1, path=path)
    first, second, third = figures(path)["measurements"]
    assert (first["skipped"], first["error"]) == (None, None)
    assert (second["skipped"], third["skipped"]) == (
        "interrupted",
        "not started: no time was left",
    )
    assert figures(path)["running"] is None


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        ({"minutes": -1.0}, "--minutes -1 is out of range"),
        ({"data": Path("/nowhere")}, "the data folder /nowhere does not exist"),
        ({"json": Path("/nowhere/gpu.json")}, "the folder /nowhere for gpu.json does not exist"),
    ],
)
def test_a_plain_mistake_is_said_before_anything_is_measured(
    tmp_path: Path, mistake: dict[str, Any], problem: str
) -> None:
    request = Request(json=tmp_path / "gpu.json", data=tmp_path, minutes=1, is_dry_run=True)
    require_possible(request)
    with pytest.raises(UserError, match=problem):
        require_possible(replace(request, **mistake))


def test_the_measurements_fit_into_their_minutes() -> None:
    assert sum(measurement.estimated_s for measurement in MEASUREMENTS) <= 15 * 60
    assert len({measurement.name for measurement in MEASUREMENTS}) == len(MEASUREMENTS)
    assert sum(measurement.estimated_s for measurement in FIRST) <= 8 * 60
