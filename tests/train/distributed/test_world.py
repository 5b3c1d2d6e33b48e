"""Ranks: their coordinates, their parts of a batch, and their heartbeats."""

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.heartbeat import SILENT_S, Watch
from clipmill.train.distributed.launch import open_world
from clipmill.train.distributed.parallel import divide
from clipmill.train.distributed.world import World


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    assert World(size=4).share(64) == 16
    with pytest.raises(UserError, match="--batch 10 is not a multiple of the number of processes, 4") as caught:
        World(size=4).share(10)
    assert caught.value.hint is not None and "--batch 8" in caught.value.hint


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with open_world(device_type="cpu") as world:
        assert world == World() and world.gather_objects("mine") == ["mine"]
        assert world.first(lambda: 3) == 3


def test_an_environment_that_is_half_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    missing = "RANK is set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"
    with pytest.raises(UserError, match=missing), open_world(device_type="cpu"):
        pass
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match="WORLD_SIZE is 'two'"), open_world(device_type="cpu"):
        pass


def test_a_rank_that_falls_silent_is_noticed_within_a_minute() -> None:
    watch = Watch(World(rank=0, size=3))
    for second in range(0, 100, 5):
        assert watch.reason_to_stop({0: str(second), 1: str(second), 2: "left"}, now_s=second) is None
    quiet = [watch.reason_to_stop({0: str(second), 1: "95", 2: "left"}, now_s=second) for second in range(100, 160, 5)]
    noticed = next(index for index, reason in enumerate(quiet) if reason is not None)
    assert quiet[noticed] == f"rank 1 has sent no heartbeat for {SILENT_S:g} s"
    assert 5 * noticed < 60


def test_a_rank_that_says_why_it_stops_is_quoted_after_a_moment() -> None:
    watch = Watch(World(rank=1, size=2))
    messages = {0: "failed: UserError: out of GPU memory", 1: "7"}
    assert watch.reason_to_stop(messages, now_s=3.0) is None, "the rank may notice the failure itself"
    assert watch.reason_to_stop(messages, now_s=14.0) == "rank 0 has stopped: UserError: out of GPU memory"


def test_a_store_that_does_not_answer_is_given_up() -> None:
    watch = Watch(World(rank=1, size=2))
    assert watch.reason_to_stop({0: "1", 1: "1"}, now_s=0.0) is None
    assert watch.reason_to_stop(None, now_s=SILENT_S - 1) is None
    assert watch.reason_to_stop({0: "2", 1: "2"}, now_s=SILENT_S) is None
    reason = watch.reason_to_stop(None, now_s=2 * SILENT_S + 1)
    assert reason is not None and "the machine of rank 0 has not responded" in reason


def test_state_is_divided_evenly_and_alike_on_all_ranks() -> None:
    sizes = [5, 100, 1, 40, 60, 7]
    owners = divide(sizes, 2)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in (0, 1)]
    assert sum(loads) == sum(sizes) and abs(loads[0] - loads[1]) <= 7
    assert divide([1], 3) == [0]
