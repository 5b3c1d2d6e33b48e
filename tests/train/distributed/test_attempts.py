"""Restarted ranks find one another, whatever earlier ranks left in the store."""

import threading
import time

import pytest
import torch.distributed as dist

from clipmill.train.distributed.launch import name_attempt
from clipmill.train.distributed.world import World


def names_of_ranks(store: dist.Store, *, size: int) -> set[str]:
    names: list[str] = []

    def run(rank: int) -> None:
        names.append(name_attempt(store, World(rank=rank, size=size)))

    # Rank 0 starts last, so the other ranks first see the entries of an earlier attempt.
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(names) == size
    return set(names)


def test_each_attempt_has_a_name_of_its_own_that_all_ranks_know() -> None:
    store = dist.HashStore()
    names_met = [names_of_ranks(store, size=3) for _ in range(3)]
    assert all(len(names) == 1 for names in names_met) and len(set.union(*names_met)) == 3


def test_a_rank_that_left_before_it_was_answered_is_nobody_to_wait_for() -> None:
    store = dist.HashStore()
    store.set("asks/1", "somebody who is gone")
    assert len(names_of_ranks(store, size=2)) == 1


def test_ranks_say_whom_they_wait_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that fails before it joins, for example because of a wrong flag, cannot tell the others."""
    monkeypatch.setattr("clipmill.train.distributed.launch._REMIND_S", 0.1)
    store, names = dist.HashStore(), list[str]()
    waiting = [
        threading.Thread(
            target=lambda rank=rank: names.append(name_attempt(store, World(rank=rank, size=3))), daemon=True
        )
        for rank in (1, 0, 2)
    ]
    waiting[0].start()
    message = _said_with("rank 1 of 3 is waiting for rank 0 to start", capfd)
    waiting[1].start()
    message += _said_with("rank 0 of 3 is waiting for rank 2 to start; see their logs", capfd)
    waiting[2].start()
    for thread in waiting:
        thread.join(60)
    assert len(names) == 3 and len(set(names)) == 1


def _said_with(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    stderr, latest_s = "", time.monotonic() + 60
    while text not in stderr and time.monotonic() < latest_s:
        stderr += capfd.readouterr().err
        time.sleep(0.02)
    assert text in stderr
    return stderr
