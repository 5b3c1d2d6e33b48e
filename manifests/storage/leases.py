"""Locks in a bucket: an object that one process at a time holds, and that expires when its holder has died.

The holder writes the object under the condition that nobody else has (If-None-Match for a new object, If-Match for a
released one), writes it again every `RENEWAL_S` seconds, and empties it at the end. A lease that has not been renewed
for `EXPIRY_S` seconds may be taken over. Its age is the difference of two times of the server, so that the clocks of
the machines do not matter. A holder that was stopped or cut off for so long renews its lease under the same condition
before it publishes anything; if another process has taken it over, it raises `LeaseLost` instead.
"""

import json
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.errors import FailedWork, UserError
from manifests.publish import TEMPORARY_PREFIX
from manifests.storage.errors import Conflict
from manifests.storage.objects import ObjectInfo, Objects

RENEWAL_S = 15.0
EXPIRY_S = 60.0
_MARGIN_S = 10.0
_CHECK_S = 5.0  # a worker asks at most this often whether its command still holds the lease
_FIRST_POLL_S, _LAST_POLL_S = 0.25, 4.0  # who waits asks less and less often
_NUM_THREADS = 32


class LeaseHeld(UserError):
    """Another process holds the lease: `holder`, which has noted `note`; `is_alive` if it is seen to run."""

    holder = note = "unknown"
    is_alive = False


class LeaseLost(FailedWork, OSError):
    """Another process has taken over the lease."""


class Lease:
    """A lease of this process. Thread-safe once acquired.

    Args:
        key: key of the object.
        what: what the lease protects, for messages.
        note: text for others who look at the lease.
    """

    def __init__(self, objects: Objects, key: str, *, what: str, note: str = "") -> None:
        self._objects, self.key, self._what, self._note = objects, key, what, note
        self.token = secrets.token_hex(16)
        self._etag = ""
        self._num_renewals = 0
        self._renewed_s = 0.0
        self._since = ""
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._lost_to: str | None = None

    def acquire(self) -> None:
        """Take the lease.

        Raises:
            LeaseHeld: another process holds it.
            AccessRefused: the bucket is not writable.
        """
        etag = self._etag_if_free()
        begun_s = _now_s()
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        try:
            self._etag = self._objects.write(self.key, self._content(), only_new=etag is None, replaces=etag)
        except Conflict:  # another process that found it free was faster
            raise self._held(_read(self._objects, self.key)) from None
        self._renewed_s = begun_s
        threading.Thread(target=self._renew_until_released, name=f"lease {self.key}", daemon=True).start()

    def wait(self, *, on_wait: Callable[[str], object] = lambda note: None) -> None:
        """Take the lease as soon as it is free.

        Args:
            on_wait: called once with the note of the holder if the lease is not free.
        """
        is_told = False
        while True:
            try:
                self.acquire()
                return
            except LeaseHeld as held:
                if not is_told:
                    is_told = True
                    on_wait(held.note)
            self._await_change()

    def take_over(self, *, on_wait: Callable[[str], object]) -> None:
        """Take the lease; if it is held, wait as long as its holder gives no sign of life.

        Args:
            on_wait: called once with the name of the holder.

        Raises:
            LeaseHeld: the holder runs on this machine, or has renewed the lease.
            AccessRefused: the bucket is not writable.
        """
        first: ObjectInfo | None = None
        while True:
            state = self._state()
            try:
                self.acquire()
                return
            except LeaseHeld as held:
                if held.is_alive or (first is not None and state != first):
                    raise
                if first is None:
                    first = state
                    on_wait(held.holder)
            time.sleep(_LAST_POLL_S)

    def _await_change(self) -> None:
        """Wait until somebody writes the object; return in time as well to see whether the holder has died."""
        before = self._state()
        interval_s = _FIRST_POLL_S
        while before is not None and before.size_bytes and interval_s <= _LAST_POLL_S:
            time.sleep(interval_s * random.uniform(0.5, 1.0))
            if self._state() != before:
                return
            interval_s *= 2

    def _state(self) -> ObjectInfo | None:
        try:
            return self._objects.info(self.key)
        except FileNotFoundError:
            return None

    def require(self) -> None:
        """Raise LeaseLost if another process may hold the lease; call it before anything is published."""
        with self._lock:
            if self._lost_to is None and _now_s() - self._renewed_s > EXPIRY_S - _MARGIN_S:
                self._renew()
            self._require_not_lost()

    def note(self, text: str) -> None:
        """Replace the note.

        Raises:
            LeaseLost: another process holds the lease.
        """
        with self._lock:
            self._note = text
            if self._lost_to is None:
                self._renew()
            self._require_not_lost()

    def _require_not_lost(self) -> None:
        if self._lost_to is not None:
            raise LeaseLost(
                f"the lock of {self._what} was taken over by {self._lost_to}, because it was not renewed for "
                f"{EXPIRY_S:g} s; nothing more is published; run the same command again"
            )

    def release(self) -> None:
        """Empty the object, if this process still holds the lease."""
        self._released.set()
        with self._lock:
            if self._lost_to is None:
                with suppress(Conflict, OSError):  # it expires
                    self._objects.write(self.key, b"", replaces=self._etag)

    def _renew_until_released(self) -> None:
        while not self._released.wait(RENEWAL_S):
            with self._lock:
                if self._released.is_set() or self._lost_to is not None:
                    return
                with suppress(OSError):  # tried again later; `require` notices if it stays so
                    self._renew()

    def _renew(self) -> None:
        begun_s = _now_s()
        self._num_renewals += 1
        try:
            self._etag = self._objects.write(self.key, self._content(), replaces=self._etag)
            self._renewed_s = begun_s
        except (Conflict, FileNotFoundError):
            self._lost_to = _name_of(_read(self._objects, self.key)) or "another process, which has finished"

    def _content(self) -> bytes:
        record = {
            "holder": f"process {os.getpid()} on {os.uname().nodename}",
            "since": self._since,
            "token": self.token,
            "machine": _machine(),
            "process": os.getpid(),
            "started": _start_of(os.getpid()),
            "renewals": self._num_renewals,
            "note": self._note,
        }
        return (json.dumps(record, indent=1) + "\n").encode()

    def _etag_if_free(self) -> str | None:
        """Return the etag of the object if it is released, abandoned or expired; None if it does not exist."""
        try:
            info = self._objects.info(self.key)
        except FileNotFoundError:
            return None
        found = _read(self._objects, self.key) if info.size_bytes else {}
        if found and not is_abandoned(found):
            age_s = server_time_s(self._objects) - info.modified_s
            if age_s < EXPIRY_S:
                raise self._held(found, expires_in_s=EXPIRY_S - age_s)
        return info.etag

    def _held(self, found: dict[str, Any], *, expires_in_s: float | None = None) -> LeaseHeld:
        since = f" since {found['since']}" if found.get("since") else ""
        expiry = "" if expires_in_s is None else f"; if it was killed, its lock expires in {max(1, expires_in_s):.0f} s"
        held = LeaseHeld(
            f"another command is writing to {self._what} ({_name_of(found) or 'unknown'}{since})",
            hint=f"wait until it finishes, or stop it{expiry}",
        )
        held.is_alive = found.get("machine") == _machine()
        held.holder = _name_of(found) or "unknown"
        held.note = str(found.get("note") or held.holder)
        return held


