"""A remote data folder: its small files are copied into a cache, its tars stay where they are.

The copied files are dataset.json, the tables of the manifest, and contents.json, the commits and the indexes of the
current variant. An index is copied once and verified against the SHA-256 in its commit. The tables are copied when
manifest.json, which has their checksums, has changed. Everything else is small and copied at every start. The merged
table of scores is copied when a --where needs it.
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manifests.errors import DISK_ERRORS, UserError
from manifests.publish import publish_bytes, published
from manifests.store import MANIFEST_FILE, MANIFEST_FOLDER
from manifests.table_files import CAPTIONS_FILE, VIDEOS_FILE, describe, staged_path
from shards.commits import ShardFiles, read_commits
from shards.damage import DamagedTar
from shards.dataset import current_variant
from shards.format import COMMITS_FOLDER, CONTENTS_FILE, DATASET_FILE, RECIPE_FILE
from shards.reader import Variant
from shards.scan import scan
from shards.scores import CHUNKS_FILE, SCORES, has_score_table
from shards.tars import TarBytes

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

from train.config.shards import is_remote
from train.data.node_cache import choose_folder

# Remote files through fsspec: addresses, whole files copied into a cache, ranges of tars, and retries.


# Seconds before the second, third and fourth attempt.
_WAITS_S = (0.2, 1.0, 5.0)
# Properties by which file systems identify the content of a file.
_MARKS = ("size", "ETag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "generation")
_Result = TypeVar("_Result")


def open_file_system(address: str) -> "tuple[AbstractFileSystem, str]":
    """The file system of an address, and the path in it.

    Raises:
        UserError: there is no such file system, or a package it needs is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise UserError(f"{address} needs a package that is not here: {error}", hint="install it, with pip") from error
    except (ValueError, OSError) as error:
        known = "s3://bucket/data, gs://bucket/data, https://host/data"
        raise UserError(f"{address} cannot be opened: {error}", hint=f"addresses look like {known}") from error


def with_retries(read: Callable[[], _Result], *, what: str) -> _Result:
    """Return the result of `read`, with up to four attempts.

    Raises:
        OSError: all attempts failed, or one in a way that retrying cannot help.
    """
    for wait_s in (*_WAITS_S, None):
        try:
            return read()
        except (FileNotFoundError, PermissionError, io.UnsupportedOperation):
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            if wait_s is None:
                attempts = len(_WAITS_S) + 1
                raise OSError(f"{what} cannot be read, {attempts} attempts failed; the last: {error}") from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def cache_folder(chosen: Path | None) -> Path:
    """The folder for copies of remote files: the chosen one, or clipmill's in the user's cache.

    Raises:
        UserError: it cannot be created.
    """
    folder = chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipmill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}", hint="choose another with --cache DIR") from error
    return folder


def local_copy(address: str, *, cache: Path | None) -> Path:
    """The path of a local file, or of the copy of a remote one in the cache, fetched if it is missing or outdated.

    Raises:
        OSError: it cannot be fetched, or is shorter than announced.
        UserError: there is no such file system, or the cache cannot be written.
    """
    if not is_remote(address):
        return Path(address)
    files, remote = open_file_system(address)
    info = with_retries(lambda: files.info(remote), what=address)
    folder, of_address = cache_folder(cache) / "tars", _digest(address)
    state = _digest(repr([info.get(mark) for mark in _MARKS]))
    path = folder / f"{of_address}-{state}-{address.rsplit('/', 1)[-1]}"
    if not path.is_file():
        try:
            folder.mkdir(exist_ok=True)
            with_retries(lambda: _fetch_whole(files, remote, path, info=info), what=address)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise cache_unusable(folder, address, error) from error
        for older in folder.glob(f"{of_address}-*"):
            if older != path:
                older.unlink(missing_ok=True)
    return path


def cache_unusable(folder: Path, address: str, error: OSError) -> UserError:
    """The error for a cache that cannot take a copy of `address`."""
    hint = "make room, or choose another folder with --cache DIR"
    return UserError(f"{folder} cannot take a copy of {address}: {error.strerror}", hint=hint)


