"""Memory-mapped tars whose members are latents or stored embeddings, and the verification of these members.

A tar is mapped when it is first needed, after a check that the open file has the committed length. Bytes are read when
they are used, and the kernel reclaims pages when memory is short, so the tars may be larger than memory. If a mapped
tar is truncated in place, the process ends with an error that mentions the tar (clipmill.manifests.mapped_files).

A member is verified against its checksum once per process, when it is first needed. Later changes are not detected. A
member that does not match its checksum stays unusable until the process ends.

Tars of remote variants (`RemoteMaps`) are downloaded into the cache in the background, and mapped from there. If a tar
does not fit into the cache or has not been downloaded yet, its bytes are read by range.
"""

import errno
import os
import stat
import sys
import threading
import weakref
import zlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import size_text
from clipmill.manifests.mapped_files import MAX_OPEN_MAPS, OPEN_MAPS, map_descriptor, read_ahead
from clipmill.manifests.storage.cache import CachedFile, NoRoom
from clipmill.manifests.storage.stores import UnusableResponse
from clipmill.shards.chunk_table import ChunkRows, read_chunk_rows
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.opening import Damaged, DamagedIndex, open_regular
from clipmill.shards.reader import Variant
from clipmill.train.data.outcomes import Reason
from clipmill.train.data.remote import RemoteTars, cache_error, is_local
from clipmill.train.data.workers import StuckResult

_UNKNOWN, _GOOD = 0, 1

# Bytes of a tar, and the start and end of a part in these bytes. Slicing parts only when a batch is copied saves time.
Part = tuple[memoryview, int, int]


