"""Checks on the location of a data folder."""

import errno
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import mirror_of

if TYPE_CHECKING:
    from clipmill.manifests.storage.urls import Place

_PACKAGE = Path(__file__).resolve().parent


def check_data_dir(data_dir: Path, *, videos: "Place | None" = None) -> None:
    """Reject a data folder that would mix with the program's source or with the source videos.

    Raises:
        UserError: `data_dir` is a file, is the folder of clipmill's packages, is inside one of them, or is the folder
            of the videos.
    """
    if (mirror := mirror_of(data_dir)) is not None:
        if isinstance(videos, str) and videos.rstrip("/") == mirror.address.rstrip("/"):
            raise _is_both(videos)
        mirror.is_empty  # noqa: B018 - lists the bucket, before any work begins
        return
    resolved = resolved_folder(data_dir)
    if resolved.exists() and not resolved.is_dir():
        raise UserError(f"the data folder {data_dir} is a file", hint="give a folder with --data")
    if _is_source_tree(resolved) or any(_is_package_of_tree(folder) for folder in (resolved, *resolved.parents)):
        raise UserError(
            f"the data folder {data_dir} is inside the source code of clipmill",
            hint="give another folder with --data or $CLIPMILL_DATA",
        )
    if isinstance(videos, Path) and resolved == resolved_folder(videos):
        raise _is_both(data_dir)


def address_of(data_dir: Path) -> "Place":
    """Return the address of a data folder in a bucket, and the path of a local one."""
    mirror = mirror_of(data_dir)
    return data_dir if mirror is None else mirror.address


def _is_both(place: "Place") -> UserError:
    return UserError(
        f"{place} is both the data folder and the folder of the videos", hint="give a separate data folder with --data"
    )


def resolved_folder(folder: Path) -> Path:
    """Resolve symbolic links in `folder`, which need not exist, and verify that it is accessible.

    Raises:
        UserError: it is not: a loop of links, a name that is too long, or a parent folder without permission.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()  # `exists` is False for a loop of links
        return folder.resolve()
    except OSError as error:
        why = "its symbolic links form a loop" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise UserError(
            f"cannot access {folder}: {why}", hint="give another folder, or fix its links and permissions"
        ) from error


def _is_source_tree(folder: Path) -> bool:
    return folder == _PACKAGE.parent or (folder / "manifests" / "schema.py").exists()


def _is_package_of_tree(folder: Path) -> bool:
    """Return True if `folder` is one of clipmill's packages (`<tree>/shards` is one, `<tree>/data` is not)."""
    return (folder / "__init__.py").exists() and _is_source_tree(folder.parent)
