"""Addresses of files: `s3://bucket/data`, `https://...`; everything without `://` is a path on this machine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def is_remote(address: str) -> bool:
    """Whether the address names a file system of fsspec."""
    return "://" in address


def open_file_system(address: str) -> "tuple[AbstractFileSystem, str]":
    """The file system of an address, and the path in it.

    Raises:
        UserError: there is no such file system, or what it needs is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise UserError(f"{address} needs a package that is not here: {error}", hint="install it, with pip") from error
    except (ValueError, OSError) as error:
        known = "s3://bucket/data, gs://bucket/data, https://host/data"
        raise UserError(f"{address} cannot be opened: {error}", hint=f"addresses look like {known}") from error


def cache_folder(chosen: Path | None) -> Path:
    """Where copies of remote files lie: the folder that the user chose, or the user's cache.

    Raises:
        UserError: it cannot be made.
    """
    folder = chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipmill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}", hint="choose another with --cache DIR") from error
    return folder
