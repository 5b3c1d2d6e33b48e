"""Leases: locks in buckets. Only one process can hold a lease, and a lease expires unless its holder renews it.

A process takes a lease by writing the object on the condition that no other process has written it (If-None-Match for a
new object, If-Match for a released or expired lease). The holder rewrites the object every `RENEWAL_S` seconds, and
releases the lease by replacing the content with a random number. Each version of the object has different content, so
no two versions have the same etag. If a lease was not renewed for `EXPIRY_S` seconds, another process may take it over.
The age of a lease is the difference between two timestamps from the server, so it does not depend on the machines'
clocks.

`objects.py` calls `require` before each request that changes an object. If the lease could expire before the request
ends, the holder first renews it. If another process has taken over the lease, the request is not sent, and `LeaseLost`
is raised.

`HeldLeases` contains all leases of a process. A worker holds no lease itself, but checks that its command still holds
the leases (`Fence`).
"""

import json
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.locks import is_abandoned, machine_id, process_record
from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.manifests.storage import stores
from clipmill.manifests.storage.objects import ObjectInfo, Objects
from clipmill.manifests.storage.stores import WRITE_LIMIT_S, Conflict

RENEWAL_S = 15.0
EXPIRY_S = 60.0
_MARGIN_S = 6.0  # safety margin, because a server may round times to seconds
_FIRST_POLL_S, LAST_POLL_S = 0.25, 4.0  # first and last polling interval; the interval doubles while a process waits
_RELEASED_BYTES = 32  # size of a released lease, which contains hexadecimal digits; earlier versions left it empty


class LeaseHeld(UserError):
    """Another process holds the lease.

    Attributes:
        holder: Name of the holder.
        note: Note in the lease, or the name of the holder if there is no note.
        is_alive: True if the holder is known to be running.
    """

    holder = note = "unknown"
    is_alive = False


class LeaseLost(FailedWork, OSError):
    """The lease is lost, or was not renewed in time and may be lost."""


