"""Data folders by their paths or addresses; the readers of buckets are loaded for addresses only."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.storage.mirrors import is_remote
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import is_data_folder, not_a_data_folder
from clipmill.train.data.node_cache import choose_folder

if TYPE_CHECKING:
    from clipmill.train.data.remote import RemoteTars


@dataclass(frozen=True)
class DataFolder:
    """A data folder to read: its small files are in `path`, and so are its tars, unless `tars` reads them."""

    path: Path
    tars: "RemoteTars | None" = None


def folder_path(address: str, *, cache: Path | None) -> Path:
    """Path of a local data folder, or of the copy of a remote one.

    Raises:
        UserError: there is no such storage, or the cache folder cannot be created.
    """
    if not is_remote(address):
        return Path(address)
    from clipmill.train.data.remote import copy_of_folder

    return copy_of_folder(address, cache=cache)


def open_data_folder(
    address: str, *, cache: Path | None, cache_size: str | None = None, column: str | None = VIDEO
) -> DataFolder:
    """Open the data folder at a local path or a remote address.

    Args:
        cache: Folder for copies; None for the user's cache.
        cache_size: Limit for complete tars there, such as 100GB; None for a limit by the free disk.
        column: Column whose shards are read; None if only the manifest is read. `RemoteFiles.copy_column` copies the
            small files of other columns when they are needed.

    Raises:
        UserError: it cannot be read, or is not a data folder.
    """
    choose_folder(cache)
    if not is_remote(address):
        if (path := Path(address)).exists() and not is_data_folder(path):
            raise not_a_data_folder(path)
        return DataFolder(path)
    from clipmill.train.data.remote import open_remote_folder

    return DataFolder(*open_remote_folder(address, cache=cache, cache_size=cache_size, column=column))
