"""Metrics that are read one step late: a run ends as if they had been read immediately, and keeps no later state."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import clipmill.train.engine.loop
from clipmill.manifests.errors import FailedWork, Stopped
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.config.training import OptimizerSettings
from clipmill.train.data.batch import Batch, Sample
from clipmill.train.data.loader import SampleRequest, TrainingSet
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.device.transfer import LateMetrics, Scalar, StepGuard
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.state import State
from clipmill.train.losses.objective import Objective
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from tests.tiers import nightly_beyond
from tests.train.device_reads import as_on_a_gpu
from tests.train.plane import CPU, Distance, PlaneTask, Points, assert_same, settings, train_plane

Fault = Literal["loss", "gradient", "order to stop", "bug"]
Faults = Mapping[int, Sequence[Fault]]
SAID = {"loss": "the loss is nan at step {}", "gradient": "the norm of the gradients is nan at step {}"}


class FaultyDistance(Distance):
    """Objective with a fault in some of its steps."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults
        self.keys: dict[int, list[str]] = {}

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        numbers = super().backward(model, batch, step)
        self.keys[step.number] = list(batch["key"])
        faults = self._faults.get(step.number, ())
        if "loss" in faults:
            numbers["loss"] = torch.as_tensor(numbers["loss"]) * float("nan")
        if "gradient" in faults:
            assert self.slope.grad is not None
            self.slope.grad.fill_(float("nan"))
        if "order to stop" in faults:
            os.kill(os.getpid(), signal.SIGTERM)
        if "bug" in faults:
            raise ZeroDivisionError
        return numbers


class FaultyTask(PlaneTask):
    """Plane task with faults in some of its steps, which counts its evaluations."""

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__()
        self.objective = FaultyDistance(faults or {})
        self.num_evaluations = 0

    def build_objective(self, samples: TrainingSet, world: World) -> Objective:
        return self.objective

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        self.num_evaluations += 1
        return {"closeness": 1.0}


def steps(run: RunFolder) -> list[int]:
    return [line["step"] for line in read_lines(run.metrics)]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An undisturbed run."""
    return train_plane(settings(tmp_path_factory.mktemp("whole") / "run"), FaultyTask())


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("at", nightly_beyond([1, 4], [1, 3, 4, 12]))
@pytest.mark.parametrize("every", nightly_beyond([4], [1, 4]))
def test_a_number_that_is_not_finite_ends_the_run_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_run: RunFolder, fault: Fault, at: int, every: int
) -> None:
    states: list[State] = []
    before: dict[str, torch.Tensor] = {}
    take = clipmill.train.engine.loop.run_step

    def watch_step(step: Step, state: State, *args: Any, **kwargs: Any) -> Any:
        states.append(state)
        if step.number == at:
            before.update({name: tensor.clone() for name, tensor in state.tensors().items()})
        return take(step, state, *args, **kwargs)

    monkeypatch.setattr(clipmill.train.engine.loop, "run_step", watch_step)
    chosen = settings(tmp_path / "run", checkpoint_every=every, keep_checkpoints=20)
    task = FaultyTask({at: [fault]})
    with pytest.raises(FailedWork, match=SAID[fault].format(at)):
        train_plane(chosen, task)
    run = RunFolder(chosen.out)
    bad = json.loads((run.path / "bad_batch.json").read_text())
    assert bad["step"] == at and bad["ranks"][0]["keys"] == task.objective.keys[at]
    assert len(task.objective.keys) == at + (at % every != 0), "one more step starts unless a checkpoint needs this one"
    assert steps(run) == list(range(1, at))
    assert list(all_checkpoints(run.checkpoints)) == [step for step in range(1, at) if step % every == 0]
    # The optimizer state is the state before the bad step, although one more step was started.
    for name, value in states[-1].tensors().items():
        if name != "objective.num_seen" and (at > 1 or not name.startswith("optimizer.")):
            assert torch.equal(value, before[name]), name
    train_plane(chosen, FaultyTask())
    assert_same(run, whole_run)


@pytest.mark.parametrize("name", nightly_beyond(["lamb"], ["lion", "lamb", "sgd"]))
def test_no_checkpoint_is_made_of_weights_that_another_optimizer_has_spoilt(tmp_path: Path, name: Any) -> None:
    chosen = settings(tmp_path / "run", checkpoint_every=1, optimizer=OptimizerSettings(name=name), lr=0.01)
    with pytest.raises(FailedWork, match=SAID["gradient"].format(3)):
        train_plane(chosen, FaultyTask({3: ["gradient"]}))
    run = RunFolder(chosen.out)
    assert max(all_checkpoints(run.checkpoints)) == 2
    assert train_plane(chosen, FaultyTask()) and steps(run) == list(range(1, 13))


def test_a_step_whose_numbers_are_bad_is_not_evaluated(tmp_path: Path) -> None:
    chosen = replace(settings(tmp_path / "run"), evaluate=EvaluationSettings(every=2), best="closeness")
    task = FaultyTask({6: ["loss"]})
    with pytest.raises(FailedWork, match=SAID["loss"].format(6)):
        train_plane(chosen, task)
    assert task.num_evaluations == 2
    lines = read_lines(RunFolder(chosen.out).metrics)
    assert [line["step"] for line in lines if "closeness" in line] == [2, 4] and len(lines) == 5


def test_an_order_to_stop_loses_no_line_and_the_run_goes_on_to_the_bit(tmp_path: Path, whole_run: RunFolder) -> None:
    chosen = settings(tmp_path / "run")
    with pytest.raises(Stopped, match="step 5 is saved"):
        train_plane(chosen, FaultyTask({5: ["order to stop"]}))
    run = RunFolder(chosen.out)
    assert steps(run) == [1, 2, 3, 4, 5] and max(all_checkpoints(run.checkpoints)) == 5
    train_plane(chosen, FaultyTask())
    assert_same(run, whole_run)


def test_an_order_to_stop_saves_nothing_after_a_bad_number(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run")
    with pytest.raises(FailedWork, match=SAID["loss"].format(6)):
        train_plane(chosen, FaultyTask({6: ["loss", "order to stop"]}))
    run = RunFolder(chosen.out)
    assert steps(run) == [1, 2, 3, 4, 5] and list(all_checkpoints(run.checkpoints)) == [4]


class FailingFrom(Points):
    """Points that all fail, starting at a position."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self._position = position

    def _load(self, request: SampleRequest) -> Sample | FailedSample:
        if request.position >= self._position:
            return FailedSample(request.position, self.key(request.sample), "undecodable", "as told")
        return super()._load(request)


