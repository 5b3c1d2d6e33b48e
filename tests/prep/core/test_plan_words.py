"""Tests of plans as text: how shards are grouped, and how each group is described."""

from dataclasses import replace
from pathlib import Path

from clipmill.prep.core.failure_list import failure_lines
from clipmill.prep.core.failures import EXPLANATIONS, FailureCode
from clipmill.prep.core.plan import DiskUse, ShardPlan, ShardState
from clipmill.prep.core.report import MAX_LISTED, states_lines
from clipmill.shards.commits import Failure


def shard(shard_id: int, state: ShardState, num_chunks: int, reason: str = "", copied: int | None = None) -> ShardPlan:
    return ShardPlan(
        shard_id=shard_id,
        split="train",
        state=state,
        reason=reason,
        plan_fingerprint="",
        rows=range(0),
        num_chunks=num_chunks,
        num_copied=copied,
    )


def test_a_group_has_one_line_with_its_numbers() -> None:
    shards = [
        shard(0, ShardState.CURRENT, 20),
        shard(1, ShardState.NEW, 1),
        shard(2, ShardState.CHANGED, 6, copied=6),
        shard(3, ShardState.CHANGED, 1250, copied=1000),
        shard(4, ShardState.CHANGED, 250, copied=0),
        shard(5, ShardState.ORPHANED, 0, "the videos are no longer in the manifest"),
    ]
    assert states_lines(shards, reasons={2: "captions changed", 3: "1 new video", 4: "1 new video"}) == [
        "kept     20 chunks in 1 shard",
        "to do    1 chunk encoded into 1 shard: not made yet",
        "to do    6 chunks copied into 1 shard: captions changed",
        "to do    500 chunks encoded and 1,000 copied into 2 shards: 1 new video",
        "to do    1 shard removed: the videos are no longer in the manifest",
    ]


def test_what_is_unknown_beforehand_is_a_limit() -> None:
    changed = shard(0, ShardState.CHANGED, 12, "its chunks have changed")
    assert states_lines([changed], verb="score") == [
        "to do    at most 12 chunks scored into 1 shard: its chunks have changed; unchanged samples are copied"
    ]


def test_damaged_shards_are_named_up_to_a_limit() -> None:
    damaged = [shard(number, ShardState.CORRUPT, 2, "the tar is short") for number in range(MAX_LISTED + 2)]
    lines = states_lines(damaged)
    assert lines[0].startswith("to do    at most 44 chunks encoded into 22 shards: files are damaged")
    assert lines[1] == "shard 000000  corrupt: the tar is short" and lines[-1] == "... and 2 more shards"


def test_the_disk_is_said_to_be_too_small() -> None:
    use = DiskUse(
        data_bytes=5_000_000,
        variant_bytes={"a": 3_000_000, "b": 1_000_000},
        has_variant=False,
        added_bytes=(2e6, 9e6),
        freed_bytes=4_000_000,
        free_bytes=8_000_000,
    )
    first, others, warning = use.lines()
    assert first == "disk     4 MB in 2 variants now; 2 to 9 MB to be added; 8 MB free (complete data folder: 5 MB)"
    assert others.strip() == "2 other variants are kept until this variant is complete; then `prep gc` frees up to 4 MB"
    assert warning.startswith("warning  the run may fill the disk") and not use.fits
    assert replace(use, free_bytes=None).fits, "the free space of a bucket is unknown"


def test_every_failure_has_words_and_advice() -> None:
    assert set(EXPLANATIONS) == set(FailureCode)
    lines = failure_lines(
        [Failure("clip", None, "no_video", "clip.mp3: no video stream")], list_path=Path("list.jsonl")
    )
    assert lines == [
        "failed   1 x no_video: the file has no video stream",
        "         hint: remove it, and run prep manifest again",
        "         clip: no_video: clip.mp3: no video stream",
        "         complete list: list.jsonl",
    ]
    for code, (_, advice) in EXPLANATIONS.items():
        lines = failure_lines(
            [Failure("a", None, code, "")], list_path=None, retry_command=("prep", "retry", "--column", "own")
        )
        assert lines[1] == f"         hint: {advice.replace('{retry}', 'prep retry --column own')}"
        assert lines[1].count("prep retry") == lines[1].count("prep retry --column own"), (
            "it retries a different column"
        )


def test_a_value_that_is_not_finite_need_not_come_from_a_model() -> None:
    meaning, advice = EXPLANATIONS[FailureCode.NOT_FINITE]
    assert meaning == "a value is NaN or infinite" and "if the value comes from a model" in advice
