"""The tars of a remote column at addresses, as `mapped_tars` has local ones: whole from the cache, or record by record.

Tars that fit under the limit of the cache are fetched whole in the background, each once per machine, and mapped as
they arrive. Until then, and always for tars that do not fit, `hold_record` fetches a record by range to the address
that it has in its tar, where it stays until `release_record`.

So the order of samples does not depend on the size of the cache. In a full shuffle over a set that is larger, the rest
is read record by record in every epoch, which takes as many bytes as the epoch shows; fetching whole tars for single
records would take thousands of times as many. Nothing that is mapped is given up before the set is: evicting by last
use would always evict what a full shuffle needs next.

A record of a copy on disk that does not match its checksum is fetched again, and the copy leaves the cache.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.cache import CachedFile, NoRoom, shown_size
from clipmill.manifests.storage.errors import Unanswered
from clipmill.shards.open_maps import MAX_OPEN_MAPS
from clipmill.shards.reader import Variant
from clipmill.train.data.mapped_tars import JoinedTars, MappedTars, mapped_tars
from clipmill.train.data.memory_maps import MADV_DONTNEED, MADV_NOHUGEPAGE, advise, map_file, map_memory, move_pages
from clipmill.train.data.remote import RemoteTars
from clipmill.train.data.remote_files import cache_unusable, is_local

_NUM_FETCHED_AT_ONCE = 4
_RETRY_AFTER_S = 0.2  # to see whether another process has fetched a tar
_JOIN_TIMEOUT_S = 10.0
_NUM_ATTEMPTS = 3
# A mapped tar splits the area that is reserved, and so counts twice among the maps that the kernel allows (open_maps).
_MAX_MAPPED = MAX_OPEN_MAPS // 2
_PAGE = mmap.PAGESIZE


@dataclass
class _Held:
    """A record that was fetched, or is being fetched."""

    num_users: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: OSError | None = None


class RemoteMaps(MappedTars):
    """The tars of remote variants; a record is at the same place in its area as in a `MappedTars`. Thread-safe.

    Args:
        tars: of the data folder.
        whole: the variant whose tars are fetched now, because they are needed as a whole.

    Attributes:
        num_readers: threads that hold records ahead of those that use them.

    Raises:
        UserError: a tar that is needed as a whole cannot be fetched, or does not fit into the cache.
    """

    def __init__(self, variants: Sequence[Variant], tars: RemoteTars, *, whole: Variant | None = None) -> None:
        self.num_readers = tars.num_readers
        self._tars, self._shards = tars, [shard for variant in variants for shard in variant.shards()]
        self._mapped: NDArray[np.bool_] = np.zeros(len(self._shards), bool)
        self._wanted: NDArray[np.bool_] = np.zeros(len(self._shards), bool)
        self._locks = [threading.Lock() for _ in self._shards]
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._edges: Counter[int] = Counter()  # pages at the ends of held records, which may be shared
        self._is_fetching = False
        super().__init__(variants)
        if whole is not None:
            first = sum(variant.num_shards for variant in variants[: list(variants).index(whole)])
            self._fetch_whole(range(first, first + whole.num_shards), column=whole.directory.parent.name)

    def _map_all(self) -> None:
        """Tars that are in the cache are mapped once it is known which are wanted."""

    def _reserve(self) -> int:
        begin = map_memory(self.size_bytes, is_writable=True)
        advise(begin, self.size_bytes, MADV_NOHUGEPAGE)  # a record would take up to two huge pages more
        return begin

    @property
    def is_local(self) -> bool:
        """Whether all tars that records are in are mapped, so that none has to be held."""
        return bool(self._mapped[self._wanted].all())

    def describe(self) -> str:
        """How much is in the cache, for the log."""
        wanted, cache = self._wanted, self._tars.cache
        here, fitting, whole = (
            int(self._sizes[which].sum()) for which in (wanted & self._mapped, self._chosen(), wanted)
        )
        limit = f"{'80% of the free disk' if cache.is_derived else '--cache-size'}: {shown_size(cache.limit_bytes)}"
        part = "" if fitting == whole else f"; {shown_size(fitting)} of them fit, and the rest is read by range"
        return f"{shown_size(here)} of {shown_size(whole)} of tars in the cache {cache.folder} ({limit}{part})"

    def want(self, addresses: NDArray[np.int64]) -> None:
        """Name the addresses of all records of a set, and map those of their tars that are in the cache."""
        self._wanted[np.unique(np.searchsorted(self.starts, addresses, side="right") - 1)] = True
        cache, found = self._tars.cache, set(self._tars.cache.names())
        numbers = np.flatnonzero(self._wanted & ~self._mapped).tolist()
        # What is here already costs nothing.
        for number in sorted(numbers, key=lambda number: self._name(number) not in found):
            shard, name = self._shards[number], self._name(number)
            has_room = len(cache.claims) < _MAX_MAPPED
            fits = has_room and cache.claim({name: shard.tar_bytes}, only_if_it_fits=True)
            if fits and name in found and (copy := cache.find(name, size_bytes=shard.tar_bytes)):
                self._map_copy(number, copy)

    def begin_fetching(self) -> None:
        """See `MappedTars`: those that fit into the cache, until this object is gone."""
        numbers = np.flatnonzero(self._chosen() & ~self._mapped).tolist()
        if not numbers or self._is_fetching:
            return
        self._is_fetching = True
        # The processes of a machine begin in different places; a tar that another one fetches is left to it.
        share = int(os.environ.get("LOCAL_RANK") or 0) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        pending = deque(numbers)
        pending.rotate(-int(len(numbers) * share))
        end, arguments = threading.Event(), (weakref.ref(self), pending)
        threads = [
            threading.Thread(target=_fetch_all, args=(*arguments, end), name="cache", daemon=True)
            for _ in range(min(_NUM_FETCHED_AT_ONCE, len(numbers)))
        ]
        for thread in threads:
            thread.start()
        # At the end of the program too: a thread must not come back from a request into an interpreter that is gone.
        weakref.finalize(self, _stop, end, threads)

    def hold_record(self, address: int, size: int) -> bool:
        """Fetch a record, so that it can be read until `release_record`; False if its tar is mapped, or not of these.

        Raises:
            OSError: it cannot be fetched; `release_record` is due nevertheless.
        """
        if not self.begin <= address < self.begin + self.size_bytes or self._mapped[number := self._number_at(address)]:
            return False
        with self._lock:
            held = self._held.setdefault(address, _Held())
            held.num_users += 1
            is_first = held.num_users == 1
            if is_first:
                self._edges.update(_edges(address, size))
        if not is_first:
            held.done.wait()
            if held.error is not None:
                raise held.error
            return True
        try:
            content = self._tars.read(self._path(number), address - int(self.starts[number]), size)
            with self._locks[number]:
                if not self._mapped[number]:
                    ctypes.memmove(address, content, size)
        except OSError as error:
            held.error = error
            raise
        finally:
            held.done.set()
        return True

    def release_record(self, address: int, size: int) -> None:
        """Give back what `hold_record` held; its memory is freed with its last user."""
        with self._lock:
            if (held := self._held.get(address)) is None:
                return  # its tar was mapped when it was asked for
            held.num_users -= 1
            if held.num_users:
                return
            del self._held[address]
            first, last = _edges(address, size)
            self._edges.subtract((first, last))
            free = [page for page in {first, last} if not self._edges[page]]
            for page in free:
                del self._edges[page]
            number = self._number_at(address)
            with self._locks[number]:
                if self._mapped[number]:
                    return  # these are pages of a copy by now, and may have been repaired
                for page in free:
                    advise(page * _PAGE, _PAGE, MADV_DONTNEED)
                if last > first + 1:
                    advise((first + 1) * _PAGE, (last - first - 1) * _PAGE, MADV_DONTNEED)

    def _name_of(self, number: int) -> str:
        return self._tars.name(self._path(number))

    def repair(self, address: int, size: int) -> bool:
        """See `MappedTars`: of a copy on disk that is damaged; fetched from the object."""
        number = self._number_at(address)
        if not self._mapped[number]:
            return False
        start = int(self.starts[number])
        begin = address - address % _PAGE
        end = min(-(-(address + size) // _PAGE) * _PAGE, start + int(self._sizes[number]))
        content = self._tars.read(self._path(number), begin - start, end - begin)
        spare = map_memory(len(content), is_writable=True)
        ctypes.memmove(spare, content, len(content))
        # At once: another thread may be reading a neighbour on one of these pages.
        move_pages(spare, begin, len(content))
        self._tars.cache.drop(self._name(number))
        return True

    def fetch(self, number: int, *, waits: bool, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Fetch a tar into the cache and map it; False if another process is fetching it and `waits` is False."""
        if self._mapped[number]:
            return True
        copy = self._tars.fetch(self._shards[number], waits=waits, is_over=is_over)
        if copy is None:
            return False
        self._map_copy(number, copy)
        return True

    def _map_copy(self, number: int, copy: CachedFile) -> None:
        with copy, self._locks[number]:
            map_file(int(self.starts[number]), int(self._sizes[number]), copy.descriptor)
            self._mapped[number] = True

    def _fetch_whole(self, numbers: Sequence[int], *, column: str) -> None:
        cache = self._tars.cache
        try:
            cache.claim({self._name(number): self._shards[number].tar_bytes for number in numbers})
            with ThreadPoolExecutor(_NUM_FETCHED_AT_ONCE) as pool:
                list(pool.map(lambda number: self.fetch(number, waits=True), numbers))
        except NoRoom as error:
            raise UserError(
                f"the {column} column has to be in the cache as a whole: {error}", hint=error.hint
            ) from error
        except UserError:
            raise
        except OSError as error:
            if is_local(error):
                raise cache_unusable(cache.folder, f"the {column} column", error) from error
            hint = "check the network, and start again" if isinstance(error, Unanswered) else "see prep verify"
            raise UserError(f"the {column} column cannot be fetched: {error}", hint=hint) from error

    def _chosen(self) -> NDArray[np.bool_]:
        """The tars that samples are in and that fit into the cache."""
        claims = self._tars.cache.claims
        return np.array(
            [bool(wanted) and self._name(number) in claims for number, wanted in enumerate(self._wanted)], bool
        )

    def _name(self, number: int) -> str:
        return self._tars.cached_name(self._shards[number])


