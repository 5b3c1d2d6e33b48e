"""Wrappers around a process's file operations, each of which calls `watch.visit`.

They cover the functions of `os`, which pathlib, shutil and tempfile use as well, and writes to files returned by
`open`, opening source videos for reading, and the start of ffmpeg. Arrow's Parquet writer (C++) is redirected to such a
file. Reads and writes of other programs (ffmpeg) are not intercepted.
"""

import builtins
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

from tests.torture.interposer import parquet
from tests.torture.interposer.watch import begin, is_source, is_watched, read, started, visit

_real: dict[str, Any] = {
    name: getattr(os, name)
    for name in (
        *("open", "write", "pwrite", "writev", "sendfile", "fsync", "fdatasync", "truncate", "ftruncate"),
        *("rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "mkdir"),
    )
}
_real_open = io.open
_real_popen = subprocess.Popen.__init__


def _where(target: Any, folder: int | None = None) -> str | None:
    """Return the absolute path of a file given by name or descriptor."""
    try:
        if isinstance(target, int):
            return str(Path(f"/proc/self/fd/{target}").readlink())
        base = Path.cwd() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
        return os.path.normpath(base / os.fsdecode(target))  # symbolic links are not resolved
    except (OSError, TypeError):
        return None


def _take_half(content: Any) -> memoryview:
    view = memoryview(content).cast("B")
    return view[: len(view) // 2]


def _open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    def act() -> int:
        return cast(int, _real["open"](path, flags, mode, dir_fd=dir_fd))

    changes = flags & os.O_TRUNC or (flags & os.O_CREAT and not _exists(_where(path, dir_fd)))
    return visit("open", _where(path, dir_fd), act, names=(path,)) if changes else act()


def _write(descriptor: int, content: Any, /) -> int:
    real = _real["write"]
    return visit(
        "write",
        _regular(descriptor),
        lambda: real(descriptor, content),
        act_in_part=lambda: real(descriptor, _take_half(content)),
    )


def _pwrite(descriptor: int, content: Any, offset: int, /) -> int:
    real = _real["pwrite"]
    return visit(
        "write",
        _regular(descriptor),
        lambda: real(descriptor, content, offset),
        act_in_part=lambda: real(descriptor, _take_half(content), offset),
    )


def _writev(descriptor: int, contents: Any, /) -> int:
    real = _real["writev"]
    return visit(
        "write",
        _regular(descriptor),
        lambda: real(descriptor, contents),
        act_in_part=lambda: real(descriptor, [_take_half(contents[0])]),
    )


def _sendfile(out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
    def send(num_bytes: int) -> int:
        return cast(int, _real["sendfile"](out_fd, in_fd, offset, num_bytes))

    size = min(count, os.fstat(in_fd).st_size - (offset or 0))
    where = _regular(out_fd) if size > 0 else None  # otherwise the call only checks whether more data is available
    return visit("write", where, lambda: send(count), act_in_part=lambda: send(max(1, size // 2)))


def _of_descriptor(operation: str, name: str) -> Callable[..., Any]:
    def call(target: Any, *arguments: Any) -> Any:
        names = () if isinstance(target, int) else (target,)
        return visit(operation, _where(target), lambda: _real[name](target, *arguments), names=names)

    return call


def _of_path(name: str) -> Callable[..., Any]:
    """Wrap an operation that requires an existing path, or, for mkdir, a missing one."""

    def call(path: Any, *arguments: Any, dir_fd: int | None = None) -> Any:
        where = _where(path, dir_fd)
        if _exists(where) == (name == "mkdir"):
            where = None
        operation = "unlink" if name == "remove" else name
        return visit(operation, where, lambda: _real[name](path, *arguments, dir_fd=dir_fd), names=(path,))

    return call


def _of_two_paths(operation: str, name: str) -> Callable[..., Any]:
    def call(old: Any, new: Any, **named: Any) -> Any:
        path = _where(new, named.get("dst_dir_fd"))
        source = _where(old, named.get("src_dir_fd"))
        return visit(operation, path, lambda: _real[name](old, new, **named), names=(old, None, new), source=source)

    return call


def _exists(path: str | None) -> bool:
    return path is not None and os.path.lexists(path)


def _regular(descriptor: int) -> str | None:
    """Return the path of an open file; None for a pipe or a socket."""
    try:
        return _where(descriptor) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None


class _WatchedFile(io.FileIO):
    """File whose writes are points."""

    def write(self, content: Any, /) -> int:
        write = super().write
        return cast(
            int,
            visit(
                "write",
                _regular(self.fileno()),
                lambda: write(content),
                act_in_part=lambda: write(_take_half(content)),
            ),
        )

    def truncate(self, size: int | None = None, /) -> int:
        truncate = super().truncate
        return visit("truncate", _regular(self.fileno()), lambda: truncate(size))


def _open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    writes = bool(set(mode) & set("wax+"))
    path = _where(file) if writes or isinstance(file, (str, os.PathLike)) else None
    if not writes and path is not None and is_source(path):
        module = _caller("clipmill.prep.sources.access", "contextlib").f_globals.get("__name__", "")
        read(path, module=module.rpartition(".")[2])
    if not writes or not is_watched(path):
        return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw_mode = "".join(letter for letter in mode if letter in "rwax+")

    def act() -> _WatchedFile:
        return _WatchedFile(file, raw_mode, closefd, opener)

    creates = not isinstance(file, int) and ("w" in mode or not _exists(path))
    raw = visit("open", path, act, names=(file,)) if creates else act()
    is_text = "b" not in mode
    if buffering == 0 and not is_text:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if not is_text:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def _caller(*modules: str) -> FrameType:
    """Return the innermost frame outside `modules` and this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "") in (__name__, *modules):
        frame = frame.f_back
    assert frame is not None
    return frame


def _popen(process: Any, arguments: Any, *others: Any, **named: Any) -> None:
    """Replacement for `subprocess.Popen.__init__` that counts the start of an ffmpeg process as a point."""
    _real_popen(process, arguments, *others, **named)
    program = Path(arguments if isinstance(arguments, (str, os.PathLike)) else arguments[0]).name
    if program.startswith("ffmpeg"):
        started("ffmpeg", process.pid, function=_caller("subprocess").f_code.co_name)


def install() -> None:
    """Start intercepting the operations of this process."""
    begin()
    watched: dict[str, Callable[..., Any]] = {
        "open": _open_descriptor,
        "write": _write,
        "pwrite": _pwrite,
        "writev": _writev,
        "sendfile": _sendfile,
        "link": _of_two_paths("link", "link"),
        "symlink": _of_two_paths("link", "symlink"),
        "rename": _of_two_paths("rename", "rename"),
        "replace": _of_two_paths("rename", "replace"),
    }
    for name in ("unlink", "remove", "rmdir", "mkdir"):
        watched[name] = _of_path(name)
    for name in ("fsync", "fdatasync"):
        watched[name] = _of_descriptor("fsync", name)
    for name in ("truncate", "ftruncate"):
        watched[name] = _of_descriptor("truncate", name)
    for name, function in watched.items():
        # shutil looks up these sets to decide whether it can use descriptors; it could not if the wrapped functions
        # were missing.
        for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if _real[name] in known:
                known.add(function)
        setattr(os, name, function)
    builtins.open = io.open = _open  # type: ignore[assignment]
    subprocess.Popen.__init__ = _popen  # type: ignore[assignment]
    if (module := sys.modules.get("pyarrow.parquet.core")) is not None:
        parquet.write_through(module)
    else:
        sys.meta_path.insert(0, parquet.Later())