@pytest.mark.parametrize(
    ("faults", "message", "num_lines"), [({3: ["loss"]}, SAID["loss"].format(3), 2), ({}, "failed", 3)]
)
def test_too_many_failures_in_the_next_step_hide_no_bad_number_and_lose_no_line(
    tmp_path: Path, faults: Faults, message: str, num_lines: int
) -> None:
    chosen = settings(tmp_path / "run", max_failures=0)
    with pytest.raises(FailedWork, match=message):
        train_plane(chosen, FaultyTask(faults), FailingFrom(3 * chosen.batch))
    assert steps(RunFolder(chosen.out)) == list(range(1, num_lines + 1))


@pytest.mark.parametrize(("faults", "last"), [({6: ["bug"]}, 5), ({5: ["loss"], 6: ["bug"]}, 4)])
def test_a_bug_in_the_next_step_loses_no_line_of_a_good_one(tmp_path: Path, faults: Faults, last: int) -> None:
    chosen = settings(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train_plane(chosen, FaultyTask(faults))
    assert steps(RunFolder(chosen.out)) == list(range(1, last + 1))


@pytest.mark.parametrize("name", nightly_beyond(["adamw", "lamb"], ["adamw", "lion", "lamb", "sgd"]))
def test_fp16_leaves_a_step_out_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    """A run that stops immediately before or after the skipped step equals the undisturbed run."""
    monkeypatch.setattr("clipmill.train.device.precision._INITIAL_SCALE", 1024.0)
    faults: dict[int, list[Fault]] = {2: ["gradient"], 6: ["gradient"]}
    changes: dict[str, Any] = {"precision": "fp16", "optimizer": OptimizerSettings(name=name, ema=0.8), "lr": 0.01}
    run = train_plane(settings(tmp_path / "run", **changes), FaultyTask(faults))
    lines = read_lines(run.metrics)
    assert [line["num_skipped"] for line in lines] == [0, *[1] * 4, *[2] * 7]
    assert all(isinstance(line["num_skipped"], int) and isinstance(line["loss_scale"], float) for line in lines)
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [2, 6]
    assert [line["loss_scale"] for line in lines] == [1024.0] * 2 + [512.0] * 4 + [256.0] * 6
    for stop in (5, 6):
        chosen = settings(tmp_path / f"stopped-{stop}", **changes)
        with pytest.raises(Stopped):
            train_plane(chosen, FaultyTask({**faults, stop: [*faults.get(stop, []), "order to stop"]}))
        train_plane(chosen, FaultyTask(faults))
        assert_same(RunFolder(chosen.out), run)


def test_a_step_after_a_bad_one_is_not_taken_though_its_own_numbers_are_good() -> None:
    nan, unit = torch.tensor(float("nan")), torch.tensor(1.0)
    for skips in (True, False):
        soundness = StepGuard(CPU)
        assert soundness.allow(unit, unit, skips=skips)
        assert not soundness.allow(unit, nan, skips=skips)
        assert bool(soundness.allow(unit, unit, skips=skips)) == skips
        assert not soundness.allow(nan, unit, skips=skips)
        assert not soundness.allow(unit, unit, skips=skips)


def test_numbers_come_in_their_order_with_those_that_the_host_knew() -> None:
    late = LateMetrics({"step": 3, "loss": torch.tensor(0.1), "lr": 0.3, "norm": torch.tensor(float("inf"))}, CPU)
    assert list(late.read()) == ["step", "loss", "lr", "norm"]
    assert late.read() == {"step": 3, "loss": torch.tensor(0.1).item(), "lr": 0.3, "norm": torch.inf}
    assert LateMetrics({"lr": 0.3}, CPU).read() == {"lr": 0.3}
