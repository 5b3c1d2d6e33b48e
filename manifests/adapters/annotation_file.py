"""Opening annotation files, with I/O errors that name the file."""

import codecs
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from clipmill.manifests.errors import UserError

_MAX_PART_BYTES = 1 << 20  # of a line, which may be as long as the file


@contextmanager
def open_annotations(path: Path, mode: str = "r", **options: Any) -> Iterator[IO[Any]]:
    """`path.open(mode, **options)` that raises UserError if opening or reading fails.

    Only regular files are accepted: an adapter may read a file twice, which a pipe does not allow, and opening a named
    pipe blocks until another process writes to it.

    Raises:
        UserError: the file cannot be opened or read, or is a folder, a pipe, a socket or a device.
    """
    with reading(path):
        require_file(path)
        with path.open(mode, **options) as file:
            yield file


def require_file(path: Path) -> None:
    """Raise UserError unless `path` is a regular file or missing, which opening it says."""
    with reading(path):
        try:
            kind = stat_kind(path.stat().st_mode)
        except FileNotFoundError:
            return
    if kind is not None:
        hint = "give the path of a file" if kind == "a folder" else "save its content to a file, and give that file"
        raise UserError(f"cannot read {path}: it is {kind}, not a file", hint=hint)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError into a UserError naming `path`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {why}", hint="check the path of the annotation file") from error


def not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    """Return the error for a file that is not UTF-8. It names the line, for which the file is read again."""
    line_number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError), open_annotations(path, "rb") as file:
        while part := file.readline(_MAX_PART_BYTES):
            decoder.decode(part)
            line_number += part.endswith(b"\n")
    return UserError(f"{path}, line {line_number}: not UTF-8 ({error.reason})", hint="save it as UTF-8, uncompressed")


def stat_kind(mode: int) -> str | None:
    """Describe the file type of this st_mode; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
