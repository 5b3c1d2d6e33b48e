"""Unusable GPUs: the message names the required driver, and training never falls back to the CPU silently."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clipmill.train.device import driver, precision
from clipmill.train.device.driver import is_older, required_driver, why_no_gpu
from clipmill.train.doctor.machine import examine_accelerator
from tests.train.running import SMALL, error_of, train

OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with the kernel files of a machine; an empty folder is a machine without a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(driver, "_VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(driver, "_PCI_DEVICES", tmp_path / "pci")
    for remembered in (why_no_gpu, precision._print_once):
        remembered.cache_clear()
    yield tmp_path
    for remembered in (why_no_gpu, precision._print_once):  # cached results are not valid for other tests
        remembered.cache_clear()


def insert_card(machine: Path, *, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    card = machine / "pci" / f"0000:{vendor}"
    card.mkdir(parents=True)
    (card / "vendor").write_text(f"{vendor}\n")
    (card / "class").write_text(f"{kind}\n")


def test_documents_name_the_driver_that_the_locked_wheels_need(repository: Path) -> None:
    locked = re.search(r"^cuda-toolkit==(\S+)", (repository / "requirements.lock").read_text(), re.MULTILINE)
    assert locked is not None
    needed = required_driver(locked[1])
    assert needed is not None and needed == required_driver(torch.version.cuda or locked[1])
    for name in ("README.md", "docs/start.md"):
        assert f"driver {needed} or later" in (repository / name).read_text(), name


@pytest.mark.parametrize(
    ("version", "other", "older"),
    [("535.104.05", "580.65.06", True), ("580.65.06", "580.65.06", False), ("580.105.08", "580.65.06", False)],
)
def test_versions_are_compared_by_number(version: str, other: str, older: bool) -> None:
    assert is_older(version, other) is older


def test_a_machine_without_a_gpu_is_used_in_silence(machine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    insert_card(machine, vendor="0x8086")
    insert_card(machine, kind="0x040300")  # the audio device of a graphics card
    assert precision.choose_device("auto").type == "cpu"
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA needs no driver")
@pytest.mark.parametrize(("version", "reason"), [(OLD, "535.104.05 is older than 5"), (None, "needs driver 5")])
def test_auto_says_in_one_line_why_it_trains_on_the_cpu(
    machine: Path, capfd: pytest.CaptureFixture[str], version: str | None, reason: str
) -> None:
    insert_card(machine)
    if version is not None:
        (machine / "version").write_text(version)
    for _ in range(2):
        assert precision.choose_device("auto").type == "cpu"
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("note: the CPU is used") and reason in line


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA needs no driver")
def test_the_doctor_gives_the_reason_of_a_run_for_a_card_without_a_driver(machine: Path) -> None:
    insert_card(machine)
    examined = examine_accelerator(runs_trials=False)
    assert examined.driver is None and examined.unusable_gpu == why_no_gpu()
    assert "needs driver 5" in (examined.unusable_gpu or "")


def test_a_list_without_gpus_is_a_choice(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (machine / "version").write_text(OLD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert precision.choose_device("auto").type == "cpu"
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA needs no driver")
def test_require_gpu_refuses_with_the_reason(
    machine: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine / "version").write_text(OLD)
    out = tmp_path / "run"
    assert train("dual-encoder", "--shards", data_dir, *SMALL, "--require-gpu", "--out", out) == 2
    assert "535.104.05 is older than" in error_of(capsys) and not out.exists()
    assert train("dual-encoder", "--shards", data_dir, *SMALL, "--require-gpu", "--device", "cpu", "--out", out) == 2
    assert "contradict" in error_of(capsys)
