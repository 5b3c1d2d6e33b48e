"""`train doctor` on the test machine, and with a child process that hangs, dies or prints garbage."""

import json
import sys
import time
from pathlib import Path

import pytest

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.doctor.commands import doctor_facts, run_doctor
from clipmill.train.doctor.machine import (
    Accelerator,
    accelerator_of,
    ask_child,
    examine_accelerator,
    examine_decoder,
    examine_host,
    quota_of,
)
from tests.forks import Forks


def test_this_machine_is_described(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(forks.python()))
    run_doctor(shards=None, device="cpu", is_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["training"]["device"] == "cpu" and report["training"]["attention"] == "sdpa"
    tried = report["machine"]["accelerator"]["tried"]
    assert {trial["kind"] for trial in tried} == {"clips", "packed captions"}
    assert all(trial["kernels"] and not trial["error"] for trial in tried if trial["attention"] == "sdpa")
    assert report["machine"]["decoder"]["missing"] == []
    assert all(finding["level"] != "broken" and finding["hint"] for finding in report["findings"])
    # The JSON can be read back.
    accelerator_of(report["machine"]["accelerator"])


def test_lines_fit_a_terminal_of_80_columns(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(forks.python()))
    run_doctor(shards=None, device="cpu", is_json=False)
    lines = capsys.readouterr().out.splitlines()
    for label in ("gpu", "torch", "attention", "decoder", "processor", "threads", "disk", "software", "training"):
        assert any(line.startswith(f"{label} ") for line in lines), label
    # Only a word that is longer than a line, such as a path, may exceed the width.
    assert all(len(line) <= 80 or len(line.split()) <= 3 for line in lines)


def test_what_stops_training_ends_with_1(forks: Forks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(forks.python()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(FailedWork, match="1 problem would stop training"):
        run_doctor(shards=None, device="cuda", is_json=True)


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        run_doctor(shards=tmp_path / "nowhere", device="auto", is_json=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file, not a data folder"):
        run_doctor(shards=tmp_path / "file", device="auto", is_json=False)
    with pytest.raises(UserError, match="measures disks, but --shards s3://bucket/data is in object storage"):
        run_doctor(shards=Path("s3://bucket/data"), device="auto", is_json=False)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import time; time.sleep(600)", "did not respond within 3 s"),
        ("import os; os.abort()", "ended with code -6"),
        ("raise SystemExit('the driver is gone')", "ended with code 1: the driver is gone"),
        ("print('{}')", "ended with code 0"),
        ("print('no JSON')", "ended with code 0"),
    ],
)
def test_a_driver_that_hangs_or_kills_is_told_of(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "damaged_driver.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begin_s = time.monotonic()
    report = ask_child(timeout_s=3, module="damaged_driver")
    assert words in (report.torch_error or "")
    assert time.monotonic() - begin_s < 60  # the command returned


def test_a_run_carries_what_costs_it_nothing() -> None:
    facts = doctor_facts(asked_device="auto", device_type="cpu")
    assert {"torch", "decoder", "processor", "threads"} <= facts["lines"].keys()
    assert not {"disk", "attention", "training"} & facts["lines"].keys()


def test_a_run_looks_at_no_gpu_that_it_does_not_use() -> None:
    report = examine_accelerator(runs_trials=False, looks_for_gpus=False)
    assert (report.gpus, report.tried, report.cuda_error) == ([], [], None)
    assert isinstance(report, Accelerator) and report.torch


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("-1 100000", None),
        ("", None),
        ("1 0", None),
    ],
)
def test_the_cgroups_limit_is_read(text: str, cores: float | None) -> None:
    assert quota_of(text) == cores


def test_the_host_and_the_decoder_are_there() -> None:
    host = examine_host()
    assert 1 <= host.allowed_cores <= host.num_cores
    assert host.memory_bytes is None or (host.free_bytes or 0) <= host.memory_bytes
    decoder = examine_decoder()
    assert decoder.error is None and "h264" not in decoder.missing
