"""Running statistics on several ranks: all ranks evaluate the stored weights, and resumed runs are bit-identical."""

import json
from pathlib import Path

import pytest
import torch

from clipmill.train.run.checkpoint import all_checkpoints, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.norm_runs import digest, run_norms
from tests.train.distributed.runs import STRATEGIES


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_evaluate_the_checkpoint_and_resume_it_to_the_bit(tmp_path: Path, num_ranks: int) -> None:
    end_well(fork_ranks(run_norms, tmp_path, size=num_ranks, folder=tmp_path))
    for strategy in STRATEGIES:
        whole, resumed = (RunFolder(tmp_path / name / strategy) for name in ("whole", "resumed"))
        weights, expected = (read_weights(all_checkpoints(run.checkpoints)[4]) for run in (resumed, whole))
        assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == [], strategy
        assert expected["1.1.num_batches_tracked"] == 4 and expected["1.1.running_mean"].abs().sum() > 0
        errors = [[line.get("error") for line in read_lines(run.metrics)] for run in (resumed, whole)]
        assert errors[0] == errors[1] and errors[0][3] is not None
        stored = [digest(read_weights(all_checkpoints(whole.checkpoints)[step]).items()) for step in (2, 4)]
        for rank in range(num_ranks):
            evaluated = json.loads((whole.path / f"evaluated-by-{rank}.json").read_text())
            assert evaluated == stored, (strategy, rank)
