"""Scratch space of a worker on the node's local disk, removed when the work is done, even if a worker was killed.

    $TMPDIR/scratch-clipmill-<uid>/      accessible to this user only (0700), removed once it is empty
        <12 hex>/                        folder of one worker, locked while the worker lives
            clipmill-scratch.json        the marker: program, format, name of the folder, run
        <12 hex>.json                    a marker being moved into its folder, or out of it

A folder is removed only if it is unlocked and holds a marker with its own name. Folders without a marker are never
touched, whatever they are called, and neither is anything else in $TMPDIR. The lock of the parent folder is held while
a folder is created or removed. Anything half made while that lock is free was therefore left by a killed worker, and
the marker beside it names the folder that it belongs to.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clipmill.manifests.locks import is_still_at, lock, open_private, private_root
from clipmill.manifests.publish import parse_json

_PROGRAM, _FORMAT = "clipmill", 1
_MARKER = "clipmill-scratch.json"
_FOLDER = re.compile(r"[0-9a-f]{12}")
_LOOSE_MARKER = re.compile(r"([0-9a-f]{12})\.json")
_MAX_MARKER_BYTES = 1 << 16
_BEGINNING = json.dumps({"program": _PROGRAM})[:-1].encode()


@contextmanager
def scratch_folder(run: str = "") -> Iterator[Path]:
    """Yield a new folder and remove it at the end; first remove folders left here by this user's killed workers.

    Args:
        run: what the folder is used for; stored in the marker for information.

    Raises:
        OSError: the folder cannot be created, or its parent folder is not exclusive to this user.
    """
    remove_abandoned()
    folder, held = _make(_root(), run)
    try:
        yield folder
    finally:
        with suppress(OSError):  # if removal fails, the folder counts as abandoned and the next worker removes it
            _remove(folder)
        os.close(held)


def remove_abandoned() -> None:
    """Remove folders left on this machine by this user's killed workers; those that cannot be removed are kept."""
    root = _root()
    if not root.is_dir() or root.is_symlink():
        return
    with suppress(OSError):
        with _alone(root):
            for loose in root.glob("*.json"):
                if found := _LOOSE_MARKER.fullmatch(loose.name):
                    with suppress(OSError):  # for example because the folder is not empty
                        _remove_loose(loose, root / found[1])
            entries = [entry for entry in root.iterdir() if _FOLDER.fullmatch(entry.name)]
        for folder in entries:
            with suppress(OSError):
                _remove_if_abandoned(folder)
        with _alone(root):
            pass  # it is removed if it is empty


def _root() -> Path:
    return private_root("scratch")


def _make(root: Path, run: str) -> tuple[Path, int]:
    """Create a folder below `root` with its marker; return it with the descriptor that holds its lock."""
    with _alone(root):
        folder = root / secrets.token_hex(6)
        loose = _loose_marker(folder)
        host = os.uname().nodename
        marker = {"program": _PROGRAM, "format": _FORMAT, "folder": folder.name, "run": run}
        try:
            loose.write_text(json.dumps({**marker, "worker": f"process {os.getpid()} on {host}"}) + "\n")
            folder.mkdir(mode=0o700)
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                lock(held)
                loose.rename(folder / _MARKER)
            except BaseException:
                os.close(held)
                raise
        except BaseException:
            with suppress(OSError):
                _finish_removing(folder)
            raise
        return folder, held


def _remove(folder: Path) -> None:
    """Remove a folder whose lock is held: first its content, then the marker and the folder in one step."""
    for entry in folder.iterdir():
        if entry.name == _MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    with _alone(folder.parent):
        (folder / _MARKER).rename(_loose_marker(folder))
        _finish_removing(folder)


def _finish_removing(folder: Path) -> None:
    """Remove an empty folder whose marker is beside it, then the marker; the parent's lock must be held."""
    with suppress(FileNotFoundError):
        folder.rmdir()
    _loose_marker(folder).unlink(missing_ok=True)


def _remove_loose(loose: Path, folder: Path) -> None:
    content = _content(os.open(loose, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    if _names(content, folder.name):
        _finish_removing(folder)
    elif content.startswith(_BEGINNING) or _BEGINNING.startswith(content):
        loose.unlink()  # its writer was killed before the folder was created


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if lock(descriptor, waits=False):
            marker = os.open(_MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
            if _names(_content(marker), folder.name):
                _remove(folder)
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    """Return the content of a small regular file, and close it.

    Raises:
        OSError: it is not a regular file.
    """
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(_MAX_MARKER_BYTES)


def _names(marker: bytes, folder: str) -> bool:
    """Return True if the marker was written by this program for that folder."""
    try:
        content: Any = parse_json(marker)
    except ValueError:
        return False
    wanted = {"program": _PROGRAM, "format": _FORMAT, "folder": folder}
    return isinstance(content, dict) and all(content.get(key) == value for key, value in wanted.items())


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the lock of the parent folder, which is created if missing and removed at the end if empty.

    Raises:
        OSError: it cannot be created, or is not a folder exclusive to this user.
    """
    while True:
        descriptor = open_private(root)
        try:
            lock(descriptor)
            if not is_still_at(root, descriptor):
                continue  # the previous worker left it empty and removed it
            try:
                yield
            finally:
                with suppress(OSError):  # other workers have folders in it
                    root.rmdir()
            return
        finally:
            os.close(descriptor)


def _loose_marker(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
