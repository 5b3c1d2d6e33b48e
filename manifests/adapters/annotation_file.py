"""Opening an annotation file: whatever the file, its folder or its disk does is an error that names the file."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from manifests.errors import UserError


@contextmanager
def open_annotations(path: Path, mode: str = "r", **options: Any) -> Iterator[IO[Any]]:
    """`path.open(mode, **options)`, with errors of opening and of reading as UserErrors.

    Only regular files are opened: a pipe can be read once, an adapter may have to read twice, and opening a named pipe
    blocks until somebody writes to it.

    Raises:
        UserError: the file cannot be opened or read, or is a folder, a pipe, a socket or a device.
    """
    with reading(path):
        kind = stat_kind(path.stat().st_mode)
        if kind is not None:
            hint = "give the file itself" if kind == "a folder" else "write its content to a file, and give that file"
            raise UserError(f"cannot read {path}: it is {kind}, not a file", hint=hint)
        with path.open(mode, **options) as file:
            yield file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {why}", hint="check the path of the annotation file") from error


def stat_kind(mode: int) -> str | None:
    """What the file with this st_mode is, in words, when it is no regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
