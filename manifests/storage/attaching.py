"""Mounting working copies: the local folder of a command, and those of its workers on other nodes."""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import lock, open_private, private_root
from clipmill.manifests.storage.local_files import run_of
from clipmill.manifests.storage.mirrors import mirror_of, mount
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.storage.stores import scheme_of
from clipmill.manifests.storage.working_copy import WorkingCopy

_SHARED_FOLDERS = ("manifest", "layout")  # what a worker on another node reads beside its shards


def open_data(address: str) -> Path:
    """Return the local folder that mirrors a data folder in a bucket; no request is sent yet.

    Raises:
        UserError: the address cannot hold a data folder.
    """
    scheme_of(address, is_written=True)
    objects = open_objects(address)
    address = objects.address
    if not objects.is_writable:
        raise UserError(
            f"{address} cannot be a data folder of prep, which writes and lists it",
            hint="give a folder of a bucket (s3://, gs:// or az://); train can read from https://",
        )
    parent = _folder_of(address)
    for number in range(1000):
        folder = parent / f"{os.uname().nodename}-{number}"
        if (known := mirror_of(folder)) is not None:
            if isinstance(known, WorkingCopy):
                known.forget()
            return folder
        held = os.open(parent / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not lock(held, waits=False):
            os.close(held)
            continue
        os.ftruncate(held, 0)
        os.pwrite(held, secrets.token_hex(16).encode(), 0)  # the descriptor stays open until the process ends
        folder.mkdir(exist_ok=True)
        mount(WorkingCopy(address, folder))
        return folder
    raise UserError(f"too many commands on this machine use {address}", hint="wait until some of them have finished")


def mount_problem(access: tuple[str, ...], token_file: Path | None = None, token: str = "") -> str | None:
    """Mount the data folder of a command in this worker; return why it must not work, or None.

    Args:
        access: `Mirror.access` of the command.
        token_file, token: the token of the run, which is read from the bucket; None for a run without one.
    """
    try:
        copy = _mounted_by_worker(access)
        if token_file is None:
            return None
        token_file.parent.mkdir(parents=True, exist_ok=True)
        found = copy.objects.read(copy.key_of(token_file)).decode("utf-8", "replace")
    except FileNotFoundError:
        return f"the run has ended, or {access[0]} is another bucket there"
    except (OSError, UserError) as error:
        return f"{access[0]} cannot be used: {getattr(error, 'strerror', None) or error}"
    return None if found == token else f"{access[0]} is another bucket there"


def _mounted_by_worker(access: tuple[str, ...]) -> WorkingCopy:
    """Return the working copy of a worker, whose folder is made if this node has none of the run.

    Raises:
        UserError: the bucket cannot be used from here.
        OSError: the local folder cannot be made.
    """
    address, folder, run, *leases = access
    path = Path(folder)
    copy = mirror_of(path)
    if copy is None:
        if run_of(path) != run:
            _make_anew(path, run, access)
        copy = WorkingCopy(address, path)
        mount(copy)
    assert isinstance(copy, WorkingCopy)
    if not copy.leases.fences:  # of a worker, not of the command itself
        for key, token in zip(leases[::2], leases[1::2], strict=True):
            copy.leases.fence(key, token)
    return copy


def _make_anew(folder: Path, run: str, access: tuple[str, ...]) -> None:
    """Make the folder of a run on another node than the command's, with the files that all its workers read."""
    _require_private(folder.parent.parent)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("a+") as run_file:
        lock(run_file.fileno())  # another worker of this node may be making it
        if run_of(folder) == run:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = WorkingCopy(access[0], folder)
        for name in _SHARED_FOLDERS:
            copy.refresh(folder / name)
        run_file.truncate(0)
        run_file.write(run)


def _folder_of(address: str) -> Path:
    """Return the local folder of an address, which is made if it is missing."""
    root = private_root("data")
    root = root.parent.resolve() / root.name
    _require_private(root)
    folder = root / hashlib.sha256(address.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _require_private(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_private(root))
