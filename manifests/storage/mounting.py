"""Mount the local folder that mirrors a URL, in a command, in its workers, and in the ranks of a training run.

A command opens the local folder of a URL (`open_data`, `open_run`). Its workers mount the same folder. On a different
node, they first create the folder (`mount_problem`). Each rank of a training run opens a separate folder
(`Mirror.join`).
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from clipmill.manifests.errors import StorageReason, StorageRefused, UserError
from clipmill.manifests.locks import lock, open_private, private_root
from clipmill.manifests.storage.mirrors import mirror_of, mount
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.storage.stores import scheme_of
from clipmill.manifests.storage.urls import is_web
from clipmill.manifests.storage.working_copy import WorkingCopy, is_eager, read_command_id

_SHARED_FOLDERS = ("manifest", "layout")  # folders that a worker on a different node reads, apart from its shards


def open_data(url: str) -> Path:
    """Return the local folder that mirrors a data folder in a bucket. No request is sent yet.

    Raises:
        UserError: The URL is invalid, or belongs to a web server.
    """
    if is_web(url):
        raise UserError(
            f"{url} cannot be a data folder of prep, because web servers can neither be listed nor written to",
            hint="use a folder in a bucket (s3://, gs:// or az://); train can read from https://",
        )
    return _open_copy(url, is_small=is_eager).folder


def open_run(url: str) -> Path:
    """Return the local folder that mirrors a run in a bucket, and update it to match the bucket.

    Raises:
        UserError: The URL is invalid or belongs to a web server, or the bucket does not exist or cannot be read.
    """
    if is_web(url):
        raise UserError(
            f"{url} cannot be a run, because web servers cannot be listed",
            hint="use a URL with s3://, gs:// or az://",
        )
    copy = _open_copy(url, is_small=is_small_in_run)
    try:
        copy.sync()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{url} cannot be read: {error.strerror}", hint="correct the URL, or try again") from error
    return copy.folder


def is_small_in_run(key: str) -> bool:
    """Return True for a file that is always fetched: not a part of a checkpoint, an HTML page or an event file."""
    return not key.endswith((".bin", ".html")) and "tfevents" not in key


def _open_copy(url: str, *, is_small: Callable[[str], bool]) -> WorkingCopy:
    """Return a working copy for this command, in a folder that no other command is using. No request is sent yet."""
    scheme_of(url, is_written=True)
    url = open_objects(url).url
    root = private_root("data")
    root = root.parent.resolve() / root.name
    _require_private(root)
    parent = root / hashlib.sha256(url.encode()).hexdigest()[:16]
    parent.mkdir(mode=0o700, exist_ok=True)
    for number in range(1000):
        folder = parent / f"{os.uname().nodename}-{number}"
        if (mounted_copy := mirror_of(folder)) is not None:
            assert isinstance(mounted_copy, WorkingCopy)
            mounted_copy.forget()
            return mounted_copy
        descriptor = os.open(parent / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not lock(descriptor, waits=False):
            os.close(descriptor)
            continue
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, secrets.token_hex(16).encode(), 0)  # the descriptor stays open until the process ends
        folder.mkdir(exist_ok=True)
        copy = WorkingCopy(url, folder, is_small=is_small)
        mount(copy)
        return copy
    raise UserError(f"too many commands on this machine use {url}", hint="wait until some of them have finished")


def mount_problem(access: tuple[str, ...], token_file: Path | None = None, token: str = "") -> str | None:
    """Mount the data folder of a command in this worker process.

    Args:
        access: `Mirror.access` of the command.
        token_file: File in the bucket with the token of the run; None for a run without a token.
        token: Expected content of that file.

    Returns:
        The reason why this worker must not work, or None if it may work.
    """
    try:
        copy = _mount_in_worker(access)
        if token_file is None:
            return None
        token_file.parent.mkdir(parents=True, exist_ok=True)
        stored_token = copy.objects.read(copy.key_of(token_file)).decode("utf-8", "replace")
    except FileNotFoundError:
        return f"the run has ended, or {access[0]} is a different bucket on this node"
    except (OSError, UserError) as error:
        reason = f"{access[0]} cannot be used: {getattr(error, 'strerror', None) or error}"
        return StorageReason(reason) if isinstance(error, StorageRefused) else reason
    return None if stored_token == token else f"{access[0]} is a different bucket on this node"


def _mount_in_worker(access: tuple[str, ...]) -> WorkingCopy:
    """Return the working copy of a worker. If the command's folder is missing on this node, create it.

    Raises:
        UserError: The bucket cannot be used on this node.
        OSError: The local folder cannot be created.
    """
    url, folder, command_id, *leases = access
    path = Path(folder)
    copy = mirror_of(path)
    if copy is None:
        if read_command_id(path) != command_id:
            _make_folder(path, command_id, access)
        copy = WorkingCopy(url, path)
        mount(copy)
    assert isinstance(copy, WorkingCopy)
    if not copy.leases.fences:  # otherwise, this process is the command, which holds the leases itself
        for key, token in zip(leases[::2], leases[1::2], strict=True):
            copy.leases.fence(key, token)
    return copy


def _make_folder(folder: Path, command_id: str, access: tuple[str, ...]) -> None:
    """Create a command's folder, with the files that all workers read, on a node where the command does not run."""
    _require_private(folder.parent.parent)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("a+") as id_file:
        lock(id_file.fileno())  # another worker on this node may be creating the folder
        if read_command_id(folder) == command_id:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = WorkingCopy(access[0], folder)
        for name in _SHARED_FOLDERS:
            copy.refresh(folder / name)
        id_file.truncate(0)
        id_file.write(command_id)


def _require_private(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_private(root))
