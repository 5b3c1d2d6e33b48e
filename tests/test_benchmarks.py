"""Every benchmark still runs, on next to nothing, and gives its figures; what they are is no matter here."""

import importlib
import json
import sys
from pathlib import Path

import pytest

TINY = {
    "chunk": ["--synthetic", "1", "--minutes", "0.05", "--rounds", "1", "--ways", "prep chunk", "bare ffmpeg"],
    "manifest": ["--narrations", "400"],
    "memory": ["--minutes", "0.05"],
    "plan": ["--chunks", "80"],
    "rerun": ["--chunks", "80", "--runs", "1"],
}
NOT_BENCHMARKS = {"__init__", "environment", "launch", "made_data", "measure", "report", "tree"}


def test_every_benchmark_is_tried_here(repository: Path) -> None:
    assert {path.stem for path in (repository / "benchmarks").glob("*.py")} == TINY.keys() | NOT_BENCHMARKS


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_benchmark_prints_a_table_and_writes_the_same_as_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [name, *TINY[name], "--json", str(json_path)])
    importlib.import_module(f"benchmarks.{name}").main()
    figures = json.loads(json_path.read_text())
    table = capsys.readouterr().out
    assert figures["machine"] in table
    assert figures["commit"] in table
    assert "|---|" in table


def test_the_cost_of_a_command_holds_that_of_its_children_and_of_its_daemons(tmp_path: Path) -> None:
    from benchmarks.measure import run_measured

    spend = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spend!r}])"
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spend!r}])"
    for program in (child, orphan):
        assert run_measured([sys.executable, "-c", program], folder=tmp_path).cpu_s >= 0.3


def test_peak_memory_is_that_of_the_command_and_not_of_who_measures() -> None:
    from benchmarks.measure import run_measured

    held = bytearray(300_000_000)
    held[::4096] = bytes(len(held[::4096]))
    assert run_measured([sys.executable, "-S", "-c", "pass"]).peak_bytes < 100_000_000
    assert run_measured([sys.executable, "-S", "-c", "b = b'x' * 200_000_000"]).peak_bytes > 200_000_000
