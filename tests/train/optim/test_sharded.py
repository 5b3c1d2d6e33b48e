"""Two processes with sharded weights take the same steps as one process with unsharded weights."""

from pathlib import Path

from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.optim.sharded_steps import NAMES, compare_steps


def test_sharded_weights_are_stepped_clipped_and_averaged_like_whole_ones(tmp_path: Path) -> None:
    """Each rank asserts this for every optimizer, and records the optimizers."""
    end_well(fork_ranks(compare_steps, tmp_path, size=2, folder=tmp_path))
    assert sorted(path.read_text() for path in tmp_path.glob("compared-*")) == ["\n".join(NAMES)] * 2