class Lease:
    """Lease of this process. Thread-safe after `acquire`.

    Args:
        key: Key of the object.
        resource: Name of the protected resource, for messages.
        note: Text in the lease for other processes.

    Attributes:
        replaced_object: Object of the free lease that this lease has replaced; None if there was no object.
    """

    def __init__(self, objects: Objects, key: str, *, resource: str, note: str = "") -> None:
        self._objects, self.key, self._resource, self._note = objects, key, resource, note
        self.token = secrets.token_hex(16)
        self.replaced_object: ObjectInfo | None = None
        self._etag = ""
        self._num_renewals = 0
        self._renewed_s = 0.0
        self._start_time = ""
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._new_holder: str | None = None

    def acquire(self) -> None:
        """Take the lease without waiting, and renew it in the background until it is released.

        Raises:
            LeaseHeld: Another process holds the lease.
            AccessRefused: The bucket is not writable.
        """
        free = self._find_free()
        start_s = now_s()
        self._start_time = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            self._etag = self._objects.write(
                self.key, self._content(), only_new=free is None, replaces=free.etag if free else None
            )
        except Conflict:  # another process has taken the free lease first
            raise self._lease_held(read(self._objects, self.key)) from None
        self._renewed_s, self.replaced_object = start_s, free
        threading.Thread(target=self._renew_until_released, name=f"lease {self.key}", daemon=True).start()

    def wait(self, *, on_wait: Callable[[str], object] = lambda note: None) -> None:
        """Wait until the lease is free, and take it.

        Args:
            on_wait: Function that is called once with the note in the lease if the lease is not free.
        """
        has_reported = False
        while True:
            try:
                self.acquire()
                return
            except LeaseHeld as held:
                if not has_reported:
                    has_reported = True
                    on_wait(held.note)
            # Wait until the object is rewritten, but only for a limited time, because the holder may have died.
            state, interval_s = self._state(), _FIRST_POLL_S
            while state is not None and not is_released(state) and interval_s <= LAST_POLL_S:
                time.sleep(interval_s * random.uniform(0.5, 1.0))
                if self._state() != state:
                    break
                interval_s *= 2

    def take_over(self, *, on_wait: Callable[[str], object]) -> None:
        """Take the lease. If another process holds it, but may have died, wait until the lease expires.

        Args:
            on_wait: Function that is called once with the name of the holder if the lease is not free.

        Raises:
            LeaseHeld: The holder is running on this machine, or has renewed the lease in the meantime.
            AccessRefused: The bucket is not writable.
        """
        first_state: ObjectInfo | None = None
        while True:
            state = self._state()
            try:
                self.acquire()
                return
            except LeaseHeld as held:
                if held.is_alive or (first_state is not None and state != first_state):
                    raise
                if first_state is None:
                    first_state = state
                    on_wait(held.holder)
            time.sleep(LAST_POLL_S)

    def _state(self) -> ObjectInfo | None:
        try:
            return self._objects.info(self.key)
        except FileNotFoundError:
            return None

    def require(self) -> None:
        """Check that no other process can take over the lease during a request that starts now (`objects.Guard`).

        If the lease could expire earlier, renew it.

        Raises:
            LeaseLost: Another process holds the lease.
            OSError: The lease could expire, and the bucket cannot be reached.
        """
        with self._lock:
            if self._new_holder is None and not is_trusted(self._renewed_s):
                self._renew()
            self.require_not_lost()

    def note(self, text: str) -> None:
        """Replace the note in the lease.

        Raises:
            LeaseLost: Another process holds the lease.
        """
        with self._lock:
            self._note = text
            if self._new_holder is None:
                self._renew()
            self.require_not_lost()

    def require_not_lost(self) -> None:
        """Raise LeaseLost if the lease is known to be lost."""
        if self._new_holder is not None:
            raise LeaseLost(
                f"the lock of {self._resource} was taken over by {self._new_holder}, because it was not renewed for "
                f"{EXPIRY_S:g} s; nothing more is published; run the same command again"
            )

    def release(self) -> None:
        """Release the lease if this process still holds it."""
        self._released.set()
        with self._lock:
            if self._new_holder is None:
                with suppress(OSError):  # if the request fails, the lease expires
                    self._rewrite(released_content())

    def _renew_until_released(self) -> None:
        while not self._released.wait(RENEWAL_S):
            with self._lock:
                if self._released.is_set() or self._new_holder is not None:
                    return
                with suppress(OSError, UserError):  # retried in the next period; `require` raises an error in time
                    self._renew()

    def _renew(self) -> None:
        start_s = now_s()
        self._num_renewals += 1
        if self._rewrite(self._content()):
            self._renewed_s = start_s

    def _rewrite(self, content: bytes) -> bool:
        """Write the object if this process holds the lease. Otherwise, record the new holder, and return False."""
        for is_last in (False, True):
            try:
                self._etag = self._objects.write(self.key, content, replaces=self._etag)
                break
            except Conflict:
                record, info = read_info(self._objects, self.key)
                if info is None or record.get("token") != self.token:
                    self._new_holder = name_of(record) or "another process, which has finished"
                    return False
                if is_last:
                    raise
                self._etag = info.etag  # some servers return a different etag in the response to a write
        return True

    def _content(self) -> bytes:
        record = {
            **process_record(),
            "since": self._start_time,
            "token": self.token,
            "renewals": self._num_renewals,
            "note": self._note,
        }
        return (json.dumps(record, indent=1) + "\n").encode()

    def _find_free(self) -> ObjectInfo | None:
        """Return the object of a lease that is released, abandoned or expired, or None if there is no object.

        Raises:
            LeaseHeld: Another process holds the lease.
        """
        try:
            info = self._objects.info(self.key)
        except FileNotFoundError:
            return None
        record = {} if is_released(info) else read(self._objects, self.key)
        if record and not is_abandoned(record):
            age_s = server_time_s(self._objects) - info.modified_s
            if age_s < EXPIRY_S:
                raise self._lease_held(record, expires_in_s=EXPIRY_S - age_s)
        return info

    def _lease_held(self, record: dict[str, Any], *, expires_in_s: float | None = None) -> LeaseHeld:
        since = f" since {record['since']}" if record.get("since") else ""
        expiry = "" if expires_in_s is None else f"; if it was killed, its lock expires in {max(1, expires_in_s):.0f} s"
        error = LeaseHeld(
            f"another command is writing to {self._resource} ({name_of(record) or 'unknown'}{since})",
            hint=f"wait until it finishes, or stop it{expiry}",
        )
        error.is_alive = record.get("machine") == machine_id()
        error.holder = name_of(record) or "unknown"
        error.note = str(record.get("note") or error.holder)
        return error


def server_time_s(objects: Objects) -> float:
    """Write a temporary object, and return its time: the server's current time in seconds since the epoch."""
    while True:
        key = f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-dataset.json"  # if this process is killed, others remove it
        objects.write(key, b"")
        try:
            return objects.info(key).modified_s
        except FileNotFoundError:  # another command has just removed the object
            continue
        finally:
            objects.delete(key)


