"""Lock files and folders across processes with `flock`. A lock is released when its holder ends or is killed.

A lock belongs to an open file or folder, and lasts until the file's descriptor and all of its mappings are closed. The
lock also excludes processes on other nodes if the file system supports this: NFS and Lustre have mount options that
restrict `flock` to a single node, and others that turn locks off. In a bucket, locks are leases
(`clipmill.manifests.storage.leases`).

In $TMPDIR, the locked folders are private: only their owner can read them (`open_private`). They contain local copies
of buckets, source videos and checkpoints, and scratch data.
"""

import errno
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import tag_errors
from clipmill.manifests.storage.mirrors import mirror_of

_NUM_TRIES, _TRY_INTERVAL_S = 20, 0.1  # attempts to take a lock before a message says that the command is waiting


def lock(descriptor: int, *, is_shared: bool = False, waits: bool = True) -> bool:
    """Lock an open file or folder, and return True if the lock is held.

    Args:
        is_shared: Take a shared lock, which several processes can hold at once, instead of an exclusive lock.
        waits: True to wait while another process holds the lock; False to return False without waiting.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock(path: Path, *, is_shared: bool = False) -> int | None:
    """Lock an existing file without waiting.

    Returns:
        The descriptor that holds the lock, or None if the file is missing or locked by another process.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    if lock(descriptor, is_shared=is_shared, waits=False):
        return descriptor
    os.close(descriptor)
    return None


@contextmanager
def hold_lock(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Context manager that locks a file, which is created if it is missing, and yields True if the lock is held.

    Args:
        waits: True to wait while another process or thread holds the lock; False to run the block without the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        yield lock(descriptor, waits=waits)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Context manager that waits for an exclusive lock on a folder, and holds the lock throughout the block."""
    mirror = mirror_of(folder)
    if mirror is not None and mirror.folder == folder:
        with mirror.folder_lock():
            yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


class FileLock:
    """Lock on a file in a data folder. The file contains a note about the holder of the lock."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, path: Path, *, is_shared: bool = False) -> "FileLock | None":
        """Take the lock without waiting. Return None if another process holds it.

        Args:
            is_shared: Take a shared lock, which several processes can hold at once.

        Raises:
            UserError: The file or its folder is not writable, or the file system does not support locks.
        """
        file_lock = cls._open(path)
        return file_lock if file_lock._acquire(is_shared=is_shared, waits=False) else None

    @classmethod
    def wait(cls, path: Path, *, on_wait: Callable[[], object]) -> "FileLock":
        """Take the exclusive lock, and wait while another process holds it.

        Args:
            on_wait: Function that is called once if the lock is not free within about 2 s.

        Raises:
            UserError: The file or its folder is not writable, or the file system does not support locks.
        """
        for _ in range(_NUM_TRIES):
            if (file_lock := cls.take(path)) is not None:
                return file_lock
            time.sleep(_TRY_INTERVAL_S)
        on_wait()
        file_lock = cls._open(path)
        file_lock._acquire(is_shared=False, waits=True)
        return file_lock

    @classmethod
    def _open(cls, path: Path) -> "FileLock":
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        except OSError as error:
            unwritable_path = path if path.exists() else path.parent
            raise UserError(
                f"{unwritable_path} is not writable: {error.strerror}",
                hint="grant write permission (to a group: chmod g+w), or use a different folder with --data",
            ) from None

    def _acquire(self, *, is_shared: bool, waits: bool) -> bool:
        is_held = False
        try:
            with tag_errors(self.path):
                is_held = lock(self._descriptor, is_shared=is_shared, waits=waits)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            raise UserError(
                f"the file system of {self.path.parent} does not support locks: {error.strerror}",
                hint="mount Lustre with -o flock, or NFS with its lock service",
            ) from None
        finally:
            if not is_held:
                self.release()
        return is_held

    def note(self, holder: str) -> None:
        """Write a note about the holder into the file."""
        with tag_errors(self.path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)

    def touch(self) -> None:
        """Set the modification time of the file to now."""
        os.utime(self._descriptor)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def holder_of(path: Path) -> str:
    """Return the note about the holder in a lock file, or "" if there is no note."""
    try:
        return path.read_bytes()[:4000].decode("utf-8", "replace").strip()
    except OSError:
        return ""


def process_label() -> str:
    """Return a note that identifies this process to people: its process ID and its node."""
    return f"process {os.getpid()} on {os.uname().nodename}"


def process_record() -> dict[str, Any]:
    """Return a JSON-serializable record that identifies this process among the processes of all machines."""
    pid = os.getpid()
    return {"holder": process_label(), "machine": machine_id(), "process": pid, "started": _start_time(pid)}


def is_abandoned(record: Mapping[str, Any]) -> bool:
    """Return True if a `process_record` describes a process that ran on this machine and has ended."""
    if record.get("machine") != machine_id():
        return False
    return _start_time(int(record.get("process", 0))) != record.get("started")


def machine_id() -> str:
    """Return an ID for the current boot of this machine. Containers with separate PID namespaces have different IDs."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return secrets.token_hex(16)  # a random ID, so that two machines that cannot be identified never compare equal


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since the boot, or None if the process is not running."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def private_root(purpose: str) -> Path:
    """Return the path of this user's temporary folder for `purpose`, which may not exist yet."""
    # $TMPDIR is read first, because gettempdir() silently returns a different folder if $TMPDIR is unusable.
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"{purpose}-clipmill-{os.geteuid()}"


def open_private(folder: Path) -> int:
    """Open a private folder, which is created if it is missing, and return a descriptor that can be locked.

    Raises:
        PermissionError: The path is a link or a file, or the folder belongs to or is accessible to other users.
        OSError: The folder cannot be created.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # another process removed the folder in the meantime
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _not_private_error(folder) from None
            raise
        state = os.fstat(descriptor)
        if state.st_uid == os.geteuid() and not state.st_mode & 0o077:
            return descriptor
        os.close(descriptor)
        raise _not_private_error(folder)


def is_same_folder(folder: Path, descriptor: int) -> bool:
    """Return True if a path still refers to an open folder, which may have been removed or replaced."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _not_private_error(folder: Path) -> PermissionError:
    message = "not a private folder of this user (mode 0700); remove it, or set TMPDIR to a different folder"
    return PermissionError(errno.EPERM, message, os.fspath(folder))
