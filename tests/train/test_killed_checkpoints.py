"""Runs that are killed while they write checkpoints lose no checkpoint, and end as if they had not been killed."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from clipmill.manifests.errors import Stopped, UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.run.checkpoint import (
    all_checkpoints,
    checkpoint_name,
    is_intact,
    read_metadata,
)
from clipmill.train.run.checkpoint_writer import recover
from clipmill.train.run.folder import RunFolder
from tests.train.killed import StoppedPoints, killed_at, three_steps, train_and_stop
from tests.train.plane import assert_same, train_plane
from tests.train.running import all_files


def test_a_run_killed_at_any_change_of_names_loses_no_checkpoint_and_ends_the_same(tmp_path: Path) -> None:
    whole = train_plane(three_steps(tmp_path / "whole"))
    files = all_files(whole.path)
    number, status, furthest = 0, None, 0
    while status != 0:
        number += 1
        out = tmp_path / f"killed-{number}"
        folder = RunFolder(out).checkpoints
        status = killed_at(number, train_and_stop, three_steps(out), folder=folder)
        assert status in (0, -signal.SIGKILL)
        assert all(is_intact(path) for path in all_checkpoints(folder).values()), (
            f"change {number} leaves an incomplete checkpoint under a final name"
        )
        recover(folder)
        steps = [*all_checkpoints(folder), 0]
        # A run that is killed later has progressed at least as far, so no complete checkpoint was lost.
        assert max(steps) >= furthest, f"change {number} loses a checkpoint"
        furthest = max(steps)
        assert_same(train_plane(three_steps(out)), whole)
        assert all_files(out) == files, f"change {number} leaves other files"
    assert number > 5 and furthest == 2, "too few changes were seen, so the test proves nothing"


def test_a_checkpoint_that_is_there_is_not_written_again_when_the_run_is_told_to_stop(tmp_path: Path) -> None:
    """The facts about its step, such as the metrics of an evaluation, remain, too."""
    chosen = replace(three_steps(tmp_path / "run"), evaluate=EvaluationSettings(every=1))
    with pytest.raises(Stopped, match="step 2 is saved"):
        train_plane(chosen, kind=StoppedPoints)
    (path,) = all_checkpoints(RunFolder(chosen.out).checkpoints).values()
    assert read_metadata(path).step == 2 and "error" in read_metadata(path).numbers


def test_a_complete_checkpoint_takes_the_place_of_a_damaged_one_and_not_of_an_intact_one(tmp_path: Path) -> None:
    train_plane(three_steps(tmp_path / "run"))
    folder = RunFolder(tmp_path / "run").checkpoints
    final, temporary = folder / checkpoint_name(3), folder / f"{TEMPORARY_PREFIX}{checkpoint_name(3)}"
    for damaged in (True, False):
        shutil.copytree(final, temporary)
        if damaged:
            (final / "tensors.json").write_bytes(b"{}")
        before = final.stat().st_ino
        recover(folder)
        assert is_intact(final) and (final.stat().st_ino != before) == damaged
        assert [path.name for path in folder.iterdir()] == [final.name]


def test_older_checkpoints_stay_until_the_latest_has_been_read(tmp_path: Path) -> None:
    chosen = replace(three_steps(tmp_path / "run"), keep_checkpoints=3)
    train_plane(chosen)
    folder = RunFolder(chosen.out).checkpoints
    (folder / checkpoint_name(3) / "tensors.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="step_000003 cannot be read"):
        train_plane(replace(chosen, keep_checkpoints=1))
    assert list(all_checkpoints(folder)) == [1, 2, 3]
