"""Tests that a bucket has one writer: a process that lost a lock changes nothing, whatever the network does."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_bytes, remove
from clipmill.manifests.storage import mirrors, stores
from clipmill.manifests.storage.leases import Lease, LeaseHeld, LeaseLost
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.stores import Conflict
from clipmill.manifests.storage.working_copy import WorkingCopy
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.server import S3Server
from tests.prep.running import wait_until

RECORD = "dataset.json"


@pytest.fixture
def objects(bucket: str) -> Objects:
    """Return the data folder in the bucket, accessed without faults."""
    objects = open_objects(f"{bucket}/data")
    objects.write(RECORD, b"old")
    return objects


@pytest.fixture
def machine(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkingCopy]:
    """Return a function that creates the working copy of a machine, which has listed the bucket."""
    monkeypatch.setattr(mirrors, "_mounted", {})

    def attach(name: str, *, endpoint: str) -> WorkingCopy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        (folder := tmp_path / name).mkdir()
        mirrors.mount(copy := WorkingCopy(objects.url, folder))
        copy.sync()
        return copy

    return attach


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases expire in seconds, and requests time out earlier."""
    scaled = {"EXPIRY_S": 3.0, "RENEWAL_S": 0.5, "WRITE_LIMIT_S": 1.0, "_MARGIN_S": 1.0}
    for name, seconds in scaled.items():
        monkeypatch.setattr(f"clipmill.manifests.storage.leases.{name}", seconds)
    timeouts = {"timeout": timedelta(seconds=scaled["WRITE_LIMIT_S"])}
    for name in ("_TIMEOUTS", "_WRITE_TIMEOUTS"):
        monkeypatch.setattr(f"clipmill.manifests.storage.stores.{name}", timeouts)


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[Future[object]]:
    """Run work in a thread, as a machine that works at the same time."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


@pytest.mark.parametrize(("kind", "method"), [("hang", "PUT"), ("late", "PUT"), ("hang", "POST")])
def test_a_writer_that_is_cut_off_in_the_middle_of_a_request_changes_nothing_of_its_successor(
    kind: str,
    method: str,
    objects: Objects,
    machine: Callable[..., WorkingCopy],
    faults: Faults,
    s3: S3Server,
    short_leases: None,
) -> None:
    cut_off, successor = machine("a", endpoint=faults.endpoint), machine("b", endpoint=s3.endpoint)
    change = publish_bytes if method == "PUT" else lambda path, _: remove(path)

    def write() -> None:
        with cut_off.column_lock(".lock"):
            faults.set(Fault(kind, method=method, path=rf"{RECORD}|\?delete", times=1), Fault("hang"))  # type: ignore[arg-type]
            change(cut_off.folder / RECORD, b"late")

    with in_thread(write) as late:
        wait_until(lambda: faults.seen().num_faults)

        def takes_over() -> bool:
            try:
                with successor.column_lock(".lock"):
                    publish_bytes(successor.folder / RECORD, b"of the successor")
            except LeaseHeld:
                return False
            return True

        wait_until(takes_over)
        faults.set()  # the network works again
        with pytest.raises(LeaseLost):
            late.result()
    assert objects.read(RECORD) == b"of the successor"


def test_a_command_whose_request_for_the_lock_is_late_does_not_begin_with_an_old_listing(
    objects: Objects, machine: Callable[..., WorkingCopy], faults: Faults, s3: S3Server
) -> None:
    late, first = machine("a", endpoint=faults.endpoint), machine("b", endpoint=s3.endpoint)
    with first.column_lock(".lock"):
        pass
    late.sync()
    faults.set(Fault("late", method="PUT", path=r"\.lock"))

    def gc() -> None:
        with late.column_lock(".lock"):
            publish_bytes(late.folder / RECORD, b"by an old listing")

    with in_thread(gc) as run:
        wait_until(lambda: faults.seen().num_faults)
        with first.column_lock(".lock"):
            publish_bytes(first.folder / RECORD, b"new")
        faults.set()
        with pytest.raises(LeaseHeld):
            run.result()
    assert objects.read(RECORD) == b"new"


def test_a_record_is_replaced_only_if_it_is_the_one_that_was_seen(
    objects: Objects, machine: Callable[..., WorkingCopy], s3: S3Server
) -> None:
    copy = machine("a", endpoint=s3.endpoint)
    with copy.column_lock(".lock"):
        objects.write(RECORD, b"of another")
        with pytest.raises(Conflict, match="another command has written it in the meantime"):
            publish_bytes(copy.folder / RECORD, b"mine")
        objects.write("new.json", b"of another")
        with pytest.raises(Conflict):
            publish_bytes(copy.folder / "new.json", b"mine")
    assert objects.read(RECORD) == objects.read("new.json") == b"of another"


def test_a_server_that_names_another_etag_after_a_write_is_no_other_writer(
    objects: Objects, machine: Callable[..., WorkingCopy], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = machine("a", endpoint=faults.endpoint)
    faults.set(Fault("etag", method="PUT"))
    with copy.column_lock(".lock"):
        for content in (b"1", b"2", b"3"):
            publish_bytes(copy.folder / RECORD, content)
        # Renew the lease before each request.
        monkeypatch.setattr("clipmill.manifests.storage.leases._MARGIN_S", 60.0)
        publish_bytes(copy.folder / RECORD, b"4")
    assert faults.seen().num_faults >= 6
    assert objects.read(RECORD) == b"4"
    lease = Lease(objects, ".lock", resource="it")
    lease.acquire()
    lease.release()


def test_changes_outlast_a_server_that_fails_for_long(
    bucket: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    backoff = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 3}
    for settings in (stores._RETRY, stores._WRITE_RETRY):
        monkeypatch.setitem(settings, "backoff", backoff)
    monkeypatch.setitem(stores._WRITE_RETRY, "retry_timeout", timedelta(milliseconds=50))
    monkeypatch.setattr("clipmill.manifests.storage.objects._LAST_PAUSE_S", 0.1)
    objects = open_objects(bucket)
    for fault in (Fault("error"), Fault("error", status=429, code="TooManyRequests"), Fault("reset")):
        for change in (
            lambda: objects.write("k", b"1"),
            lambda: objects.write("k", b"2", replaces=objects.info("k").etag),
            lambda: objects.copy("k", "l"),
            lambda: objects.delete("k", "l"),
        ):
            faults.set(replace(fault, for_s=0.4))
            change()
            assert faults.seen().num_faults > 1
    assert not list(objects.list())


def test_a_server_without_conditional_writes_is_refused(bucket: str, faults: Faults) -> None:
    lease = Lease(open_objects(bucket), ".lock", resource="it")
    faults.set(Fault("error", method="PUT", status=501, code="NotImplemented"))
    with pytest.raises(UserError, match="does not support this request") as refused:
        lease.acquire()
    assert "If-None-Match" in (refused.value.hint or "")


def test_each_attempt_asks_its_guard(bucket: str, faults: Faults, few_retries: None) -> None:
    objects, asked = open_objects(bucket), []
    faults.set(Fault("error", times=7))  # three requests for each attempt: the first, and two retries by obstore
    objects.write("k", b"1", guard=lambda: asked.append(1))
    assert len(asked) == 3

    def lose_lease() -> None:
        raise LeaseLost("lost")

    changes: tuple[Callable[[], object], ...] = (
        lambda: objects.write("k", b"2", guard=lose_lease),
        lambda: objects.copy("k", "other", guard=lose_lease),
        lambda: objects.delete("k", guard=lose_lease),
    )
    for change in changes:
        with pytest.raises(LeaseLost):
            change()
    assert objects.read("k") == b"1" and [info.key for info in objects.list()] == ["k"]
