"""A remote data folder: its small files are copied into a cache, its tars stay where they are.

The copied files are dataset.json, the tables of the manifest, and contents.json, the commits and the indexes of the
current variant. An index is copied once and verified against the SHA-256 in its commit. The tables are copied when
manifest.json, which has their checksums, has changed. Everything else is small and copied at every start.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manifests.errors import DISK_ERRORS, UserError
from manifests.publish import publish_bytes
from manifests.store import MANIFEST_FILE, MANIFEST_FOLDER
from manifests.table_files import CAPTIONS_FILE, VIDEOS_FILE, describe, staged_path
from shards.commits import ShardFiles, read_commits
from shards.dataset import current_variant
from shards.format import COMMITS_FOLDER, CONTENTS_FILE, DATASET_FILE
from shards.scan import scan
from shards.tars import TarBytes
from train.data.remote.files import RemoteTars, cache_folder, cache_unusable, is_remote, open_file_system, with_retries

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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
        return _fetch(files, f"{remote}/{staged_path(Path(remote), name, mark=mark).name}")
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