class MappedTars:
    """Tars of several variants, in the order of the variants. Thread-safe.

    Tars are identified by their indices in this order. The place of a byte is its offset in the concatenation of all
    tars, so a single integer locates a member. If the process has too many maps, the least recently used maps
    are closed (`clipmill.manifests.mapped_files`). Their memory is released once no part of it is in use.

    Attributes:
        starts: Place of the first byte of each tar, int64.
        are_remote: True if the tars are remote. `fetch_bytes` can then download bytes.
        num_readers: Number of threads that download members; 0 for tars on local disks.
    """

    are_remote = False
    num_readers = 0

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._files = [variant.tar_files for variant in variants]
        self._first_tars = np.cumsum([0, *map(len, self._files)])
        self._sizes: NDArray[np.int64] = np.concatenate([files.sizes for files in self._files])
        self.starts: NDArray[np.int64] = np.cumsum(self._sizes) - self._sizes
        self._starts: list[int] = self.starts.tolist()
        self._views: list[memoryview | None] = [None] * len(self._sizes)
        self._maps: dict[int, _Map] = {}

    def require_files(self) -> None:
        """Raise a UserError if a tar is missing or does not have its committed length."""
        for tar in range(len(self._sizes)):
            try:
                self._require_length(tar, self._path(tar).stat())
            except OSError as error:
                column = self._files[bisect_right(self._first_tars, tar) - 1].directory.parent.name
                raise unusable_error(self._path(tar), column, error.strerror or str(error)) from error

    def register_places(self, places: NDArray[np.int64]) -> None:
        """Register the places of members that samples need. This does nothing for tars on local disks."""

    def start_downloads(self) -> None:
        """Start downloading the tars that samples need, in the background."""

    def describe(self) -> str:
        """Return a remark for the log on the location of the tars; empty for tars on local disks."""
        return ""

    def locate(self, place: int) -> tuple[int, int]:
        """Return the index of the tar that contains a place, and the offset in the tar."""
        tar = bisect_right(self._starts, place) - 1
        return tar, place - self._starts[tar]

    def name(self, tar: int) -> str:
        """Return the path or URL of a tar, for messages."""
        return str(self._path(tar))

    def are_mapped(self, places: NDArray[np.int64]) -> bool:
        """Return True if `parts` can be called with these places."""
        return True

    def parts(self, places: NDArray[np.int64], size_bytes: NDArray[np.int64] | int) -> Iterator[Part]:
        """Return an iterator over the parts at these places.

        Raises:
            UserError: A tar can no longer be mapped.
        """
        tar_indices = np.searchsorted(self.starts, places, side="right") - 1
        begins = places - self.starts[tar_indices]
        ends: list[int] = (begins + size_bytes).tolist()
        try:
            views = {tar: self._views[tar] or self._map(tar) for tar in np.unique(tar_indices).tolist()}
        except OSError as error:
            raise UserError(f"a tar has changed during training: {error}", hint="run prep verify") from error
        return zip(map(views.__getitem__, tar_indices.tolist()), begins.tolist(), ends, strict=True)

    def view(self, tar: int) -> memoryview | None:
        """Return the bytes of a complete tar; None if the tar is not on this machine.

        Raises:
            OSError: The tar cannot be opened or mapped, or does not have its committed length.
        """
        return self._views[tar] or self._map(tar)

    def fetch_bytes(self, tar: int, offset: int, size: int) -> memoryview | None:
        """Download bytes of a remote tar; return None for tars on local disks.

        Raises:
            OSError: The bytes cannot be downloaded.
        """
        return None

    def _map(self, tar: int) -> memoryview:
        descriptor = open_regular(self._path(tar))
        try:
            # Check the open file, because the path may refer to a different file by now.
            self._require_length(tar, os.fstat(descriptor))
            view = map_descriptor(descriptor, int(self._sizes[tar]))
        finally:
            os.close(descriptor)
        self._views[tar], self._maps[tar] = view, _Map(self._views, tar)
        OPEN_MAPS.note_use(self._maps[tar])
        return view

    def _require_length(self, tar: int, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size != self._sizes[tar]:
            raise OSError(errno.EIO, f"it has {status.st_size:,} bytes, but {self._sizes[tar]:,} were committed")

    def _path(self, tar: int) -> Path:
        part = bisect_right(self._first_tars, tar) - 1
        return self._files[part].path(tar - int(self._first_tars[part]))


class _Map:
    """Handle that `OPEN_MAPS` uses to close a mapped tar (clipmill.manifests.mapped_files)."""

    def __init__(self, views: list[memoryview | None], tar: int) -> None:
        self._views, self._tar_index = views, tar

    def close(self) -> bool:
        """Release the map. It is unmapped once no part of it is in use."""
        self._views[self._tar_index] = None
        return True


def unusable_error(path: Path, column: str, reason: str) -> UserError:
    """Return the error for a column's file that cannot be used."""
    return UserError(
        f"{path} cannot be used: {reason}",
        hint=f"run prep verify to list all damage, and prep {column} to rebuild damaged shards",
    )


class Payload(NamedTuple):
    """Place, size and checksum of a member's payload (header and array)."""

    place: int
    size_bytes: int
    crc32: int


class Problem(NamedTuple):
    """Reason why a member cannot be used."""

    reason: Reason
    detail: str


class VerifiedMembers:
    """Loader of the members of a column. Each member is verified when it is first loaded. Thread-safe.

    Args:
        tars: Tars that contain the members.
        num_members: Number of members.
        payload: Function that returns the payload of the member with a given index.
        column: Name of the column, for messages.
        noun: Plural noun for the content of members, for messages.
    """

    def __init__(
        self, tars: MappedTars, num_members: int, payload: Callable[[int], Payload], *, column: str, noun: str
    ) -> None:
        self._tars, self._payload, self._content_name = tars, payload, f"its {noun} in the {column} column"
        self._state = np.full(num_members, _UNKNOWN, np.uint8)
        self._problems: dict[int, Problem] = {}
        self._locks: dict[int, threading.Lock] = {}

    def first_unverified(self, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the first occurrence in `members` of each member that has not been verified yet."""
        mask, unverified = np.zeros(len(members), bool), np.flatnonzero(self._state[members] != _GOOD)
        mask[unverified[np.unique(members[unverified], return_index=True)[1]]] = True
        return mask

    def load(self, member: int) -> memoryview | Problem:
        """Return the verified bytes of a member, or the reason why the member cannot be used."""
        if (problem := self._problems.get(member)) is not None:
            return problem
        place, size_bytes, crc32 = self._payload(member)
        tar, offset = self._tars.locate(place)
        try:
            view = self._tars.view(tar)
            content = None if view is None else view[offset : offset + size_bytes]
            if content is None or not self._is_good(member, content, crc32):
                content = self._tars.fetch_bytes(tar, offset, size_bytes)
                # Verify downloaded bytes each time, because each request downloads them again.
                content = None if content is None or zlib.crc32(content) != crc32 else content
            if content is not None:
                return content
            problem = Problem("checksum", f"{self._describe(tar)} do not match their checksum")
        except UserError:  # rejected credentials affect all tars
            raise
        except OSError as error:
            problem = Problem("shard_unreadable", f"{self._describe(tar)} cannot be read: {error.strerror or error}")
        return self._record(member, problem)

    def give_up(self, member: int, stuck: StuckResult) -> Problem:
        """Record that a member was not loaded in time, so that later requests for this member fail without waiting."""
        tar, _ = self._tars.locate(self._payload(member).place)
        return self._record(member, Problem("stuck", f"{self._describe(tar)} were not read within {stuck.after_s:g} s"))

    def _record(self, member: int, problem: Problem) -> Problem:
        # Do not record problems with remote tars, because the bytes may be available next time.
        if not self._tars.are_remote:
            self._problems[member] = problem
        return problem

    def _is_good(self, member: int, content: memoryview, crc32: int) -> bool:
        """Return True if the mapped bytes match their checksum. A successful check is not repeated."""
        if self._state[member] == _UNKNOWN:
            with self._locks.setdefault(member, threading.Lock()):
                if self._state[member] == _UNKNOWN:
                    # Treat an unreadable copy of a remote tar like a damaged copy: the bytes are downloaded again.
                    with suppress(OSError) if self._tars.are_remote else nullcontext():
                        read_ahead(content)
                        if zlib.crc32(content) == crc32:
                            self._state[member] = _GOOD
            self._locks.pop(member, None)
        return bool(self._state[member] == _GOOD)

    def _describe(self, tar: int) -> str:
        return f"{self._content_name} ({self._tars.name(tar)})"


def member_rows(variant: Variant) -> ChunkRows:
    """Return the verified rows of a variant's indexes, from their merged table or, if it is missing, from the indexes.

    Raises:
        UserError: The table or an index is damaged, or an index differs from the committed index.
    """
    column = variant.directory.parent.name
    try:
        return read_chunk_rows(variant)
    except DamagedIndex as error:
        raise unusable_error(error.path, column, error.reason) from error
    except Damaged as error:
        raise UserError(str(error), hint=f"run prep {column} to rebuild the table") from error
    except OSError as error:
        raise unusable_error(Path(error.filename or variant.directory), column, str(error)) from error


def places_of(
    variant: Variant,
    table: pa.Table,
    *,
    starts: NDArray[np.int64],
    shard_of: NDArray[np.int64],
    array_bytes: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the place of the npy array of each row of a merged table, and the size of its header in bytes.

    Args:
        starts: Place of each shard's tar.
        shard_of: Index in `starts` of each row's shard.
        array_bytes: Size of each array; None for members that are not npy arrays. Without sizes, the function returns
            the places of the members, and 0 for the size of each header.

    Raises:
        UserError: An array would end beyond its tar, or would not begin on a block boundary, because the index belongs
            to a different tar.
    """
    tars = variant.tar_files
    offset, size = (table[name].to_numpy().astype(np.int64) for name in ("offset", "size"))
    is_valid = (offset >= 0) & (size > 0) & (offset + size <= tars.sizes[shard_of])
    header = np.zeros(len(size), np.int64)
    if array_bytes is not None:
        header = size - array_bytes
        is_valid &= (header > 0) & (header <= size) & ((offset + header) % BLOCK_BYTES == 0)
    invalid_rows = np.flatnonzero(~is_valid)
    if len(invalid_rows):
        by_shard = np.lexsort((table["row"].to_numpy()[invalid_rows], shard_of[invalid_rows]))
        row = int(invalid_rows[by_shard[0]])
        shard = variant.shard(int(tars.shard_ids[shard_of[row]]))
        key = shard.index["key"][int(table["row"][row].as_py())].as_py()
        raise unusable_error(
            shard.index_path, shard.commit.column, f"it states an impossible position for the array of {key!r}"
        )
    return starts[shard_of] + offset + header, header.astype(np.int32)


_NUM_FETCH_THREADS = 4
_RETRY_AFTER_S = 0.2  # delay before the next attempt
_JOIN_TIMEOUT_S = 10.0
_NUM_ATTEMPTS = 3
_MAX_MAPPED = MAX_OPEN_MAPS // 2  # the other maps are for indexes


class RemoteMaps(MappedTars):
    """Tars of remote variants. Thread-safe.

    Tars that fit within the cache limit are downloaded in the background, once per machine, and mapped as they arrive.
    Until then, and always for tars that do not fit, members are read by range when they are needed.

    Thus the order of samples does not depend on the size of the cache. If the tars do not all fit into the cache, an
    epoch in random order reads the members of the tars outside the cache individually, and transfers only the bytes
    that it uses. Downloading complete tars for single members would transfer thousands of times as many bytes. Mapped
    tars stay in the cache until this object is deleted, because evicting the least recently used tar would always evict
    a tar that is needed soon. If a member of a cached tar does not match its checksum, the member is read by range, and
    the tar is removed from the cache.

    Args:
        tars: Reader of the tars of the data folder.
        cached_variant: Variant whose tars must all be in the cache, so that the constructor downloads them; None if
            there is no such variant.

    Raises:
        UserError: A tar of `cached_variant` cannot be downloaded, or does not fit into the cache.
    """

    are_remote = True

    def __init__(self, variants: Sequence[Variant], tars: RemoteTars, *, cached_variant: Variant | None = None) -> None:
        super().__init__(variants)
        self.num_readers = tars.num_readers
        self._tars, self._shards = tars, [shard for variant in variants for shard in variant.shards()]
        self._is_mapped: NDArray[np.bool_] = np.zeros(len(self._shards), bool)
        self._is_needed: NDArray[np.bool_] = np.zeros(len(self._shards), bool)
        self._is_fetching = False
        if cached_variant is not None:
            first = sum(variant.num_shards for variant in variants[: list(variants).index(cached_variant)])
            self._fetch_variant(
                range(first, first + cached_variant.num_shards), column=cached_variant.directory.parent.name
            )

    def require_files(self) -> None:
        """Skip the check, because the samples of a tar that is missing from the bucket fail later."""

    def describe(self) -> str:
        """Return a remark for the log on how much of the tars is in the cache."""
        is_needed, cache = self._is_needed, self._tars.cache
        cached_bytes, fitting_bytes, total_bytes = (
            int(self._sizes[mask].sum()) for mask in (is_needed & self._is_mapped, self._is_claimed(), is_needed)
        )
        limit = f"{'80% of the free disk' if cache.is_derived else '--cache-size'}: {size_text(cache.limit_bytes)}"
        fits = f"; {size_text(fitting_bytes)} of them fit, and the rest is read by range"
        part = "" if fitting_bytes == total_bytes else fits
        return (
            f"{size_text(cached_bytes)} of {size_text(total_bytes)} of tars in the cache {cache.folder} ({limit}{part})"
        )

    def register_places(self, places: NDArray[np.int64]) -> None:
        """Register the tars at these places as needed, and map the tars that are in the cache."""
        self._is_needed[np.unique(np.searchsorted(self.starts, places, side="right") - 1)] = True
        cache, cached_names = self._tars.cache, set(self._tars.cache.names())
        tar_indices = np.flatnonzero(self._is_needed & ~self._is_mapped).tolist()
        # Reserve room for cached tars first, because they do not have to be downloaded.
        for tar in sorted(tar_indices, key=lambda tar: self._cached_name(tar) not in cached_names):
            shard, name = self._shards[tar], self._cached_name(tar)
            has_room = len(cache.claims) < _MAX_MAPPED
            fits = has_room and cache.claim({name: shard.tar_bytes}, only_if_it_fits=True)
            if fits and name in cached_names and (copy := cache.find(name, size_bytes=shard.tar_bytes)):
                self._map_copy(tar, copy)

    def start_downloads(self) -> None:
        """Download the needed tars that fit into the cache, in the background, until this object is deleted."""
        tar_indices = np.flatnonzero(self._is_claimed() & ~self._is_mapped).tolist()
        if not tar_indices or self._is_fetching:
            return
        self._is_fetching = True
        # The processes of a machine start with different tars, and skip a tar that another process is downloading.
        fraction = int(os.environ.get("LOCAL_RANK") or 0) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        pending = deque(tar_indices)
        pending.rotate(-int(len(tar_indices) * fraction))
        end, arguments = threading.Event(), (weakref.ref(self), pending)
        threads = [
            threading.Thread(target=_fetch_all, args=(*arguments, end), name="cache", daemon=True)
            for _ in range(min(_NUM_FETCH_THREADS, len(tar_indices)))
        ]
        for thread in threads:
            thread.start()
        # Stop the threads at exit too, because no thread may return from a request during interpreter shutdown.
        weakref.finalize(self, _stop, end, threads)

    def name(self, tar: int) -> str:
        return self._tars.name(self._path(tar))

    def are_mapped(self, places: NDArray[np.int64]) -> bool:
        return bool(self._is_mapped[np.searchsorted(self.starts, places, side="right") - 1].all())

    def view(self, tar: int) -> memoryview | None:
        return self._views[tar] if self._is_mapped[tar] else None

    def fetch_bytes(self, tar: int, offset: int, size: int) -> memoryview | None:
        if self._is_mapped[tar]:  # the copy is damaged; its parts that are in use have been verified
            self._is_mapped[tar] = False
            self._tars.cache.drop(self._cached_name(tar))
        return memoryview(self._tars.read(self._path(tar), offset, size))

    def fetch(self, tar: int, *, waits: bool, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Download a tar into the cache and map it; return True if it is mapped.

        Args:
            waits: True to wait if another process is downloading the tar; False to return False in this case.
            is_over: Function that returns True once the download must stop.
        """
        if self._is_mapped[tar]:
            return True
        copy = self._tars.fetch(self._shards[tar], waits=waits, is_over=is_over)
        if copy is None:
            return False
        self._map_copy(tar, copy)
        return True

    def _map_copy(self, tar: int, copy: CachedFile) -> None:
        with copy:
            self._views[tar] = map_descriptor(copy.descriptor, int(self._sizes[tar]))
        self._is_mapped[tar] = True

    def _fetch_variant(self, tar_indices: Sequence[int], *, column: str) -> None:
        cache = self._tars.cache
        try:
            cache.claim({self._cached_name(tar): self._shards[tar].tar_bytes for tar in tar_indices})
            with ThreadPoolExecutor(_NUM_FETCH_THREADS) as pool:
                list(pool.map(lambda tar: self.fetch(tar, waits=True), tar_indices))
        except NoRoom as error:
            raise UserError(f"the complete {column} column has to be in the cache: {error}", hint=error.hint) from error
        except UserError:
            raise
        except OSError as error:
            if is_local(error):
                raise cache_error(cache.folder, f"the {column} column", error) from error
            hint = "check the network, and start again" if isinstance(error, UnusableResponse) else "run prep verify"
            raise UserError(f"the {column} column cannot be downloaded: {error}", hint=hint) from error

    def _is_claimed(self) -> NDArray[np.bool_]:
        """Return a mask of the tars that samples need and that fit into the cache."""
        claims = self._tars.cache.claims
        return np.array(
            [bool(is_needed) and self._cached_name(tar) in claims for tar, is_needed in enumerate(self._is_needed)],
            bool,
        )

    def _cached_name(self, tar: int) -> str:
        return self._tars.cached_name(self._shards[tar])


def open_maps(variants: Sequence[Variant], tars: RemoteTars | None, *, cached_variant: Variant | None) -> MappedTars:
    """Return the maps of the tars of variants.

    Args:
        tars: Reader of the tars of a remote data folder; None for a local folder.
        cached_variant: See `RemoteMaps`.

    Raises:
        UserError: See `RemoteMaps`.
    """
    return MappedTars(variants) if tars is None else RemoteMaps(variants, tars, cached_variant=cached_variant)


def _fetch_all(maps_ref: "weakref.ref[RemoteMaps]", pending: deque[int], end: threading.Event) -> None:
    """Download the pending tars into the cache. A tar that another process is downloading is tried again later."""
    attempts: Counter[int] = Counter()
    while not end.is_set() and (maps := maps_ref()) is not None:
        try:
            tar = pending.popleft()
        except IndexError:
            return
        try:
            is_done = maps.fetch(tar, waits=False, is_over=end.is_set)
        except (UserError, OSError) as error:
            attempts[tar] += 1
            is_done = attempts[tar] == _NUM_ATTEMPTS
            if end.is_set():
                return
            if isinstance(error, UserError) or is_local(error):
                end.set()
                _print_note(f"the cache cannot store more tars, so the remaining tars are read by range: {error}")
            elif is_done:
                _print_note(f"a tar cannot be downloaded into the cache, so it is read by range: {error}")
        del maps  # a waiting thread must not keep an unused `RemoteMaps` alive
        if not is_done:
            pending.append(tar)
            end.wait(_RETRY_AFTER_S)


def _stop(end: threading.Event, threads: Sequence[threading.Thread]) -> None:
    end.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)


def _print_note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()
