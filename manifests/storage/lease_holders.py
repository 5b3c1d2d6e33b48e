"""The leases that a process holds together, and a look at those of others: of its command, and of other commands."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from clipmill.manifests.storage import leases, stores
from clipmill.manifests.storage.errors import Conflict
from clipmill.manifests.storage.objects import ObjectInfo, Objects

_NUM_THREADS = 32


class HeldLeases:
    """The leases that the writes of this process rest on. Thread-safe.

    Attributes:
        fences: key and token of those that this process holds.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._guards: list[Callable[[], None]] = []  # each raises LeaseLost
        self.fences: list[tuple[str, str]] = []
        self._fenced: set[tuple[str, str]] = set()

    @contextmanager
    def held(self, lease: leases.Lease) -> Iterator[None]:
        """Check a lease, which has been acquired, before each attempt to write; release it at the end.

        Raises:
            LeaseLost: it was found to be lost, whatever the block made of that.
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
        """Check before each attempt to write that the command of this worker still holds a lease."""
        if (key, token) not in self._fenced:
            self._fenced.add((key, token))
            self._guards.append(Fence(self._objects, key, token).require)

    def require(self) -> None:
        """Raise LeaseLost if one of them may be lost before a request that begins now has ended."""
        for require in tuple(self._guards):
            require()


class Fence:
    """Check of a worker that its command still holds a lease, and renews it. Thread-safe."""

    def __init__(self, objects: Objects, key: str, token: str) -> None:
        self._objects, self._key, self._token = objects, key, token
        self._renewed_s = -leases.EXPIRY_S
        self._lock = threading.Lock()

    def require(self) -> None:
        """Raise LeaseLost if the command may not hold the lease before a request has ended; see `changes.Guard`."""
        end_s = leases.now_s() + stores.RETRY_S
        with self._lock:
            while not leases.is_trusted(self._renewed_s):
                begun_s = leases.now_s()
                found, info = leases.read_info(self._objects, self._key)
                if info is None or found.get("token") != self._token:
                    holder = leases.name_of(found) or "nobody"
                    raise leases.LeaseLost(f"the command of this worker has lost its lock; now held by {holder}")
                age_s = leases.server_time_s(self._objects) - info.modified_s
                self._renewed_s = begun_s - max(0.0, age_s)
                if not leases.is_trusted(self._renewed_s):
                    if begun_s > end_s:
                        raise leases.LeaseLost(f"the command of this worker has not renewed its lock for {age_s:.0f} s")
                    time.sleep(leases.LAST_POLL_S)


def holder_of(objects: Objects, info: ObjectInfo) -> str | None:
    """Return who holds a lease and since when; None if it is released, abandoned or expired.

    Without permission to write, the time of the server is unknown, and an expired lease counts as held.
    """
    found = {} if leases.is_released(info) else leases.read(objects, info.key)
    if not found or leases.is_abandoned(found):
        return None
    with suppress(OSError):
        if leases.server_time_s(objects) - info.modified_s >= leases.EXPIRY_S:
            return None
    return f"{leases.name_of(found)} since {found.get('since')}"


def held_leases(objects: Objects, keys: re.Pattern[str], *, but: str = "") -> dict[str, dict[str, Any]]:
    """Return the records of the leases directly in the folder that processes hold, by key; leave out the key `but`.

    The leases of processes that have died are released, so that none of these can publish after this has returned.

    Raises:
        OSError: the bucket cannot be read, or not written.
    """
    listed = (info for info in objects.list(recursive=False) if info.key != but and keys.fullmatch(info.key))
    found = [info for info in listed if not leases.is_released(info)]
    if not found:
        return {}
    now_s = leases.server_time_s(objects)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        records = list(pool.map(lambda info: _held_record(objects, info, now_s=now_s), found))
    return {info.key: record for info, record in zip(found, records, strict=True) if record}


def _held_record(objects: Objects, info: ObjectInfo, *, now_s: float) -> dict[str, Any]:
    """Return the record of a lease; release it and return nothing if its holder has died."""
    found = leases.read(objects, info.key)
    if found and (leases.is_abandoned(found) or now_s - info.modified_s >= leases.EXPIRY_S):
        try:
            objects.write(info.key, leases.released_content(), replaces=info.etag)
        except Conflict:  # renewed, released or removed meanwhile
            return leases.read(objects, info.key)
        return {}
    return found