def released_content() -> bytes:
    """Return random content for a released lease."""
    return secrets.token_hex(_RELEASED_BYTES // 2).encode()


def is_released(info: ObjectInfo) -> bool:
    """Return True if a lease is released."""
    return info.size_bytes <= _RELEASED_BYTES


def is_trusted(renewed_s: float) -> bool:
    """Return True if a lease that was renewed at `renewed_s` cannot expire during a request that starts now."""
    return now_s() - renewed_s <= EXPIRY_S - WRITE_LIMIT_S - _MARGIN_S


def read(objects: Objects, key: str) -> dict[str, Any]:
    """Return the record in a lease, or {} if the lease is released or does not exist."""
    return read_info(objects, key)[0]


def read_info(objects: Objects, key: str) -> tuple[dict[str, Any], ObjectInfo | None]:
    """Return the record in a lease, as `read` does, and the metadata of its object (None if there is no object)."""
    try:
        content, info = objects.read_version(key)
    except FileNotFoundError:
        return {}, None
    try:
        record = json.loads(content)
    except ValueError:
        return {}, info
    return record if isinstance(record, dict) else {}, info


def name_of(record: dict[str, Any]) -> str:
    """Return the name of the holder in the record of a lease."""
    return str(record.get("holder") or "")


def now_s() -> float:
    """Return the time since the machine was started, in seconds, including the time it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_NUM_THREADS = 32


class HeldLeases:
    """Leases that a process, or the command of a worker, must hold while the process writes. Thread-safe.

    Attributes:
        fences: Key and token of each lease that this process itself holds.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._guards: list[Callable[[], None]] = []  # functions that raise LeaseLost
        self.fences: list[tuple[str, str]] = []
        self._fenced_leases: set[tuple[str, str]] = set()

    @contextmanager
    def hold(self, lease: Lease) -> Iterator[None]:
        """Context manager that checks a lease before each attempt to write, and releases the lease at the end.

        Raises:
            LeaseLost: The lease was lost during the block, even if the block has handled the error.
        """
        fence = (lease.key, lease.token)
        self._guards.append(lease.require)
        self.fences.append(fence)
        try:
            yield
            lease.require_not_lost()
        finally:
            self._guards.remove(lease.require)
            self.fences.remove(fence)
            lease.release()

    def fence(self, key: str, token: str) -> None:
        """Before each later attempt to write, check that the command of this worker still holds a lease."""
        if (key, token) not in self._fenced_leases:
            self._fenced_leases.add((key, token))
            self._guards.append(Fence(self._objects, key, token).require)

    def require(self) -> None:
        """Check all leases before a request that starts now.

        Raises:
            LeaseLost: A lease is lost, or could be lost before the request ends.
        """
        for guard in tuple(self._guards):
            guard()


class Fence:
    """Guard in a worker that checks whether the worker's command still holds and renews a lease. Thread-safe."""

    def __init__(self, objects: Objects, key: str, token: str) -> None:
        self._objects, self._key, self._token = objects, key, token
        self._renewed_s = -EXPIRY_S
        self._lock = threading.Lock()

    def require(self) -> None:
        """Check that the command cannot lose the lease during a request that starts now (`objects.Guard`).

        Raises:
            LeaseLost: Another process holds the lease, or the command has not renewed it in time.
        """
        end_s = now_s() + stores.RETRY_S
        with self._lock:
            while not is_trusted(self._renewed_s):
                start_s = now_s()
                record, info = read_info(self._objects, self._key)
                if info is None or record.get("token") != self._token:
                    holder = name_of(record)
                    state = f"{holder} holds it now" if holder else "no process holds it now"
                    raise LeaseLost(f"the command of this worker has lost its lock; {state}")
                age_s = server_time_s(self._objects) - info.modified_s
                self._renewed_s = start_s - max(0.0, age_s)
                if not is_trusted(self._renewed_s):
                    if start_s > end_s:
                        raise LeaseLost(f"the command of this worker has not renewed its lock for {age_s:.0f} s")
                    time.sleep(LAST_POLL_S)


def holder_of(objects: Objects, info: ObjectInfo) -> str | None:
    """Return the holder of a lease and the time of acquisition, or None if it is released, abandoned or expired.

    Without write permission, the time of the server is unknown, so an expired lease counts as held.
    """
    record = {} if is_released(info) else read(objects, info.key)
    if not record or is_abandoned(record):
        return None
    with suppress(OSError):
        if server_time_s(objects) - info.modified_s >= EXPIRY_S:
            return None
    return f"{name_of(record)} since {record.get('since')}"


def held_leases(objects: Objects, keys: re.Pattern[str], *, ignored_key: str = "") -> dict[str, dict[str, Any]]:
    """Return the records of held leases by key, and release the leases of dead processes.

    After this call, a process that is presumed dead can no longer publish anything.

    Args:
        objects: Objects under the URL that directly contains the leases.
        keys: Pattern of the keys to consider.
        ignored_key: Key of a lease to ignore.

    Raises:
        OSError: The bucket cannot be read or written.
    """
    matches = (info for info in objects.list(recursive=False) if info.key != ignored_key and keys.fullmatch(info.key))
    infos = [info for info in matches if not is_released(info)]
    if not infos:
        return {}
    time_s = server_time_s(objects)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        records = list(pool.map(lambda info: _held_record(objects, info, time_s=time_s), infos))
    return {info.key: record for info, record in zip(infos, records, strict=True) if record}


def _held_record(objects: Objects, info: ObjectInfo, *, time_s: float) -> dict[str, Any]:
    """Return the record in a lease. If the lease is abandoned or expired, release it, and return an empty record."""
    record = read(objects, info.key)
    if record and (is_abandoned(record) or time_s - info.modified_s >= EXPIRY_S):
        try:
            objects.write(info.key, released_content(), replaces=info.etag)
        except Conflict:  # the lease was renewed, released or removed in the meantime
            return read(objects, info.key)
        return {}
    return record
