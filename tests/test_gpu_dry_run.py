"""What is for a GPU runs at tiny sizes on a CPU, in whole: its tests and its benchmarks."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.first import fastest_backend
from tests import workers
from tests.forks import Forks
from tests.train.classify.moving import write_moving

pytestmark = pytest.mark.timeout(900)


def run(forks: Forks, repository: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(forks.python()), "-m", *words]
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_tests_of_a_gpu_pass_in_a_dry_run(forks: Forks, repository: Path, tmp_path: Path) -> None:
    words = ("tests/gpu", "-m", "gpu", "--gpu-device", "cpu", "-q", "-p", "no:cacheprovider")
    done = run(forks, repository, tmp_path, "pytest", *words)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr}"
    assert " passed" in done.stdout


@pytest.mark.nightly
def test_every_benchmark_of_a_gpu_measures_in_a_dry_run(forks: Forks, repository: Path, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "gpu.json"
    data.mkdir()
    write_moving(data)
    words = ("--json", str(results), "--data", str(data), "--dry-run")
    done = run(forks, repository, tmp_path, "benchmarks.gpu", *words)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-5000:]}"
    record = json.loads(results.read_text())
    assert record["is_dry_run"] and record["running"] is None
    assert all(entry["rows"] and not any("error" in row for row in entry["rows"]) for entry in record["measurements"])
    assert done.stdout.startswith("# Dry run\n") and "## Losses\n" in done.stdout


def measure(names: Sequence[str], words: Sequence[str]) -> None:
    """Run the program with some of its first measurements."""
    program.FIRST = tuple(measurement for measurement in program.FIRST if measurement.name in names)
    sys.argv = ["benchmarks.gpu", *words]
    program.main()


# One measurement of each kind: the others run other files of tests/gpu, or the preset with other numbers.
OF_EACH_KIND = {"Doctor", "Attention: equality and speed", "Where the host waits", "b16-ego4d, 4 frames"}


@pytest.mark.parametrize("is_complete", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_the_first_measurements_of_a_new_machine_run_without_data(is_complete: bool, tmp_path: Path) -> None:
    chosen = [measurement.name for measurement in program.FIRST if is_complete or measurement.name in OF_EACH_KIND]
    assert len(chosen) == (len(program.FIRST) if is_complete else len(OF_EACH_KIND))
    results = tmp_path / "first.json"
    words = ("--first", "--json", str(results), "--data", str(tmp_path / "none"), "--dry-run")
    # A process of its own: the program runs tests, and their fixtures would replace the fixtures of this process.
    process = workers.process(target=measure, args=(chosen, words), TMPDIR=str(tmp_path), HF_HUB_OFFLINE="1")
    process.start()
    process.join(600)
    process.kill()
    assert process.exitcode == 0
    record = json.loads(results.read_text())
    assert [entry["name"] for entry in record["measurements"]] == chosen and record["running"] is None
    assert all(entry["rows"] and not any("error" in row for row in entry["rows"]) for entry in record["measurements"])
    # Its results were of a GPU: the entry of the table of --attention auto.
    assert fastest_backend(results) == {}
    record["environment"]["compute_capability"] = "9.0"
    results.write_text(json.dumps(record))
    assert fastest_backend(results) == {(9, 0): "sdpa"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_the_reason_is_given(
    forks: Forks, repository: Path, tmp_path: Path
) -> None:
    results = tmp_path / "gpu.json"
    done = run(forks, repository, tmp_path, "benchmarks.gpu", "--json", str(results), "--data", str(tmp_path))
    assert done.returncode == 2
    assert "finds no GPU" in done.stderr and "--dry-run" in done.stderr
    assert not results.exists()
