"""A data folder that lies elsewhere: its small files are copied into a cache, its tars stay where they are.

Copied are dataset.json, the manifest, and the commits and indexes of the current variant. An index is copied
once: its commit has its SHA-256, which the copy must have. The others are copied at every start, since nothing
says whether they have changed.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import UserError
from manifests.publish import publish_bytes
from manifests.store import MANIFEST_FOLDER
from shards.commits import read_commits
from shards.dataset import current_variant
from shards.format import COMMITS_FOLDER, DATASET_FILE
from shards.tars import TarBytes
from train.data.remote.address import cache_folder, is_remote, open_file_system
from train.data.remote.patience import patiently
from train.data.remote.tars import RemoteTars

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


@dataclass(frozen=True)
class DataFolder:
    """A data folder to read: its small files lie in `path`, and its tars too, unless `tars` reads them."""

    path: Path
    tars: TarBytes | None = None


def open_data_folder(address: str, *, cache: Path | None) -> DataFolder:
    """The data folder at `address`, a path or the address of a remote one.

    Args:
        cache: where copies lie; None for the user's cache.

    Raises:
        UserError: it cannot be read, or is no data folder.
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
        raise UserError(f"{address} cannot be read: {error}", hint="see whether the address is right") from error
    return DataFolder(copy, RemoteTars(files, root, copy=copy))


def _copy_small_files(files: "AbstractFileSystem", root: str, copy: Path) -> None:
    _fetch(files, f"{root}/{DATASET_FILE}", copy / DATASET_FILE)
    _copy_folder(files, f"{root}/{MANIFEST_FOLDER}", copy / MANIFEST_FOLDER, endings=(".parquet", ".json"))
    variant = current_variant(copy, "video")
    if variant is None:
        return
    remote, local = f"{root}/video/{variant}", copy / "video" / variant
    _copy_folder(files, f"{remote}/{COMMITS_FOLDER}", local / COMMITS_FOLDER, endings=(".json",))
    for commit in read_commits(local).commits.values():
        if commit.files is not None:
            _fetch(
                files, f"{remote}/{commit.files.index}", local / commit.files.index, sha256=commit.files.index_sha256
            )


def _copy_folder(files: "AbstractFileSystem", remote: str, local: Path, *, endings: tuple[str, ...]) -> None:
    """Copies the files of a folder, and drops copies of those that have gone."""
    listed = patiently(lambda: files.ls(remote, detail=False), what=remote)
    names = {str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed if str(path).endswith(endings)}
    local.mkdir(parents=True, exist_ok=True)
    for name in sorted(names):
        _fetch(files, f"{remote}/{name}", local / name)
    for path in local.iterdir():
        if path.name.endswith(endings) and path.name not in names:
            path.unlink(missing_ok=True)


def _fetch(files: "AbstractFileSystem", remote: str, local: Path, *, sha256: str | None = None) -> None:
    if sha256 is not None and local.is_file() and hashlib.sha256(local.read_bytes()).hexdigest() == sha256:
        return
    content = bytes(patiently(lambda: files.cat_file(remote), what=remote))
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise OSError(f"{remote} is not the file that was committed")
    local.parent.mkdir(parents=True, exist_ok=True)
    if not (local.is_file() and local.read_bytes() == content):
        publish_bytes(local, content)
