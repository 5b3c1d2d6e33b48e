"""Tests of locks in a bucket: one holder at a time, whatever the clocks are and however the holder ends."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from clipmill.manifests.storage import leases
from clipmill.manifests.storage.leases import Fence, Lease, LeaseHeld, LeaseLost, holder_of, is_released
from clipmill.manifests.storage.objects import Objects, open_objects
from tests.object_storage.faults import Fault, Faults

KEY = ".lock"


@pytest.fixture
def objects(bucket: str) -> Objects:
    return open_objects(f"{bucket}/data")


@pytest.fixture
def lease(objects: Objects) -> Iterator[Lease]:
    """Return a lease that this process holds."""
    lease = lease_of(objects)
    lease.acquire()
    yield lease
    lease.release()


def lease_of(objects: Objects) -> Lease:
    return Lease(objects, KEY, resource=objects.url)


def of_another_machine(objects: Objects, **changes: object) -> None:
    """Make the holder a process on an unknown machine."""
    record = {**json.loads(objects.read(KEY)), "machine": "other", "holder": "process 7 on node1"}
    objects.write(KEY, json.dumps({**record, **changes}).encode())


def test_the_second_is_refused_and_told_who_holds_it_since_when(objects: Objects, lease: Lease) -> None:
    of_another_machine(objects)
    with pytest.raises(LeaseHeld) as refused:
        lease_of(objects).acquire()
    assert objects.url in str(refused.value) and "process 7 on node1 since 20" in str(refused.value)
    assert "expires in" in (refused.value.hint or "")


def test_a_released_lease_leaves_a_small_object_and_can_be_taken(objects: Objects, lease: Lease) -> None:
    lease.release()
    assert is_released(objects.info(KEY))
    again = lease_of(objects)
    again.acquire()
    again.release()
    assert not [info.key for info in objects.list() if info.key != KEY]


def test_of_many_at_once_one_wins(objects: Objects) -> None:
    def attempt(_: int) -> Lease | None:
        lease = lease_of(objects)
        try:
            lease.acquire()
        except LeaseHeld:
            return None
        return lease

    with ThreadPoolExecutor(8) as pool:
        held = [lease for lease in pool.map(attempt, range(8)) if lease is not None]
    assert len(held) == 1
    held[0].release()


def test_the_lease_of_a_dead_process_of_this_machine_is_free_at_once(objects: Objects) -> None:
    program = (
        "import os, sys; from clipmill.manifests.storage.leases import Lease;"
        "from clipmill.manifests.storage.objects import open_objects;"
        f"Lease(open_objects(sys.argv[1]), {KEY!r}, resource='x').acquire(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, objects.url], check=False)
    assert objects.info(KEY).size_bytes
    again = lease_of(objects)
    again.acquire()
    again.release()


def test_the_lease_of_a_dead_process_elsewhere_expires(
    objects: Objects, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_machine(objects)
    monkeypatch.setattr(leases, "EXPIRY_S", 0.0)
    again = lease_of(objects)
    again.acquire()
    assert holder_of(objects, objects.info(KEY)) is None  # as long as the lease counts as expired
    monkeypatch.setattr(leases, "EXPIRY_S", 60.0)
    assert (holder_of(objects, objects.info(KEY)) or "").startswith("process ")
    again.release()


@pytest.mark.parametrize("off_s", [-1e6, 1e6])
def test_a_clock_that_is_off_does_not_matter(
    off_s: float, objects: Objects, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_machine(objects)
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + off_s)
    with pytest.raises(LeaseHeld):
        lease_of(objects).acquire()


def test_a_holder_that_lost_its_lease_learns_it_before_it_publishes(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = lease_of(objects)
    lease.acquire()
    fence = Fence(objects, KEY, lease.token)
    fence.require()
    # The other process has taken over the lease while this process was stopped.
    of_another_machine(objects, token="another")
    now_s = leases.now_s
    lease.require()
    monkeypatch.setattr(leases, "now_s", lambda: now_s() + 55)
    with pytest.raises(LeaseLost, match="taken over by process 7 on node1"):
        lease.require()
    objects.write(KEY, b"{}")
    with pytest.raises(LeaseLost):
        fence.require()
    lease.release()
    assert objects.read(KEY) == b"{}"  # a process must not release a lease that it no longer holds


def test_a_lease_that_was_removed_is_lost(objects: Objects, lease: Lease) -> None:
    objects.delete(KEY)
    with pytest.raises(LeaseLost, match="taken over by another process"):
        lease.note("still here")
    lease.release()
    assert not list(objects.list())


def test_a_note_is_read_by_who_waits(objects: Objects, lease: Lease) -> None:
    told: list[str] = []
    lease.note("making shards")

    def on_wait(note: str) -> None:
        told.append(note)
        lease.release()

    other = lease_of(objects)
    other.wait(on_wait=on_wait)
    assert told == ["making shards"] and json.loads(objects.read(KEY))["token"] == other.token
    other.release()


def test_a_holder_that_was_cut_off_renews_its_lease(
    faults: Faults, bucket: str, few_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_objects(f"{bucket}/data")
    lease = lease_of(objects)
    lease.acquire()
    now_s = leases.now_s
    monkeypatch.setattr(leases, "now_s", lambda: now_s() + 500)
    faults.set(Fault("error"))
    with pytest.raises(OSError, match="503"):
        lease.require()
    faults.set(Fault("lost", method="PUT", times=1))  # the renewal takes effect, but its response is lost
    lease.require()
    lease.release()
    assert is_released(objects.info(KEY))


def test_a_lease_is_renewed_while_its_holder_works(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWAL_S", 0.01)
    lease = lease_of(objects)
    lease.acquire()
    while json.loads(objects.read(KEY))["renewals"] < 3:
        time.sleep(0.01)
    lease.require()
    lease.release()
    assert is_released(objects.info(KEY))
