"""The training loop: resuming is exact, failures are budgeted, and a non-finite loss stops the run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.engine.loop import check_batch
from clipmill.train.run.checkpoint import latest_checkpoint
from clipmill.train.run.folder import RunFolder, append_lines, keep_lines, read_lines
from clipmill.train.run.tracking import Progress
from tests.tiers import nightly_beyond
from tests.train.plane import LoadedPoints, Points, assert_same, settings, train_plane
from tests.train.running import losses

CPU = torch.device("cpu")


def stop_after(steps: int) -> Callable[[Any, dict[str, Any]], None]:
    def show(self: Any, line: dict[str, Any]) -> None:
        if line["step"] == steps:
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize("failing", [(), (3, 11)])
@pytest.mark.parametrize("stop", nightly_beyond([4, 6], [1, 4, 6, 9]))
def test_a_run_that_is_stopped_and_resumed_is_the_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, failing: tuple[int, ...]
) -> None:
    points = Points(failing=failing)
    whole = train_plane(settings(tmp_path / "whole"), points=points)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "log", stop_after(stop))
        with pytest.raises(KeyboardInterrupt):
            train_plane(settings(tmp_path / "broken"), points=points)
    torch.manual_seed(99)  # simulates other uses of the generator in between
    assert_same(train_plane(settings(tmp_path / "broken", workers=1), points=points), whole)


@pytest.mark.parametrize(("batch", "num_samples", "fitting"), [(21, 20, 16), (64, 16, 16), (2, 1, 1)])
def test_a_batch_of_more_than_all_samples_is_refused_with_one_that_fits(
    tmp_path: Path, batch: int, num_samples: int, fitting: int
) -> None:
    samples = LoadedPoints(Points(), settings(tmp_path))
    samples.num_samples = num_samples
    with pytest.raises(UserError, match=f"--batch {batch} is larger than the {num_samples} training sample") as raised:
        check_batch(settings(tmp_path, batch=batch), samples)
    assert raised.value.hint == f"use --batch {fitting}, or add data"
    check_batch(settings(tmp_path, batch=fitting), samples)


def test_settings_that_were_edited_by_hand_are_no_settings_of_the_checkpoint(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run")
    train_plane(chosen)
    with pytest.raises(UserError, match=r"--lr is 0\.5, .*step_.* has"):
        train_plane(replace(chosen, lr=0.5, steps=chosen.steps))


def test_the_seed_decides_the_run(tmp_path: Path) -> None:
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_plane(settings(tmp_path / name, seed=seed))
        runs.append(losses(tmp_path / name))
    assert runs[0] == runs[1] != runs[2]


def test_failures_are_listed_and_the_budget_stops_the_run(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", max_failures=3)
    run = RunFolder(chosen.out)
    with pytest.raises(FailedWork, match=r"4 samples failed, more than --max-failures 3: .*failures\.jsonl") as stopped:
        train_plane(chosen, points=Points(failing=(3, 11)))
    assert "2 files or chunks failed repeatedly (point_" in str(stopped.value)
    lines = read_lines(run.failures)
    assert [line["key"] for line in lines].count("point_3") == 2 and len(lines) == 4
    assert {line["reason"] for line in lines} == {"undecodable"}
    train_plane(replace(chosen, max_failures=100), points=Points(failing=(3, 11)))
    assert read_lines(run.metrics)[-1]["num_failed"] == len(read_lines(run.failures)) > 4


def test_a_loss_that_is_no_number_stops_with_the_keys_of_its_batch(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run")
    with pytest.raises(FailedWork, match=r"the loss is nan at step \d+; .*bad_batch\.json"):
        train_plane(chosen, points=Points(poisoned=7))
    assert "point_7" in (chosen.out / "bad_batch.json").read_text()


def test_other_samples_than_those_of_the_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path / "run")
    train_plane(chosen)
    monkeypatch.setattr(Points, "fingerprint", "other points")
    with pytest.raises(UserError, match="to other samples"):
        train_plane(chosen)


def test_the_latest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing") is None
    for name in ("step_999999", "step_000005", "step_1000000", ".tmp-step_2000000"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1000000"


def test_a_line_that_a_killed_process_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 1}, {"step": 2}, {"step": 3}])
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert keep_lines(path, lambda line: line["step"] <= 2) == [{"step": 1}, {"step": 2}]
    append_lines(path, [{"step": 3}])
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
