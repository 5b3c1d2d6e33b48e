"""Tests of what both engines guarantee to functions that keep an object, such as a model, between tasks."""

import functools
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from clipmill.prep.core.failures import EXPLANATIONS, FailureCode, loss_code
from clipmill.prep.engines import Engine, Outcome, processes
from clipmill.prep.engines.execution import Execution, Need
from clipmill.prep.engines.processes import ProcessEngine
from clipmill.prep.engines.ray import isolated_ray_engine

NUM_TASKS = 12


@dataclass(frozen=True)
class Task:
    """Task that returns its worker and how often that worker loaded.

    A `deadly` task always kills its worker, and a `risky` task kills it once.
    """

    number: int
    folder: Path

    @property
    def is_deadly(self) -> bool:
        return self.number == 7

    @property
    def is_risky(self) -> bool:
        return self.number == 3


@functools.cache
def load(folder: Path) -> int:
    with (folder / f"loaded-{os.getpid()}").open("a") as file:
        file.write("x")
    return os.getpid()


def work(task: Task) -> tuple[int, int]:
    worker = load(task.folder)
    first_time = task.folder / f"risky-{task.number}"
    if task.is_deadly or (task.is_risky and not first_time.exists()):
        first_time.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number, worker


def private_ray() -> Engine:
    return isolated_ray_engine(num_workers=2, address=None, need=Need(1, 0, 0), execution=Execution())


@pytest.mark.parametrize(
    "engine", [ProcessEngine(num_workers=2), pytest.param(private_ray(), marks=pytest.mark.nightly)], ids=type
)
def test_workers_keep_what_they_loaded_and_outlive_each_other(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the process engine; test_ray.py tests Ray on a cluster."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    check_workers(engine, tmp_path)


def check_workers(engine: Engine, tmp_path: Path) -> None:
    """Run tasks, some of which kill their worker; each worker loads once, and only deadly tasks may be lost."""
    outcomes: list[Outcome[Task, tuple[int, int]]] = [
        outcome
        for outcome in engine.run(work, (Task(number, tmp_path) for number in range(NUM_TASKS)))
        if isinstance(outcome, Outcome)
    ]
    done = {outcome.task.number: outcome.result for outcome in outcomes}
    assert done.keys() == set(range(NUM_TASKS)) and len(outcomes) == NUM_TASKS
    assert {number for number, result in done.items() if result is None} == {7}
    assert all(result[0] == number for number, result in done.items() if result is not None)
    loaded = list(tmp_path.glob("loaded-*"))
    assert {path.read_text() for path in loaded} == {"x"}
    assert len(loaded) <= 2 + 1 + 3  # two workers, and a new one after each death


def answer_late(parent_end: Path) -> str:
    while not parent_end.exists():
        time.sleep(0.01)
    return "nobody hears it"


def test_a_worker_whose_driver_is_gone_when_it_answers_ends_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = processes._CONTEXT.Process(target=processes._work, args=(answer_late, None, theirs, None))
    worker.start()
    theirs.close()
    ours.send(tmp_path / "gone")
    ours.close()  # the kernel closes the pipe of a killed driver before it kills the worker
    (tmp_path / "gone").touch()
    worker.join(60)
    assert worker.exitcode == 0 and capfd.readouterr().err == ""


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("killed_by", "code", "hint"),
    [
        (signal.SIGKILL, FailureCode.WORKER_LOST, "after signal 9 (SIGKILL), with fewer --workers if memory is short"),
        (signal.SIGABRT, FailureCode.WORKER_CRASHED, "use a different build"),
        (signal.SIGSEGV, FailureCode.WORKER_CRASHED, "use a different build"),
    ],
)
def test_the_hint_about_a_lost_worker_follows_from_its_signal(
    killed_by: signal.Signals, code: FailureCode, hint: str
) -> None:
    engine = ProcessEngine(num_workers=1)
    (lost,) = (outcome for outcome in engine.run(end_by, [killed_by]) if isinstance(outcome, Outcome))
    assert lost.lost is not None and f"signal {killed_by.value} " in lost.lost
    assert loss_code(crashed=lost.crashed) == code and hint in EXPLANATIONS[code][1]