def _fetch_whole(files: "AbstractFileSystem", remote: str, path: Path, *, info: dict[str, Any]) -> None:
    size = info.get("size")
    with published(path) as temporary:
        files.get_file(remote, str(temporary))
        fetched = temporary.stat().st_size
        # A connection that is closed early may look like the end of the file.
        if size is not None and fetched != size:
            raise OSError(f"received {fetched} of {size} bytes")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RemoteTars:
    """Tars of a remote data folder, of which only the requested bytes are fetched (`shards.tars.TarBytes`).

    Args:
        root: the data folder in the file system.
        copy: the local folder that stands for it; paths below it are paths below `root`.

    Attributes:
        num_bytes: bytes fetched so far.
    """

    gap_bytes = 1 << 18  # a request takes at least as long as transferring this many bytes

    def __init__(self, files: "AbstractFileSystem", root: str, *, copy: Path) -> None:
        self._files, self._root, self._copy = files, root.rstrip("/"), copy
        self.num_bytes = 0

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """See `shards.tars.TarBytes`."""
        remote = f"{self._root}/{path.relative_to(self._copy).as_posix()}"
        content = with_retries(lambda: self._fetch(remote, offset, size, path), what=remote)
        self.num_bytes += len(content)
        return content

    def copy_scores(self) -> None:
        """Copy the merged table of scores, and the commits that it was made of, if there are any.

        Raises:
            UserError: they cannot be read.
        """
        variant = current_variant(self._copy, SCORES)
        if variant is None:
            return  # reading the scores reports it
        remote, local = f"{self._root}/{SCORES}/{variant}", self._copy / SCORES / variant
        try:
            _copy_contents(self._files, f"{remote}/{CONTENTS_FILE}", local / CONTENTS_FILE)
            _copy_commits(self._files, f"{remote}/{COMMITS_FOLDER}", local / COMMITS_FOLDER)
            _publish(local / RECIPE_FILE, _fetch(self._files, f"{remote}/{RECIPE_FILE}"))
            if not has_score_table(Variant(local)):
                path = local / CHUNKS_FILE
                info = with_retries(lambda: self._files.info(f"{remote}/{CHUNKS_FILE}"), what=remote)
                with_retries(lambda: _fetch_whole(self._files, f"{remote}/{CHUNKS_FILE}", path, info=info), what=remote)
        except FileNotFoundError as error:
            raise UserError(f"{remote} is incomplete: {error} is not there", hint="run prep scores") from error
        except OSError as error:
            raise UserError(f"{remote} cannot be read: {error}", hint="check the address") from error

    def _fetch(self, remote: str, offset: int, size: int, path: Path) -> bytes:
        content = bytes(self._files.cat_file(remote, start=offset, end=offset + size))
        if len(content) > size:
            raise io.UnsupportedOperation(
                f"{remote}: received {len(content)} bytes for {size}: the server does not support ranges"
            )
        if len(content) < size:
            raise DamagedTar(path, f"received only {len(content)} of {size} bytes from {offset}")
        return content


_NUM_AT_ONCE = 16
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class DataFolder:
    """A data folder to read: its small files are in `path`, and so are its tars, unless `tars` reads them."""

    path: Path
    tars: TarBytes | None = None


def open_data_folder(address: str, *, cache: Path | None) -> DataFolder:
    """Open the data folder at a local path or a remote address.

    Args:
        cache: folder for copies; None for the user's cache.

    Raises:
        UserError: it cannot be read, or is not a data folder.
    """
    choose_folder(cache)
    if not is_remote(address):
        return DataFolder(Path(address))
    files, root = open_file_system(address)
    copy = cache_folder(cache) / "folders" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    try:
        _copy_small_files(files, root.rstrip("/"), copy)
    except FileNotFoundError as error:
        raise UserError(
            f"{address} is no data folder: {error} is not there",
            hint="name one that prep made, or tars: {000..999}.tar",
        ) from error
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise cache_unusable(copy, address, error) from error
        raise UserError(f"{address} cannot be read: {error}", hint="check the address") from error
    _require_ranges(files, root, address=address)
    return DataFolder(copy, RemoteTars(files, root, copy=copy))


def _require_ranges(files: "AbstractFileSystem", root: str, *, address: str) -> None:
    """Raise a UserError if the server ignores ranges: each clip would cost its whole shard."""
    part = with_retries(lambda: files.cat_file(f"{root.rstrip('/')}/{DATASET_FILE}", start=0, end=1), what=address)
    if len(part) != 1:
        raise UserError(
            f"{address} does not support range requests: received {len(part)} bytes for 1",
            hint="use a server that supports them (nginx, caddy, S3), or name tars: {000..999}.tar",
        )


