"""Remote data folders and tars: small files are copied to this machine, and tars are read by range or cached.

The cache folder (`--cache`) contains `folders/`, with the small files of each data folder, and `objects/`, with
complete tars up to a size limit (`--cache-size`, clipmill.manifests.storage.cache).
"""

import errno
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from clipmill.manifests.errors import DISK_ERRORS, UserError
from clipmill.manifests.formatting import parse_size
from clipmill.manifests.locks import hold_lock
from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.schema import MANIFEST_FILE
from clipmill.manifests.storage.cache import CachedFile, ObjectCache
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import ObjectInfo, Objects, open_objects
from clipmill.manifests.storage.stores import AccessRefused, UnusableResponse, raise_inaccessible
from clipmill.manifests.store import CAPTIONS_FILE, MANIFEST_FOLDER, MAPPED_FILES, VIDEOS_FILE, file_entry, staged_path
from clipmill.shards.chunk_table import has_chunk_table, missing_parts, shards_to_merge, update_chunk_table
from clipmill.shards.columns import command_for, how_to_make
from clipmill.shards.commit_table import (
    commit_folders,
    commits_from_rows,
    confirm_folders,
    open_commit_table,
    read_contents_or_empty,
)
from clipmill.shards.commits import Commit, commit_bytes
from clipmill.shards.dataset import current_variant
from clipmill.shards.format import (
    COMMIT_TABLE_FILE,
    COMMITS_FOLDER,
    CONTENTS_FILE,
    DATASET_FILE,
    RECIPE_FILE,
    commit_name,
    shard_path,
)
from clipmill.shards.marks import enable_marks, leave_mark
from clipmill.shards.opening import scan
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.shards.scores import CHUNKS_FILE, score_table_problem

NUM_THREADS = 32  # number of files that are copied at the same time
_ETAGS_FILE = ".etags.json"  # ETags of the commit records that have been copied
_LAUNCH_FILE = ".copied-{}.json"
_LINK = re.compile(r'href="([^"/?]+\.json)"')
_Item = TypeVar("_Item")


