"""Scratch space of a worker, on the node's own disk, removed when the work is done; also after a kill.

    $TMPDIR/scratch-clipmill-<uid>/      this user's alone (0700), removed once it is empty
        <12 hex>/                        one worker's, locked for as long as the worker lives
            clipmill-scratch.json        the marker: program, format, name of the folder, run
        <12 hex>.json                    a marker on its way into its folder, or out of it

A folder is removed only if it is unlocked and holds a marker with its own name. Folders without one are never touched,
whatever they are called, and neither is anything else in $TMPDIR. The lock of the parent folder is held while a folder
comes into being or goes, so whatever is half made when that lock is free was left by a killed worker, and its marker
beside it tells which folder was meant.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manifests.json_text import parse_json

_PROGRAM, _FORMAT = "clipmill", 1
_MARKER = "clipmill-scratch.json"
_FOLDER = re.compile(r"[0-9a-f]{12}")
_LOOSE_MARKER = re.compile(r"([0-9a-f]{12})\.json")
_MAX_MARKER_BYTES = 1 << 16
_BEGINNING = json.dumps({"program": _PROGRAM})[:-1].encode()


@contextmanager
def scratch_folder(run: str = "") -> Iterator[Path]:
    """Yields a new folder and removes it at the end; first removes those that killed workers of this user left here.

    Args:
        run: what the space is for; stands in the marker, for people.

    Raises:
        OSError: the folder cannot be made, or the folder for all of them is not this user's alone.
    """
    remove_abandoned()
    folder, lock = _make(_root(), run)
    try:
        yield folder
    finally:
        with suppress(OSError):  # what cannot be removed now is abandoned, and found by the next worker
            _remove(folder)
        os.close(lock)


def remove_abandoned() -> None:
    """Removes what killed workers of this user left on this machine; what cannot be removed stays."""
    root = _root()
    if not root.is_dir() or root.is_symlink():
        return
    with suppress(OSError):
        with _alone(root):
            for loose in root.glob("*.json"):
                if found := _LOOSE_MARKER.fullmatch(loose.name):
                    with suppress(OSError):  # for one, because there is something in the folder
                        _remove_loose(loose, root / found[1])
            entries = [entry for entry in root.iterdir() if _FOLDER.fullmatch(entry.name)]
        for folder in entries:
            with suppress(OSError):
                _remove_if_abandoned(folder)
        with _alone(root):
            pass  # it goes if it is empty


def _root() -> Path:
    # Asked for another place when this one is full, gettempdir() would give it without a word.
    # Older versions remove every `clipmill-*` in $TMPDIR, and may be at work on this machine.
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"scratch-{_PROGRAM}-{os.geteuid()}"


def _make(root: Path, run: str) -> tuple[Path, int]:
    """A new folder below `root` with its marker, and the descriptor that holds its lock."""
    with _alone(root):
        folder = root / secrets.token_hex(6)
        loose = _loose_marker(folder)
        host = os.uname().nodename
        marker = {"program": _PROGRAM, "format": _FORMAT, "folder": folder.name, "run": run}
        try:
            loose.write_text(json.dumps({**marker, "worker": f"process {os.getpid()} on {host}"}) + "\n")
            folder.mkdir(mode=0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                loose.rename(folder / _MARKER)
            except BaseException:
                os.close(lock)
                raise
        except BaseException:
            with suppress(OSError):
                _finish_removing(folder)
            raise
        return folder, lock


def _remove(folder: Path) -> None:
    """Removes a folder whose lock is held: its content, then marker and folder as one step."""
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
    """Removes an empty folder whose marker lies beside it, then the marker; the parent's lock is held."""
    with suppress(FileNotFoundError):
        folder.rmdir()
    _loose_marker(folder).unlink(missing_ok=True)


def _remove_loose(loose: Path, folder: Path) -> None:
    content = _content(os.open(loose, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    if _names(content, folder.name):
        _finish_removing(folder)
    elif content.startswith(_BEGINNING) or _BEGINNING.startswith(content):
        loose.unlink()  # killed while it was written, so that its folder never came to be


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        marker = os.open(_MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=lock)
        if _names(_content(marker), folder.name):
            _remove(folder)
    finally:
        os.close(lock)


def _content(descriptor: int) -> bytes:
    """What a small regular file holds; closes it.

    Raises:
        OSError: it is another kind of file.
    """
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(_MAX_MARKER_BYTES)


def _names(marker: bytes, folder: str) -> bool:
    """Whether the content of a marker is this program's, and speaks of that folder."""
    try:
        said: Any = parse_json(marker)
    except ValueError:
        return False
    wanted = {"program": _PROGRAM, "format": _FORMAT, "folder": folder}
    return isinstance(said, dict) and all(said.get(key) == value for key, value in wanted.items())


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Holds the lock of the parent folder, which is made if need be and removed at the end if it is empty.

    Raises:
        OSError: it cannot be made, or is not a folder of this user alone.
    """
    while True:
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        try:
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not root.parent.is_dir():
                raise
            continue  # the worker before had no more in it, and removed it
        try:
            state = os.fstat(lock)
            if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
                message = "not a folder of this user alone (mode 0700); remove it, or set TMPDIR to another folder"
                raise PermissionError(errno.EPERM, message, os.fspath(root))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same(root, state):
                continue
            try:
                yield
            finally:
                with suppress(OSError):  # others have their folders in it
                    root.rmdir()
            return
        finally:
            os.close(lock)


def _is_same(path: Path, state: os.stat_result) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (state.st_dev, state.st_ino)


def _loose_marker(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
