"""The tars of a remote column, mapped as `mapped_tars` does with local ones where the cache has them, or read by range.

Tars that fit under the limit of the cache are fetched whole in the background, each once per machine, and mapped as
they arrive. Until then, and always for tars that do not fit, members are fetched by range when they are needed.

So the order of samples does not depend on the size of the cache. In a full shuffle over a set that is larger, the rest
is read member by member in every epoch, which takes as many bytes as the epoch shows; fetching whole tars for single
members would take thousands of times as many. Nothing that is mapped is given up before the set is: evicting by last
use would always evict what a full shuffle needs next.

A member of a copy on disk that does not match its checksum is fetched by range, and the copy leaves the cache.
"""

import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import size_text
from clipmill.manifests.mapped_files import MAX_OPEN_MAPS, map_descriptor
from clipmill.manifests.storage.cache import CachedFile, NoRoom
from clipmill.manifests.storage.stores import Unanswered
from clipmill.shards.reader import Variant
from clipmill.train.data.mapped_tars import MappedTars
from clipmill.train.data.remote import RemoteTars
from clipmill.train.data.remote_files import cache_unusable, is_local

_NUM_FETCHED_AT_ONCE = 4
_RETRY_AFTER_S = 0.2  # to see whether another process has fetched a tar
_JOIN_TIMEOUT_S = 10.0
_NUM_ATTEMPTS = 3
_MAX_MAPPED = MAX_OPEN_MAPS // 2  # indexes need the others


class RemoteMaps(MappedTars):
    """The tars of remote variants. Thread-safe.

    Args:
        tars: of the data folder.
        whole: the variant whose tars are fetched now, because they are needed as a whole.

    Raises:
        UserError: a tar that is needed as a whole cannot be fetched, or does not fit into the cache.
    """

    has_origin = True

    def __init__(self, variants: Sequence[Variant], tars: RemoteTars, *, whole: Variant | None = None) -> None:
        super().__init__(variants)
        self.num_readers = tars.num_readers
        self._tars, self._shards = tars, [shard for variant in variants for shard in variant.shards()]
        self._is_mapped: NDArray[np.bool_] = np.zeros(len(self._shards), bool)
        self._wanted: NDArray[np.bool_] = np.zeros(len(self._shards), bool)
        self._is_fetching = False
        if whole is not None:
            first = sum(variant.num_shards for variant in variants[: list(variants).index(whole)])
            self._fetch_whole(range(first, first + whole.num_shards), column=whole.directory.parent.name)

    def require_files(self) -> None:
        """Check nothing: tars that are missing in the bucket fail the samples that are in them."""

    def describe(self) -> str:
        """How much is in the cache, for the log."""
        wanted, cache = self._wanted, self._tars.cache
        here, fitting, whole = (
            int(self._sizes[which].sum()) for which in (wanted & self._is_mapped, self._chosen(), wanted)
        )
        limit = f"{'80% of the free disk' if cache.is_derived else '--cache-size'}: {size_text(cache.limit_bytes)}"
        part = "" if fitting == whole else f"; {size_text(fitting)} of them fit, and the rest is read by range"
        return f"{size_text(here)} of {size_text(whole)} of tars in the cache {cache.folder} ({limit}{part})"

    def want(self, places: NDArray[np.int64]) -> None:
        """Note that the tars of these places are needed, and map those that are in the cache."""
        self._wanted[np.unique(np.searchsorted(self.starts, places, side="right") - 1)] = True
        cache, found = self._tars.cache, set(self._tars.cache.names())
        numbers = np.flatnonzero(self._wanted & ~self._is_mapped).tolist()
        # What is here already costs nothing.
        for number in sorted(numbers, key=lambda number: self._cached_name(number) not in found):
            shard, name = self._shards[number], self._cached_name(number)
            has_room = len(cache.claims) < _MAX_MAPPED
            fits = has_room and cache.claim({name: shard.tar_bytes}, only_if_it_fits=True)
            if fits and name in found and (copy := cache.find(name, size_bytes=shard.tar_bytes)):
                self._map_copy(number, copy)

    def begin_fetching(self) -> None:
        """Fetch the tars that are needed and fit into the cache, in the background, until this object is gone."""
        numbers = np.flatnonzero(self._chosen() & ~self._is_mapped).tolist()
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

    def name(self, number: int) -> str:
        return self._tars.name(self._path(number))

    def are_mapped(self, places: NDArray[np.int64]) -> bool:
        return bool(self._is_mapped[np.searchsorted(self.starts, places, side="right") - 1].all())

    def view(self, number: int) -> memoryview | None:
        return self._views[number] if self._is_mapped[number] else None

    def fetched(self, number: int, offset: int, size: int) -> memoryview | None:
        if self._is_mapped[number]:  # the copy is damaged; who has parts of it has verified them
            self._is_mapped[number] = False
            self._tars.cache.drop(self._cached_name(number))
        return memoryview(self._tars.read(self._path(number), offset, size))

    def fetch(self, number: int, *, waits: bool, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Fetch a tar into the cache and map it; False if another process is fetching it and `waits` is False."""
        if self._is_mapped[number]:
            return True
        copy = self._tars.fetch(self._shards[number], waits=waits, is_over=is_over)
        if copy is None:
            return False
        self._map_copy(number, copy)
        return True

    def _map_copy(self, number: int, copy: CachedFile) -> None:
        with copy:
            self._views[number] = map_descriptor(copy.descriptor, int(self._sizes[number]))
        self._is_mapped[number] = True

    def _fetch_whole(self, numbers: Sequence[int], *, column: str) -> None:
        cache = self._tars.cache
        try:
            cache.claim({self._cached_name(number): self._shards[number].tar_bytes for number in numbers})
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
            [bool(wanted) and self._cached_name(number) in claims for number, wanted in enumerate(self._wanted)], bool
        )

    def _cached_name(self, number: int) -> str:
        return self._tars.cached_name(self._shards[number])


def open_maps(variants: Sequence[Variant], tars: RemoteTars | None, *, whole: Variant | None) -> MappedTars:
    """The tars of `variants`, local ones without `tars`; raises UserError as `RemoteMaps` does."""
    return MappedTars(variants) if tars is None else RemoteMaps(variants, tars, whole=whole)


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
        del maps  # while this thread waits, it must not keep a set alive that is no longer in use
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
