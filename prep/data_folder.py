"""The data folder that a command works in: where its parts lie, and that one command at a time writes a column."""

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shards.format
from manifests.errors import UserError
from manifests.publish import TEMPORARY_PREFIX

VIDEO, LATENTS, TEXT = COLUMNS = shards.format.COLUMNS


def require_data_folder(data_dir: Path) -> Path:
    """The absolute path of an existing data folder.

    Raises:
        UserError: it does not exist, or is not a folder.
    """
    if not data_dir.exists():
        raise UserError(
            f"there is no data folder {data_dir}",
            hint=f"make one: prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        )
    if not data_dir.is_dir():
        raise UserError(f"{data_dir} is not a folder", hint="give the folder that `prep manifest` wrote to as --data")
    return data_dir.resolve()


@contextmanager
def writing(data_dir: Path, *, column: str = VIDEO) -> Iterator[None]:
    """Holds one column for one writing command; the kernel lets go when the process ends, however it ends.

    Other columns can be written meanwhile. Who holds `video` holds the manifest and the layout too.

    Raises:
        UserError: another command holds it, or it cannot be written to.
    """
    path = data_dir / (".lock" if column == VIDEO else f".{column}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{data_dir} cannot be written to: {error.strerror}", hint="make it writable, or give another --data"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            raise UserError(
                f"another command is writing to {data_dir} ({holder})",
                hint=f"it holds the column {column}: wait for it to end, or stop it",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def remove_temporaries(variant_dir: Path) -> None:
    """Removes what killed writers left in a variant's folder; call it only while `writing`."""
    for folder in (variant_dir, variant_dir / "commits"):
        for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
