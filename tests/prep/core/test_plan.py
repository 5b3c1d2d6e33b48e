"""Tests of the state of a shard, which one function computes for all columns."""

from itertools import product

import pytest

from clipmill.prep.core.chunk_plan import ShardLookup
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT, FailureCode
from clipmill.prep.core.plan import HeldShards, ShardState, StoredShards, WantedShard, plan_shards, state_of
from clipmill.shards.commits import Commit, Failure, ShardFiles

FILES = ShardFiles("000000-0.tar", 1, "0", "000000-0.index.arrow", 1, "0", 3)


def commit(shard_id: int = 0, *codes: str, fingerprint: str = "f", files: ShardFiles | None = FILES) -> Commit:
    failures = tuple(Failure(f"video{number}", None, code, "") for number, code in enumerate(codes))
    return Commit("text", shard_id, "train", fingerprint, files, failures)


def state(of: Commit | None, **told: object) -> str:
    known = {"problem": None, "retry_codes": TRANSIENT, "what_changed": "its captions", **told}
    return state_of(of, "f", **known)[0]  # type: ignore[arg-type]


def test_damage_comes_before_everything_and_absence_before_change() -> None:
    damaged = (ShardState.CORRUPT, "why")
    assert state(None, problem=damaged) == state(commit(fingerprint="g"), problem=damaged) == ShardState.CORRUPT
    assert state(None) == ShardState.NEW
    assert state(commit(0, FailureCode.TIMEOUT, fingerprint="g")) == ShardState.CHANGED


@pytest.mark.parametrize("code", FailureCode)
def test_a_failure_that_may_pass_is_tried_again(code: FailureCode) -> None:
    may_pass = code in TRANSIENT or code in SOURCE_AWAY
    assert state(commit(0, code)) == (ShardState.RETRY if may_pass else ShardState.CURRENT)
    assert state(commit(0, code), retry_codes=frozenset({code})) == ShardState.RETRY
    still_away = state(commit(0, code), unreadable=frozenset({"video0"}))
    assert still_away == (ShardState.RETRY if code in TRANSIENT else ShardState.CURRENT)


def test_every_committed_shard_is_planned_once() -> None:
    for num_wanted, stored, held in product(range(4), repeat=3):
        shards = [WantedShard(number, "train", "f", 3) for number in range(num_wanted)]
        commits = {number: commit(number, fingerprint="g") for number in range(1, 1 + stored)}
        plan = plan_shards(
            shards,
            StoredShards(commits, problems={}),
            what_changed="its captions",
            orphaned_because="gone",
            held=HeldShards(frozenset(range(1, 1 + held)), "unknown"),
        )
        states = {shard.shard_id: shard.state for shard in plan}
        assert states.keys() == set(range(num_wanted)) | commits.keys()
        for number, found_state in states.items():
            if number not in commits:
                assert found_state == ShardState.NEW
            elif 1 <= number <= held:
                assert found_state == ShardState.CURRENT
            else:
                assert found_state == (ShardState.CHANGED if number < num_wanted else ShardState.ORPHANED)


def test_holders_are_found_by_any_of_their_chunks() -> None:
    names = [f"{number:032x}" for number in range(6)]
    lookup = ShardLookup([(7, names[:2]), (2, [names[3].encode()]), (3, []), (9, [names[0], names[5]])])
    assert len(lookup) == 5 and not ShardLookup([])
    assert (lookup.find(names), lookup.find(names[:1]), lookup.find(names[3:5]), lookup.find([names[4]])) == (
        [2, 7, 9],
        [7, 9],
        [2],
        [],
    )
