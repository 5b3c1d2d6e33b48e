"""Tests of a command's progress output: one line on a terminal, occasional lines in a log."""

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from clipmill.manifests import progress
from clipmill.manifests.progress import Activity, ProgressRate, amount_text, join_parts, log_interval
from tests.screens import open_screen


def open_log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_FIRST_LINE_S", 0.02)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.02)
    return stream


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_terminal_shows_the_work_at_once_and_keeps_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    streams = sys.stdout, sys.stderr
    with Activity("planning"):
        assert screen.left().startswith("planning (") and not screen.has_cursor
        with Activity("looking at 7 videos") as now:
            now.counter("looking at 7 videos")(3, 7)
            wait_for(lambda: "━" in screen.left() and "looking at 7 videos: 3 of 7" in screen.left())
            print("a note")
        wait_for(lambda: "planning" in screen.left().splitlines()[-1])
    assert screen.left() == "a note\n"
    assert (screen.has_cursor, sys.stdout, sys.stderr) == (True, *streams)


def test_an_unfinished_line_of_other_output_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    with Activity("planning"):
        sys.stdout.write("one ")
        time.sleep(0.05)
        sys.stdout.write("line\n")
    assert screen.left() == "one line\n"
    with Activity("planning"):
        sys.stdout.write("not ended")
    assert "not ended" in screen.left()


def test_an_error_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    with pytest.raises(ValueError, match="broken"), Activity("planning"):
        raise ValueError("broken")
    assert screen.left() == ""


def test_a_narrow_terminal_gets_a_shorter_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    monkeypatch.setenv("COLUMNS", "12")
    with Activity("planning for a long time"):
        assert screen.left() == "planning fo…"


def test_a_log_gets_lines_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(monkeypatch)
    with Activity("starting") as now:
        wait_for(lambda: log.getvalue().count("\n") >= 2)
        now.say("3 of 4", work="encoding")
        wait_for(lambda: "encoding: 3 of 4" in log.getvalue())
    lines = log.getvalue().splitlines()
    assert lines[0].endswith("] starting") and all(
        re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \[\d+:\d\d\] ", line) for line in lines
    )
    assert "\r" not in log.getvalue() and "\x1b" not in log.getvalue()


def test_short_work_says_nothing_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_FIRST_LINE_S", 3600.0)
    with Activity("planning"):
        pass
    assert stream.getvalue() == ""


def test_other_processes_of_a_launch_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with Activity("importing torch"):
        time.sleep(0.1)
    assert log.getvalue() == ""


def test_what_is_counted_is_shown_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    work = Activity("embedding")
    add = work.adder(1000, unit="clip")
    add(0)
    assert work.text() == "embedding: 0 of 1,000 clips"
    now_s += 10
    add(200)
    assert work.text() == "embedding: 200 of 1,000 clips, 20/s, 0:40 left"
    add(800)
    assert work.text() == "embedding"
    add = work.adder(None, unit="clip")
    now_s += 12
    add(6)
    assert work.text() == "embedding: 6 clips, 30.0/min"
    assert amount_text(0, 1, "tar") == "0 of 1 tar" and amount_text(1, None, "tar") == "1 tar"


def test_lines_of_a_log_become_rarer() -> None:
    assert [log_interval(seconds) for seconds in (0, 60, 200, 10_000)] == [10.0, 10.0, 60.0, 60.0]


def test_the_time_left_follows_the_present_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pace = ProgressRate()
    assert join_parts(pace.rate(), pace.time_left(100)) == ""
    for _ in range(600):  # nothing for ten minutes, while a model is loaded
        now_s += 1
        pace.add(0)
    for done in range(1, 1201):
        now_s += 1
        pace.add(done)
    assert pace.per_s == pytest.approx(1.0, rel=0.02), "a slow phase long ago must not count"
    assert join_parts(pace.rate(), pace.time_left(1260)) == "1.0/s, 1:00 left" and len(pace._samples) < 250
    assert pace.time_left(1200) == ""
