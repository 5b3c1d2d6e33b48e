"""In a step the host waits for the GPU once, and for the step before; tests/train sees the same on a CPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import FailedWork
from clipmill.train.config.training import OptimizerSettings
from clipmill.train.device.transfer import DeviceEvent, LateMetrics
from clipmill.train.engine.failures import FailureLog, SyncedBatch
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.gpu.runs import TASKS, Runs
from tests.train.device_reads import device_reads
from tests.train.plane import settings
from tests.train.running import train
from tests.train.test_late_numbers import SAID, Fault, FaultyTask, steps, train_plane

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_STEPS = 6
SLEEP_CYCLES = 200_000_000  # a tenth of a second
MORE = {
    "dual-encoder": ["--augment.rand-ops", "2", "--augment.erase", "0.5", "--microbatch", "4"],
    "dual-encoder-latents": ["--loss.kind", "fastclip-v3", "--optimizer.ema", "0.9"],
    "classify": ["--precision", "fp16"],
    "caption": ["--precision", "fp16", "--optimizer.name", "lamb"],
}


@contextmanager
def waits(patch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """Where the host waits, by the number of the step: as torch says, and where the metrics of a step are read."""
    waits_seen: list[tuple[int, str]] = []
    at = 0
    next_batch, read = FailureLog.next_batch, LateMetrics.read

    def beginning(self: FailureLog, *args: Any, **kwargs: Any) -> SyncedBatch:
        nonlocal at
        at += 1
        return next_batch(self, *args, **kwargs)

    def reading(self: LateMetrics) -> dict[str, float]:
        if self._names:
            waits_seen.append((at, f"numbers of {self._numbers['step']}"))
        return read(self)

    def note_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        # The thread that copies batches waits for its own stream.
        if "synchroniz" in str(message) and not filename.endswith("prefetch.py"):
            waits_seen.append((at, f"{filename}:{lineno}"))

    patch.setattr(FailureLog, "next_batch", beginning)
    patch.setattr(LateMetrics, "read", reading)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", note_warning)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits_seen
        finally:
            torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("task", TASKS)
def test_each_step_waits_once_and_for_the_step_before(
    task: str, runs: Runs, device: torch.device, is_dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_dry_run and task != "dual-encoder-latents":
        pytest.skip("not in the dry run: tests/train/test_host_waits.py looks at runs of every task on a CPU")
    command = runs.command(task, device, *MORE.get(task, []), "--steps", str(NUM_STEPS), out=tmp_path / "run")
    if is_dry_run:
        with device_reads(monkeypatch) as reads:
            assert not train(*command)
        looks = [
            (look.step, f"numbers of {look.numbers_of}" if look.numbers_of else look.where) for look in reads.looks
        ]
    else:
        with waits(monkeypatch) as looks:
            assert not train(*command)
    # The first step of a process sends what is the same in all others; the last one's numbers are read at once.
    expected = [(step, f"numbers of {step - 1}") for step in range(2, NUM_STEPS)]
    assert [wait for wait in looks if 2 <= wait[0] < NUM_STEPS] == expected


def test_torch_says_where_the_host_waits(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on."""
    values = torch.ones(4, device=cuda)
    with waits(monkeypatch) as waits_seen:
        values.sum().item()
        values[values > 2]
        torch.tensor([1.0], device=cuda)
    assert len(waits_seen) >= 3 and all(f"{Path(__file__).name}:" in where for _, where in waits_seen), waits_seen


def test_numbers_are_there_when_they_are_read_and_nothing_waits_before(cuda: torch.device) -> None:
    value = torch.zeros((), device=cuda)
    began = DeviceEvent(cuda)
    torch.cuda._sleep(SLEEP_CYCLES)
    value += 0.5
    late = LateMetrics({"step": 1, "loss": value}, cuda)
    assert late.end._event is not None and not late.end._event.query(), "the host waited for the device"
    value += 1
    assert late.read() == {"step": 1, "loss": 0.5}
    assert late.end.seconds_since(began) > 0


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_number_that_is_not_finite_ends_the_run_at_its_step(
    tmp_path: Path, device: torch.device, fault: Fault
) -> None:
    chosen = settings(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(FailedWork, match=SAID[fault].format(5)):
        train_plane(chosen, FaultyTask({5: [fault]}), device=device)
    run = RunFolder(chosen.out)
    assert steps(run) == [1, 2, 3, 4] and max(all_checkpoints(run.checkpoints)) == 4
    train_plane(chosen, FaultyTask(), device=device)
    assert steps(run) == list(range(1, 13))


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "sgd"])
def test_fp16_leaves_a_step_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, name: Any
) -> None:
    monkeypatch.setattr("clipmill.train.device.precision._INITIAL_SCALE", 1024.0)
    chosen = settings(tmp_path / "run", precision="fp16", optimizer=OptimizerSettings(name=name), lr=0.01)
    run = train_plane(chosen, FaultyTask({6: ["gradient"]}), device=device)
    lines = read_lines(run.metrics)
    assert [line["num_skipped"] for line in lines] == [0] * 5 + [1] * 7
    assert [line["loss_scale"] for line in lines] == [1024.0] * 6 + [512.0] * 6