class RemoteFiles:
    """Small files of a remote data folder, and their copies in the local folder `copy`. Thread-safe.

    All processes that a launcher starts on a machine share one copy: the first process copies the files under a lock,
    and the others wait. A process started without a launcher copies changed files each time it opens the folder.

    The small files of a column are contents.json, recipe.json, the commits, and the tables into which `prep` merges
    commits and indexes. Commits are copied if they differ from their table, and indexes if they are missing from the
    table of chunks; any other index is copied when its shard is first read. Files with a checksum are verified. Web
    servers cannot list objects, so the list of shards is taken from contents.json or, if that file lists none,
    from the directory page.

    Args:
        objects: Objects of the data folder.
        copy: Local folder for the copies.
    """

    def __init__(self, objects: Objects, copy: Path) -> None:
        self.objects, self.copy = objects, copy
        self._marks: list[object] = []  # marks that keep prep gc from deleting the columns in use
        enable_marks(copy, objects)

    def copy_manifest(self) -> None:
        """Copy dataset.json and the manifest, unless a process of the same launch has copied them.

        Raises:
            UserError: The URL is not a data folder or cannot be read, or the copy cannot be written.
        """
        with (
            self._errors(missing="use a data folder that prep made, or tars: {000..999}.tar"),
            self._lock_copy("manifest") as is_due,
        ):
            if is_due:
                _publish(self.copy / DATASET_FILE, self.objects.read(DATASET_FILE))
                self._copy_manifest()

    def copy_column(self, column: str) -> None:
        """Copy the small files of a column's current variant, unless a process of the same launch has copied them.

        Raises:
            UserError: See `copy_manifest`.
        """
        variant = current_variant(self.copy, column)
        if variant is None:
            address = self.objects.url
            raise UserError(f"{address} has no {column} shards", hint=f"run {how_to_make(column, address)}")
        self._marks.append(leave_mark(self.copy / column / variant))  # before copying the files that it protects
        with (
            self._errors(missing=f"run prep {command_for(column, variant)}"),
            self._lock_copy(f"{column}-{variant}") as is_due,
        ):
            if is_due:
                self._copy_variant(f"{column}/{variant}")

    def copy_file(self, key: str, *, sha256: str | None = None, size_bytes: int | None = None) -> None:
        """Copy a file, unless a copy with this digest and size exists.

        Raises:
            OSError: The file cannot be read, or has a different digest or size.
        """
        path = self.copy / key
        if _is_complete(path, sha256=sha256, size_bytes=size_bytes):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path.parent / f".{path.name}.lock"):
            if _is_complete(path, sha256=sha256, size_bytes=size_bytes):
                return
            self.objects.fetch(key, path)
            if not _is_complete(path, sha256=sha256, size_bytes=size_bytes):
                path.unlink()
                raise OSError(f"{self.objects.url_of(key)} differs from the file that was committed")

    def _copy_manifest(self) -> None:
        local = self.copy / MANIFEST_FOLDER
        content = self.objects.read(f"{MANIFEST_FOLDER}/{MANIFEST_FILE}")
        path = local / MANIFEST_FILE
        try:
            manifest = json.loads(content)
            fingerprint, tables = manifest["fingerprint"], manifest.get("tables", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            fingerprint, tables = "", {}  # a damaged manifest is reported when the copy is read
        is_same = path.is_file() and path.read_bytes() == content
        local.mkdir(parents=True, exist_ok=True)
        for name in (VIDEOS_FILE, CAPTIONS_FILE, *(name for name in MAPPED_FILES if name in tables)):
            facts = tables.get(name)
            if is_same and (local / name).is_file() and facts in (None, file_entry(local / name)):
                continue
            # The table has a staged name if the publication of the manifest was interrupted before its last step.
            staged_key = staged_path(Path(MANIFEST_FOLDER), name, fingerprint=fingerprint).as_posix()
            for key in (f"{MANIFEST_FOLDER}/{name}", staged_key):
                with suppress(FileNotFoundError):  # a missing table is reported when the copy is read
                    self.objects.fetch(key, local / name)
                    if facts in (None, file_entry(local / name)):
                        break
        # Publish the manifest last, so that the tables exist if the manifest exists.
        _publish(path, content)

    def _copy_variant(self, folder: str) -> None:
        local = self.copy / folder
        # Copy contents.json before the commits: it may lack a new commit, but must not list a missing commit.
        for name in (CONTENTS_FILE, RECIPE_FILE):
            self._copy_if_present(f"{folder}/{name}", local / name)
        self._copy_commits(folder, local)
        if self._copy_chunk_table(folder, local):
            return
        variant = Variant(local)
        files = [shard.commit.files for shard in shards_to_merge(variant) if shard.commit.files is not None]
        _copy_in_parallel(lambda shard: self.copy_file(f"{folder}/{shard.index}", sha256=shard.index_sha256), files)
        with suppress(UserError):  # a damaged index is reported when the data are opened
            update_chunk_table(variant, column=folder.partition("/")[0])

    def _copy_chunk_table(self, folder: str, local: Path) -> bool:
        """Copy outdated parts of the merged table; return False if the copy still does not match the commits."""
        variant = Variant(local)

        def fetch(part: str) -> None:
            (local / part).parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                self.objects.fetch(f"{folder}/{part}", local / part)

        _copy_in_parallel(fetch, _missing_parts(variant))
        return not _missing_parts(variant)

    def _copy_commits(self, folder: str, local: Path) -> None:
        """Update the copies of commit records that the table of commits does not replace; remove all other copies."""
        listed_records = self._list_commits(folder, local)
        table_records = self._records_of_table(folder, local, listed_records)
        # The table replaces the records of a folder if it contains all of them, unchanged.
        replaced_folders = {"", *map(_folder, table_records)} if table_records else set()
        if self.objects.is_writable:
            replaced_folders -= set(map(_folder, listed_records.keys() ^ table_records.keys()))
        records = {name: info for name, info in listed_records.items() if _folder(name) not in replaced_folders}
        try:
            old_etags = dict(json.loads((local / _ETAGS_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            old_etags = {}
        root = local / COMMITS_FOLDER
        outdated = {name for name, info in records.items() if not info.etag or old_etags.get(name) != info.etag}
        outdated |= {name for name in records if not (root / name).is_file()}
        for name in table_records.keys() & outdated:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            # Do not sync the file: until its ETag has been stored, the record is written again.
            (root / name).write_bytes(commit_bytes(table_records[name]))
        names = [name for name in outdated if name not in table_records]
        _copy_in_parallel(lambda name: self._copy_if_present(f"{folder}/{COMMITS_FOLDER}/{name}", root / name), names)
        for name in replaced_folders:
            (root / name).mkdir(parents=True, exist_ok=True)
        for path in root.rglob("*.json"):
            if path.relative_to(root).as_posix() not in records:
                path.unlink(missing_ok=True)
        if (etags := {name: info.etag for name, info in records.items() if info.etag}) != old_etags:
            _publish(local / _ETAGS_FILE, json.dumps(etags).encode())
        if replaced_folders:
            folders, sha256 = commit_folders(local), read_contents_or_empty(local).files[COMMIT_TABLE_FILE]
            confirm_folders(local, sha256=sha256, folders=folders, omitted_folders=folders.keys() - replaced_folders)

    def _records_of_table(self, folder: str, local: Path, listed: dict[str, ObjectInfo]) -> dict[str, Commit]:
        """Copy the table of commits; return its unchanged records by name, including records of deleted commits."""
        sha256 = read_contents_or_empty(local).files.get(COMMIT_TABLE_FILE)
        if sha256 is None:
            return {}
        try:
            self.copy_file(f"{folder}/{COMMIT_TABLE_FILE}", sha256=sha256)
            written_s = self.objects.info(f"{folder}/{COMMIT_TABLE_FILE}").modified_s
        except (OSError, UserError):
            return {}  # a run is currently replacing the table
        table = open_commit_table(local, sha256=sha256)
        if table is None:
            return {}
        commits = commits_from_rows(table.rows)
        records = {shard_path(shard_id, commit_name(shard_id)): commit for shard_id, commit in commits.items()}
        if not self.objects.is_writable:
            is_same = read_contents_or_empty(local).shard_ids == commits.keys()
            return records if is_same else {}
        return {
            name: commit
            for name, commit in records.items()
            if name not in listed or listed[name].modified_s <= written_s or _is_record(listed[name], commit)
        }

    def _list_commits(self, folder: str, local: Path) -> dict[str, ObjectInfo]:
        """Return the commit records of a variant, by path in the folder of commits."""
        prefix = f"{folder}/{COMMITS_FOLDER}/"
        if self.objects.is_writable:
            listed = {info.key.removeprefix(prefix): info for info in self.objects.list(prefix)}
            return {name: info for name, info in listed.items() if name.endswith(".json")}
        shard_ids = sorted(read_contents_or_empty(local).shard_ids)
        names = [shard_path(shard_id, commit_name(shard_id)) for shard_id in shard_ids]
        if not names:
            names = _LINK.findall(self.objects.read(prefix).decode(errors="replace"))
        return {name: ObjectInfo(prefix + name, 0, "", 0.0) for name in names}

    def _copy_if_present(self, key: str, path: Path) -> None:
        try:
            _publish(path, self.objects.read(key))
        except FileNotFoundError:
            path.unlink(missing_ok=True)

    @contextmanager
    def _lock_copy(self, item: str) -> Iterator[bool]:
        """Hold the lock of the copy; yield False if a process of the same launch has already copied `item`."""
        self.copy.mkdir(parents=True, exist_ok=True)
        path, launch = self.copy / _LAUNCH_FILE.format(item), _launch()
        with hold_lock(self.copy / ".lock"):
            is_due = launch is None or not path.is_file() or path.read_text() != launch
            yield is_due
            if is_due and launch is not None:
                _publish(path, launch.encode())

    @contextmanager
    def _errors(self, *, missing: str) -> Iterator[None]:
        address = self.objects.url
        try:
            yield
        except FileNotFoundError as error:
            raise UserError(f"{address} is not a data folder: {error.filename} is missing", hint=missing) from error
        except UserError:
            raise
        except OSError as error:
            if is_local(error):
                raise cache_error(self.copy, address, error) from error
            raise UserError(f"{address} cannot be read: {error}", hint="check the URL") from error


def is_local(error: OSError) -> bool:
    """Return True if writing a local copy caused this error. Errors from object storage have other types or codes."""
    is_refused = isinstance(error, PermissionError) and not isinstance(error, UserError)
    return is_refused or error.errno in DISK_ERRORS


def cache_error(folder: Path, address: str, error: OSError) -> UserError:
    """Return the error for a cache folder in which a copy of `address` cannot be stored."""
    hint = "free disk space, or choose a different folder with --cache DIR"
    return UserError(f"{folder} cannot store a copy of {address}: {error.strerror}", hint=hint)


def _launch() -> str | None:
    """Return an ID that all processes of a launch on this machine share; None without a launcher.

    On each machine, torchrun or srun is the parent of all processes of the launch. The ID also contains torchrun's
    restart count.
    """
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) < 2:
        return None
    parent = os.getppid()
    try:
        start_ticks = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return f"{parent} {start_ticks} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def _is_complete(path: Path, *, sha256: str | None, size_bytes: int | None) -> bool:
    if not path.is_file() or size_bytes not in (None, path.stat().st_size):
        return False
    return sha256 is None or scan(path).sha256 == sha256


def _folder(name: str) -> str:
    """Return the folder of a commit record; '' for records directly in `commits/`."""
    return name.rpartition("/")[0]


def _is_record(info: ObjectInfo, commit: Commit) -> bool:
    """Return True if an object's ETag, often an MD5 digest in S3, shows that the object is the record of `commit`.

    The modification time is not sufficient: after the upload of a data folder, records may be newer than the table.
    """
    content = commit_bytes(commit)
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return info.size_bytes == len(content) and info.etag.strip('"') == md5


def _missing_parts(variant: Variant) -> list[str]:
    """Return the outdated or missing files of the merged table, relative to the folder of the variant."""
    if has_chunk_table(variant.directory.parent.name):
        return missing_parts(variant)
    return [] if score_table_problem(variant) is None else [CHUNKS_FILE]


def _copy_in_parallel(copy: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Call `copy` for several items at the same time, because each copy waits for the network."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(copy, items))  # consumes the results, so that errors are raised here


def _publish(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path.is_file() and path.read_bytes() == content):
        publish_bytes(path, content)


_BLOCK_BYTES = 1 << 24  # number of bytes per request when a tar is downloaded
_caches: dict[tuple[Path, int | None], ObjectCache] = {}
_caches_lock = threading.Lock()


def cache_folder(requested: Path | None) -> Path:
    """Return the folder for copies of remote files: the requested folder, or clipmill's folder in the user's cache.

    Raises:
        UserError: The folder cannot be created.
    """
    folder = requested or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipmill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the cache folder {folder} cannot be created: {error.strerror}"
        raise UserError(message, hint="choose a different folder with --cache DIR") from error
    return folder


def open_cache(requested: Path | None, *, size: str | None = None) -> ObjectCache:
    """Return the cache of complete tars in a folder. All threads of a process share this object.

    Args:
        requested: See `cache_folder`.
        size: Maximum size, such as 100GB; None for a limit that depends on the free disk space.

    Raises:
        UserError: The folder cannot be created or written, or `size` is not valid.
    """
    folder = cache_folder(requested)
    limit_bytes = None if size is None else parse_size(size, flag="--cache-size")
    with _caches_lock:
        if (folder, limit_bytes) not in _caches:
            try:
                _caches[folder, limit_bytes] = ObjectCache(folder, limit_bytes=limit_bytes)
            except OSError as error:
                reason = f"the cache folder {folder} cannot be written: {error.strerror}"
                raise UserError(reason, hint="choose a different folder with --cache DIR") from error
        return _caches[folder, limit_bytes]


def local_copy(address: str, *, cache: Path | None, size: str | None = None) -> Path:
    """Return the path of a local file, or of the up-to-date copy of a remote file in the cache.

    Raises:
        OSError: The file cannot be downloaded, or the download is shorter than the object.
        UserError: The bucket does not exist, or the cache cannot be written or is too small.
    """
    if not is_remote(address):
        return Path(address)
    with hold_copy(address, open_cache(cache, size=size)) as copy:
        return copy.path


def hold_copy(address: str, cache: ObjectCache) -> CachedFile:
    """Return a copy of a remote file that is not evicted while it is held; raise the same errors as `local_copy`."""
    folder, _, key = address.rpartition("/")
    name, size_bytes = copy_name(address)
    try:
        copy = cache.get(name, size_bytes=size_bytes, fetch=lambda path: open_objects(folder).fetch(key, path))
    except OSError as error:
        if not is_local(error):
            raise
        raise cache_error(cache.folder, address, error) from error
    assert copy is not None  # `get` waits by default
    for cached_name in cache.names(f"{_digest(address)}-"):
        if cached_name != name:
            cache.drop(cached_name)
    return copy


def copy_name(address: str) -> tuple[str, int]:
    """Return the cache name of the current version of a remote file, and the size of the file in bytes.

    Raises:
        OSError: The storage does not respond.
        UserError: The bucket does not exist.
    """
    folder, _, key = address.rpartition("/")
    info = open_objects(folder).info(key)
    state = _digest(f"{info.size_bytes} {info.etag} {info.modified_s}")
    return f"{_digest(address)}-{state}-{key}", info.size_bytes


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class RemoteTars:
    """Reader of byte ranges from the tars of a remote data folder (`clipmill.shards.tars.TarBytes`).

    Args:
        files: Small files of the folder. The paths of their copies, relative to the folder of copies, are object keys.
        cache: Cache for complete tars.

    Attributes:
        gap_bytes: Maximum number of unneeded bytes between two ranges that are read with a single request.
        num_readers: Number of threads that read clips ahead of decoding. It is large, because a request takes tens of
            milliseconds.
    """

    files: RemoteFiles
    cache: ObjectCache

    gap_bytes = 1 << 18  # a request takes at least as long as transferring this many bytes
    num_readers = 32

    @property
    def objects(self) -> Objects:
        """Objects of the data folder."""
        return self.files.objects

    @property
    def num_bytes(self) -> int:
        """Number of bytes that have been downloaded."""
        return self.objects.num_bytes

    def key(self, path: Path) -> str:
        """Return the key of the object for a path in the local copy."""
        return path.relative_to(self.files.copy).as_posix()

    def name(self, path: Path) -> str:
        return self.objects.url_of(self.key(path))

    def read(self, path: Path, offset: int, size: int) -> bytes:
        return self.read_ranges(path, [(offset, size)])[0]

    def read_ranges(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges with concurrent requests; see `clipmill.shards.tars.TarBytes`."""
        try:
            with self._distinguish_refusals():
                return self.objects.read_ranges(self.key(path), ranges)
        except UserError:
            raise
        except OSError as error:
            if "Range request not supported" in str(error):
                raise io.UnsupportedOperation(f"{error.filename}: the server does not support ranges") from error
            raise

    @contextmanager
    def _distinguish_refusals(self) -> Iterator[None]:
        """Context around reads that distinguishes denied access to an object from rejected credentials.

        Denied access makes only one object unreadable, but rejected credentials end the run. dataset.json could be read
        when the folder was opened; if access to dataset.json is denied now, the credentials have been rejected.
        """
        try:
            yield
        except AccessRefused as error:
            try:
                self.objects.read(DATASET_FILE)
            except AccessRefused:
                raise AccessRefused(str(error), hint=error.hint) from None
            raise UnusableResponse(errno.EIO, str(error)) from error

    def provide(self, index: Path, *, size_bytes: int, sha256: str | None = None) -> None:
        try:
            with raise_inaccessible(), self._distinguish_refusals():
                self.files.copy_file(self.key(index), size_bytes=size_bytes, sha256=sha256)
        except OSError as error:
            if is_local(error):
                raise cache_error(self.files.copy, self.objects.url_of(self.key(index)), error) from error
            raise

    def fetch(
        self, shard: CommittedShard, *, waits: bool = True, is_over: Callable[[], bool] = lambda: False
    ) -> CachedFile | None:
        """Return the complete tar of a shard in the cache, after downloading it if necessary.

        Args:
            waits: True to wait if another process is downloading the tar; False to return None in this case.
            is_over: Function that returns True to stop the download with an OSError after the current request.

        Raises:
            clipmill.manifests.storage.cache.NoRoom, OSError: See `ObjectCache.get`.
        """
        key, size_bytes = self.key(shard.tar_path), shard.tar_bytes

        def fetch(path: Path) -> None:
            with path.open("wb") as file:
                for offset in range(0, size_bytes, _BLOCK_BYTES):
                    if is_over():
                        raise InterruptedError(f"{key} is no longer needed")
                    file.write(self.objects.read_range(key, offset, min(_BLOCK_BYTES, size_bytes - offset)))

        name = self.cached_name(shard)
        return self.cache.get(name, size_bytes=size_bytes, fetch=fetch, sha256=shard.tar_sha256, waits=waits)

    def cached_name(self, shard: CommittedShard) -> str:
        """Return the name of a shard's tar in the cache. Identical tars in different folders have the same name."""
        return f"{shard.tar_sha256[:32]}-{shard.tar_path.name}"


def copy_of_folder(address: str, *, cache: Path | None) -> Path:
    """Return the path of the local copy of a remote data folder; raise the same errors as `folder_path`."""
    return cache_folder(cache) / "folders" / _digest(open_objects(address).url)


def open_remote_folder(
    address: str, *, cache: Path | None, cache_size: str | None, column: str | None
) -> tuple[Path, RemoteTars]:
    """Copy the small files of a data folder; return the local copy and a reader of the tars. See `open_data_folder`."""
    objects = open_objects(address)
    tars_cache = open_cache(cache, size=cache_size)
    copy = copy_of_folder(address, cache=cache)
    files = RemoteFiles(objects, copy)
    files.copy_manifest()
    if column is not None:
        files.copy_column(column)
    if not objects.is_writable:
        # Reject a web server that ignores ranges, because it would send a complete shard for each clip.
        try:
            objects.read_range(DATASET_FILE, 0, 1)
        except OSError as error:
            raise UserError(
                f"{objects.url} does not support range requests: {error}",
                hint="use a server that supports them (nginx, caddy, S3), or a pattern of tars: {000..999}.tar",
            ) from error
    return copy, RemoteTars(files, tars_cache)