class Fence:
    """Check of a worker that its command still holds a lease."""

    def __init__(self, objects: Objects, key: str, token: str) -> None:
        self._objects, self._key, self._token = objects, key, token
        self._checked_s = -_CHECK_S

    def require(self) -> None:
        """Raise LeaseLost if the command does not hold the lease any more."""
        if _now_s() - self._checked_s < _CHECK_S:
            return
        found = _read(self._objects, self._key)
        if found.get("token") != self._token:
            raise LeaseLost(f"the command of this worker has lost its lock; now held by {_name_of(found) or 'nobody'}")
        self._checked_s = _now_s()


def holder_of(objects: Objects, info: ObjectInfo) -> str | None:
    """Return who holds a lease and since when; None if it is released, abandoned or expired.

    Without permission to write, the time of the server is unknown, and an expired lease counts as held.
    """
    found = _read(objects, info.key) if info.size_bytes else {}
    if not found or is_abandoned(found):
        return None
    with suppress(OSError):
        if server_time_s(objects) - info.modified_s >= EXPIRY_S:
            return None
    return f"{_name_of(found)} since {found.get('since')}"


def held_leases(objects: Objects, keys: re.Pattern[str], *, but: str = "") -> dict[str, dict[str, Any]]:
    """Return the records of the leases directly in the folder that processes hold, by key; leave out the key `but`.

    The leases of processes that have died are released, so that none of these can publish after this has returned.

    Raises:
        OSError: the bucket cannot be read, or not written.
    """
    listed = (info for info in objects.list(recursive=False) if info.key != but and keys.fullmatch(info.key))
    found = [info for info in listed if info.size_bytes]
    if not found:
        return {}
    now_s = server_time_s(objects)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        records = list(pool.map(lambda info: _record_if_held(objects, info, now_s=now_s), found))
    return {info.key: record for info, record in zip(found, records, strict=True) if record}


def _record_if_held(objects: Objects, info: ObjectInfo, *, now_s: float) -> dict[str, Any]:
    """Return the record of a lease; release it and return nothing if its holder has died."""
    found = _read(objects, info.key)
    if found and (is_abandoned(found) or now_s - info.modified_s >= EXPIRY_S):
        try:
            objects.write(info.key, b"", replaces=info.etag)
        except (Conflict, FileNotFoundError):  # renewed, released or removed meanwhile
            return _read(objects, info.key)
        return {}
    return found


def is_abandoned(found: dict[str, Any]) -> bool:
    """Return True if the holder was a process of this machine that does not run any more."""
    if found.get("machine") != _machine():
        return False
    return _start_of(int(found.get("process", 0))) != found.get("started")


def server_time_s(objects: Objects) -> float:
    """Return the time of the server, in seconds since the epoch: the time of a new object."""
    while True:
        key = f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-dataset.json"  # a name that is cleaned up if this is killed
        objects.write(key, b"")
        try:
            return objects.info(key).modified_s
        except FileNotFoundError:  # another command is cleaning up at this moment
            continue
        finally:
            objects.delete(key)


def _read(objects: Objects, key: str) -> dict[str, Any]:
    try:
        return _parsed(objects.read(key))
    except FileNotFoundError:
        return {}


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _name_of(found: dict[str, Any]) -> str:
    return str(found.get("holder") or "")


def _now_s() -> float:
    """Return seconds since the start of the machine, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """Return what identifies a running machine and its view of process numbers (containers have their own)."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return secrets.token_hex(16)  # unknown: equal to no other


def _start_of(process: int) -> str | None:
    """Return when a process was started, in ticks since the start of the machine; None if it does not run."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
