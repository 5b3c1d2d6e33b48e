"""Local files that stand for objects: which version each one holds, and placeholders for those that are not fetched.

The nanoseconds of a file's modification time are a hash of the object's etag; its last bit is set for a placeholder, a
sparse file with the object's size and no content. A file that was being written when its command was killed has other
nanoseconds, and is fetched again.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from clipmill.manifests.publish import temporary_path
from clipmill.manifests.storage.objects import ObjectInfo

_LAZY_SUFFIXES = (".tar", ".tar.idx", ".index.arrow", "/chunks.arrow")  # fetched when they are opened
_EAGER_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".arrow")
_JOURNAL = re.compile(r"(.+)/answers/[^/]+")
_SECOND_NS = 1_000_000_000
_MAX_NAME_BYTES = 255 - len(temporary_path(Path()).name)  # file systems allow 255; a file is written under another name


def is_eager(key: str) -> bool:
    """Return True for a small file, which is always fetched."""
    if key.endswith(_LAZY_SUFFIXES):
        return False
    return key.endswith(_EAGER_SUFFIXES) or key.rpartition("/")[2].startswith(".")


def is_lock(key: str) -> bool:
    """Return True for a lease, which is not mirrored."""
    return key.endswith(".lock")


def journal_owner(key: str) -> str | None:
    """Return the folder that a journal belongs to; None for other files.

    A journal grows line by line, which an object cannot: it is only on the machine that writes it, and is no object.
    """
    found = _JOURNAL.fullmatch(key)
    return found[1] if found else None


def is_format_name(key: str) -> bool:
    """Return True if the name of a file may be one of the format."""
    return is_eager(key) or key.endswith(_LAZY_SUFFIXES)


def sort_objects(listed: Iterable[ObjectInfo]) -> tuple[dict[str, ObjectInfo], set[str]]:
    """Return the objects that have local files, by key, and the keys of those that can have none.

    Left out are the markers of folders that consoles and FUSE tools make: objects without content that have the name of
    a folder, or one without a suffix of the format.
    """
    found = {info.key: info for info in listed}
    folders = {parent for key in found for parent in parents_of(key)}
    # Of a file and a folder with the same name, that which is of the format.
    files = {key for key in folders & found.keys() if found[key].size_bytes and is_format_name(key)}
    kept, foreign = {}, set()
    for key, info in found.items():
        if not info.size_bytes and (key in folders or not is_format_name(key)):
            continue
        is_hidden = (key in folders and key not in files) or (files and not files.isdisjoint(parents_of(key)))
        if is_hidden or (len(encoded := key.encode()) > _MAX_NAME_BYTES and _has_long_name(encoded)):
            foreign.add(key)
        else:
            kept[key] = info
    return kept, foreign


def _has_long_name(key: bytes) -> bool:
    return max(map(len, key.split(b"/"))) > _MAX_NAME_BYTES


def parents_of(key: str) -> Iterator[str]:
    """Yield the folders that an object is in."""
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key


def is_below(key: str, prefix: str, *, recursive: bool) -> bool:
    """Return True if an object is in the folder `prefix`, or with `recursive` in a folder below it."""
    if prefix and not key.startswith(f"{prefix}/"):
        return False
    return recursive or "/" not in key[len(prefix) + bool(prefix) :]


def local_files(folder: Path, prefix: str, *, recursive: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield key and state of each local file below a prefix."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / prefix) as entries:
        for entry in entries:
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=False):
                if recursive:
                    yield from local_files(folder, key, recursive=True)
            else:
                yield key, entry.stat(follow_symlinks=False)


def holds(path: Path, state: os.stat_result, info: ObjectInfo) -> bool:
    """Return True if a local file is of this version of its object: its content, or a placeholder if that will do."""
    is_content = not state.st_mtime_ns % 2
    stamp = _stamp(info.key, info.etag, is_content=is_content)
    if state.st_size != info.size_bytes or state.st_mtime_ns % _SECOND_NS != stamp:
        return False
    if not is_content and is_eager(info.key):
        return False
    if state.st_mtime_ns // _SECOND_NS != int(info.modified_s):  # until now the time of this machine's clock
        set_stamp(path, info, is_content=is_content)
    return True


def set_stamp(path: Path, info: ObjectInfo, *, is_content: bool) -> None:
    """Record in the modification time of a local file which version of its object it holds."""
    time_ns = int(info.modified_s) * _SECOND_NS + _stamp(info.key, info.etag, is_content=is_content)
    os.utime(path, ns=(time_ns, time_ns))


def _stamp(key: str, etag: str, *, is_content: bool) -> int:
    """Return the nanoseconds of the modification time of a local file, which name the version of its object.

    The last bit says whether the file is a placeholder. Records come after the shards of the same second, as if the
    time were as fine as it looks: a commit is never older than its files.
    """
    digest = int.from_bytes(hashlib.blake2b(etag.encode(), digest_size=8).digest(), "big") % ((_SECOND_NS // 2) // 2)
    return digest * 2 + (not is_content) + ((_SECOND_NS // 2) if is_eager(key) else 0)


def make_placeholder(path: Path, info: ObjectInfo) -> None:
    """Put a sparse file of the size of an object in place of its content."""
    temporary = temporary_path(path)
    with temporary.open("wb") as file:
        file.truncate(info.size_bytes)
    set_stamp(temporary, info, is_content=False)
    temporary.replace(path)


def run_of(folder: Path) -> str:
    """Return the random number of the run that a local folder belongs to; empty if it belongs to none."""
    try:
        return (folder.parent / f"{folder.name}.lock").read_text()
    except OSError:
        return ""
