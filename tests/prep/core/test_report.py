"""Tests of the last lines of a run."""

from dataclasses import replace
from pathlib import Path

from clipmill.prep.core.report import summary_report
from clipmill.prep.core.run import Summary
from clipmill.prep.engines import RefusedNode
from clipmill.shards.commits import Failure


def test_a_run_whose_videos_were_all_skipped_says_so_and_why() -> None:
    failures = [Failure(name, None, "source_too_large", "the source has 9 bytes") for name in ("a", "b")]
    summary = Summary("h264", num_shards=2, num_shards_made=2, failures=failures)
    text = summary_report(summary, list_path=Path("failures.jsonl")).text
    assert "made     no chunks in 2 shards: 2 videos skipped (source_too_large)\n" in text
    partly = replace(summary, num_shards=1, num_shards_empty=1, num_encoded=3)
    assert (
        "made     1 shard, and 1 without chunks: 3 chunks encoded" in summary_report(partly, list_path=Path("f")).text
    )
    left_out = replace(summary, refused_workers=[RefusedNode("node 5f on gpu-7", "it was lost")])
    assert "excluded node 5f on gpu-7: it was lost\n" in summary_report(left_out, list_path=Path("f")).text
    assert "0 chunks encoded" not in text and "a: source_too_large: the source has 9 bytes" in text