def _copy_small_files(files: "AbstractFileSystem", root: str, copy: Path) -> None:
    _publish(copy / DATASET_FILE, _fetch(files, f"{root}/{DATASET_FILE}"))
    _copy_manifest(files, f"{root}/{MANIFEST_FOLDER}", copy / MANIFEST_FOLDER)
    variant = current_variant(copy, "video")
    if variant is None:
        return
    remote, local = f"{root}/video/{variant}", copy / "video" / variant
    # Before the commits: a new commit may be missing in the list, never the other way round.
    _copy_contents(files, f"{remote}/{CONTENTS_FILE}", local / CONTENTS_FILE)
    _copy_commits(files, f"{remote}/{COMMITS_FOLDER}", local / COMMITS_FOLDER)
    shards = [commit.files for commit in read_commits(local).commits.values() if commit.files is not None]
    _at_once(lambda shard: _copy_index(files, remote, local, shard), shards)


def _copy_manifest(files: "AbstractFileSystem", remote: str, local: Path) -> None:
    content = _fetch(files, f"{remote}/{MANIFEST_FILE}")
    path = local / MANIFEST_FILE
    try:
        manifest = json.loads(content)
        mark, recorded = manifest["fingerprint"], manifest.get("tables", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        mark, recorded = "", {}  # damaged: reading the copy reports it
    is_same = path.is_file() and path.read_bytes() == content
    for name in (VIDEOS_FILE, CAPTIONS_FILE):
        wanted = recorded.get(name)
        if not (is_same and (local / name).is_file() and wanted in (None, describe(local / name))):
            _publish(local / name, _fetch_table(files, remote, name, mark=mark, wanted=wanted))
    # Last: if it exists, so do the tables it refers to.
    _publish(path, content)


def _fetch_table(
    files: "AbstractFileSystem", remote: str, name: str, *, mark: str, wanted: dict[str, Any] | None
) -> bytes:
    """The current table: under its plain name, unless writing the manifest was interrupted at its very end."""
    content = _fetch(files, f"{remote}/{name}")
    if wanted is None or hashlib.sha256(content).hexdigest() == wanted["sha256"]:
        return content
    try:
        return _fetch(files, f"{remote}/{staged_path(Path(remote), name, fingerprint=mark).name}")
    except FileNotFoundError:
        return content  # damaged: reading the copy reports it


def _copy_contents(files: "AbstractFileSystem", remote: str, local: Path) -> None:
    """Copy the list of commits, which data folders of older versions lack."""
    try:
        content = _fetch(files, remote)
    except FileNotFoundError:
        local.unlink(missing_ok=True)
    else:
        _publish(local, content)


def _copy_commits(files: "AbstractFileSystem", remote: str, local: Path) -> None:
    """Copy the commits, and remove copies of those that no longer exist."""
    listed = with_retries(lambda: files.ls(remote, detail=False), what=remote)
    names = {name for path in listed if (name := str(path).rsplit("/", 1)[-1]).endswith(".json")}
    _at_once(lambda name: _publish(local / name, _fetch(files, f"{remote}/{name}")), names)
    for path in local.glob("*.json"):
        if path.name not in names:
            path.unlink(missing_ok=True)


def _copy_index(files: "AbstractFileSystem", remote: str, local: Path, shard: ShardFiles) -> None:
    path = local / shard.index
    if path.is_file() and scan(path).sha256 == shard.index_sha256:
        return
    content = _fetch(files, f"{remote}/{shard.index}")
    if hashlib.sha256(content).hexdigest() != shard.index_sha256:
        raise OSError(f"{remote}/{shard.index} is not the file that was committed")
    _publish(path, content)


def _at_once(copy: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Copy several files at a time, since each waits for the network."""
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        # Consumed, so that errors are raised here.
        list(pool.map(copy, items))


def _fetch(files: "AbstractFileSystem", remote: str) -> bytes:
    return bytes(with_retries(lambda: files.cat_file(remote), what=remote))


def _publish(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path.is_file() and path.read_bytes() == content):
        publish_bytes(path, content)
