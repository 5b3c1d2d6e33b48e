"""Ranks that resume a run end with the bits of ranks that were never stopped, however many there are."""

from pathlib import Path

import pytest
import torch

from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import STRATEGIES, run_and_resume
from tests.train.test_latents_training import write_columns
from train.run.checkpoint import all_checkpoints, read_metadata, read_weights
from train.run.folder import RunFolder, read_lines


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_that_resume_a_run_end_with_its_bits(tmp_path: Path, num_ranks: int) -> None:
    """Two ranks sum in one order only; three do not."""
    end_well(fork_ranks(run_and_resume, tmp_path, write_columns(tmp_path / "columns"), size=num_ranks, folder=tmp_path))
    for run in [f"{strategy}/{name}" for strategy in STRATEGIES for name in ("plane", "towers")]:
        whole, resumed = RunFolder(tmp_path / "whole" / run), RunFolder(tmp_path / "resumed" / run)
        found, expected = (read_weights(all_checkpoints(one.checkpoints)[5]) for one in (resumed, whole))
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == [], run
        for name in ("step", "loss", "epoch", "num_failed"):
            assert [line[name] for line in read_lines(resumed.metrics)] == [
                line[name] for line in read_lines(whole.metrics)
            ]
    begun = read_metadata(all_checkpoints(RunFolder(tmp_path / "resumed" / "ddp" / "plane").checkpoints)[2])
    assert any(one["ahead"] for one in begun.loader), "no rank was ahead: the test shows less than it says"
