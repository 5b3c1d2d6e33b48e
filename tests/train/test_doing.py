"""What a command says while it works: at once, now and then in a log, and on one line of a terminal."""

import time
from typing import Any

import pytest

from train.run import doing
from train.run.doing import Doing, clock, counted_batches, counting_batches, log_interval
from train.run.tracking import Progress


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("time.monotonic", found)
    return found


class Loaded:
    """A batch of three clips, of which one failed."""

    def __init__(self) -> None:
        self.batch, self.failed = {"position": (0, 1)}, (2,)


def test_durations_are_those_of_a_clock() -> None:
    assert [clock(one) for one in (0.4, 34, 725, 3723)] == ["0:00", "0:34", "12:05", "1:02:03"]


def test_lines_of_a_log_become_rarer() -> None:
    assert [log_interval(one) for one in (0, 60, 200, 10_000)] == [5.0, 5.0, 10.0, 60.0]


def test_the_line_says_how_much_is_done_how_fast_and_how_long_it_takes(now: Clock) -> None:
    work = Doing("embedding", total=1000, unit="clips")
    assert work.text() == "embedding 1,000 clips ..."
    now.now_s += 10
    work.add(200)
    assert work.text() == "embedding: 200/1,000 clips  20.0/s  0:40 left"
    unknown = Doing("embedding", total=None, unit="clips")
    now.now_s += 12
    assert unknown.text() == "embedding ... 0:12"
    unknown.add(6)
    assert unknown.text() == "embedding: 6 clips  0.5/s"


def wait_for(work: Doing) -> None:
    for _ in range(2000):
        if work._is_shown:
            return
        time.sleep(0.005)
    raise AssertionError("nothing was shown")


def test_long_work_is_named_and_short_work_is_not(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with Doing("blinking"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(doing, "_FIRST_S", 0.0)
    with Doing("importing torch") as work:
        wait_for(work)
    captured = capsys.readouterr()
    assert captured.err.startswith("importing torch ...\n") and captured.out == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Doing("importing torch") as work:
        wait_for(work)
    assert capsys.readouterr().err == "\r\x1b[Kimporting torch ...\r\x1b[K", "a terminal keeps no trace of it"


def test_other_processes_of_a_launch_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(doing, "_FIRST_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    with Doing("importing torch") as work:
        assert not work._thread.is_alive()
    assert capsys.readouterr().err == ""


def test_batches_are_counted_for_a_command_and_not_in_a_training_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Doing] = []

    class Noted(Doing):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(doing, "Doing", Noted)
    batches: Any = [Loaded(), Loaded()]
    assert list(counted_batches(batches, "embedding", total=6)) == batches and not made
    with counting_batches():
        assert list(counted_batches(batches, "embedding", total=6)) == batches
    assert made[0]._num_done == 6


def test_a_log_of_steps_says_how_long_the_rest_takes(now: Clock, capsys: Any) -> None:
    progress = Progress()
    progress.begin(100, 200)
    for step in range(101, 201):
        now.now_s += 2
        progress.show(step, "loss 1")
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 103/200  loss 1  3:14 left" and lines[-1] == "step 200/200  loss 1"