def open_maps(variants: Sequence[Variant], tars: RemoteTars | None, *, whole: Variant | None) -> MappedTars:
    """The tars of `variants` at addresses, local ones without `tars`; raises UserError as their classes do."""
    return mapped_tars(variants) if tars is None else RemoteMaps(variants, tars, whole=whole)


def remote_parts(tars: MappedTars) -> list[RemoteMaps]:
    """Those of some tars whose records have to be held until all of them are local."""
    parts = tars.parts if isinstance(tars, JoinedTars) else [tars]
    return [part for part in parts if isinstance(part, RemoteMaps)]


def _edges(address: int, size: int) -> tuple[int, int]:
    """The pages of the first and the last byte."""
    return address // _PAGE, (address + max(size, 1) - 1) // _PAGE


def _fetch_all(of: "weakref.ref[RemoteMaps]", pending: deque[int], end: threading.Event) -> None:
    """Fetch tars into the cache; one that another process is fetching is asked for again later."""
    attempts: Counter[int] = Counter()
    while not end.is_set() and (maps := of()) is not None:
        try:
            number = pending.popleft()
        except IndexError:
            return
        try:
            is_done = maps.fetch(number, waits=False, is_over=end.is_set)
        except (UserError, OSError) as error:
            attempts[number] += 1
            is_done = attempts[number] == _NUM_ATTEMPTS
            if end.is_set():
                return
            if isinstance(error, UserError) or is_local(error):
                end.set()
                _note(f"the cache takes no more tars, the others are read by range: {error}")
            elif is_done:
                _note(f"a tar is not fetched into the cache, it is read by range: {error}")
        del maps  # a set that nobody uses any more is not kept by waiting here
        if not is_done:
            pending.append(number)
            end.wait(_RETRY_AFTER_S)


def _stop(end: threading.Event, threads: Sequence[threading.Thread]) -> None:
    end.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)


def _note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()
