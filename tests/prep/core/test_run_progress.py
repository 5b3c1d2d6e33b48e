"""Tests of what an interrupted run reports about its work."""

import pytest

from clipmill.manifests.errors import Stopped
from clipmill.prep.core.progress import RunProgress


def _progress() -> RunProgress:
    return RunProgress("encoding", noun="chunk", num_samples=36, work=36.0, sample_s=15.0, num_shards=3)


def test_an_interruption_counts_the_shards_that_are_kept_and_the_chunks_that_are_not() -> None:
    with pytest.raises(KeyboardInterrupt) as stop, _progress() as progress:
        progress.show(6, 6.0, has_begun=True)
        raise KeyboardInterrupt
    assert str(stop.value) == (
        "this run has finished 0 of 3 shards (0 chunks); 6 chunks of unfinished shards will be made again"
    )


def test_a_stopped_run_with_finished_shards_alone_loses_nothing() -> None:
    pattern = r"^finished work is kept; this run has finished 1 of 3 shards \(12 chunks\); run the same command again"
    with pytest.raises(Stopped, match=pattern), _progress() as progress:
        progress.finish_shard(12)
        progress.show(12, 12.0, has_begun=True)
        raise Stopped("finished work is kept")
