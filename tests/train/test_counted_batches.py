"""Progress output of `train`: the samples of an evaluation, and the steps of a run."""

import time
from typing import Any

import pytest

from clipmill.manifests.progress import Activity
from clipmill.train.run.tracking import Progress, count_batches, show_batch_counts
from tests.screens import open_screen


class Loaded:
    """A batch of two clips and a failed clip."""

    def __init__(self) -> None:
        self.batch, self.failed = {"position": (0, 1)}, (2,)


def test_batches_are_counted_for_a_command_and_not_in_a_training_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    activities: list[Activity] = []

    def note_activity(what: str) -> Activity:
        activities.append(Activity(what))
        return activities[-1]

    monkeypatch.setattr("clipmill.train.run.tracking.Activity", note_activity)
    batches: Any = [Loaded(), Loaded()]
    assert list(count_batches(batches, "embedding", total=9)) == batches and not activities
    with show_batch_counts():
        assert list(count_batches(batches, "embedding", total=9)) == batches
    assert activities[0].text() == "embedding: 6 of 9 clips"


def test_a_log_of_steps_says_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    progress = Progress()
    progress.begin(100, 200)
    for step in range(101, 201):
        now_s += 2
        progress.show(step, "loss 1")
    progress.close()
    lines = [line.partition("Z ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "step 105/200  loss 1  3:10 left" and lines[-1] == "step 200/200  loss 1"


def test_a_terminal_shows_the_steps_in_its_line_and_keeps_those_of_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    metrics = {"loss": 1.0, "lr": 0.5, "samples_per_s": 3.0, "data_wait_s": 0.0, "step_s": 0.1, "num_failed": 0}
    progress = Progress()
    progress.begin(0, 2)
    assert "training: 0 of 2 steps (" in screen.left()
    progress.log({"step": 1, **metrics, "val/recall_at_1": 0.25})
    for _ in range(1000):
        if "training: 1 of 2 steps, loss 1.0000" in screen.left():
            break
        time.sleep(0.005)
    else:
        raise AssertionError(screen.left())
    progress.close()
    assert screen.left() == "step 1/2  val: recall_at_1 0.25\n"
