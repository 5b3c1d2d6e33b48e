"""Cache for results that all ranks of a machine share: one rank computes a result, and all ranks map its file.

Opening millions of samples requires sorting and searching arrays with millions of rows. If every rank did this, the
machine would need several times as much time and memory. Therefore the first rank computes the result under a lock, and
publishes it in the `--cache` folder or the user's cache folder. The other ranks, and later runs on the same data, map
the file. The file name contains a hash of everything that affects the result: commits, manifest, split, settings, and
the format version. The file is an Arrow file with a checksum, and is rebuilt if it is damaged.

Small results are computed by every rank, without a file. If the folder is not writable, every rank also computes large
results, and prints a warning on standard error. The folder size is limited to `_MAX_BYTES`; the least recently used
files are removed first.
"""

import ctypes
import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.locks import hold_lock
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import publish_atomically
from clipmill.manifests.storage.cache import evict, files_in

FOLDER = "opened"
MIN_ROWS = 200_000  # minimum size of a shared result; smaller results take less than a second and a few megabytes
SCRATCH_BYTES = 32 << 20  # minimum size of an array that is backed by a file; smaller arrays are cheaper in memory
_MAX_BYTES = 64 << 30  # maximum size of the folder
_FORMAT = 4  # format version; increment it if any `compute` function returns different results for the same data
_STRUCTURE = b"clipmill_structure"
_CHECKSUM_BYTES = 4
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_T = TypeVar("_T")
_chosen_folder: Path | None = None


def choose_folder(folder: Path | None) -> None:
    """Set the cache folder of this process (`--cache`). None changes nothing; the default is the user's cache."""
    global _chosen_folder
    _chosen_folder = folder or _chosen_folder


def open_shared(
    compute: Callable[[], _T],
    *,
    depends_on: Sequence[object],
    num_rows: int,
    types: Sequence[type],
    prefix: str = "set",
) -> _T:
    """Return the result of `compute`. A result with many rows comes from the cache, as read-only mapped arrays.

    Args:
        compute: Function whose result consists of frozen dataclasses, tuples, lists, dicts with string keys, numbers,
            strings, fractions, NumPy arrays, and Arrow string arrays without nulls.
        depends_on: Values whose `repr` identifies everything that affects the result.
        num_rows: Approximate number of rows of the result.
        types: Dataclasses that the result contains.
        prefix: Prefix of the file name.
    """
    if num_rows < MIN_ROWS:
        return compute()
    key = hashlib.sha256(repr([_FORMAT, *depends_on]).encode()).hexdigest()[:32]
    types_by_name = {kind.__name__: kind for kind in types}
    with ExitStack() as locks:
        try:
            path = _folder() / f"{prefix}-{key}"
            locks.enter_context(hold_lock(path.with_name(f".{key}.lock")))
            mapped_result = _open(path, types_by_name)
        except OSError as error:
            _warn(error)
            return compute()
        if mapped_result is not None:
            return mapped_result  # type: ignore[no-any-return]
        result = compute()
        try:
            with publish_atomically(path) as temporary:
                _write(result, temporary)
            _mark_of(path).write_text(_state(path))  # no check is needed: the checksum was computed from these bytes
            # Remove the least recently used files. A process that maps a removed file can still use it.
            files = files_in(path.parent)
            removable = {file: state for file, state in files.items() if file != path and not file.name.startswith(".")}
            evict(removable, excess_bytes=sum(state.st_size for state in files.values()) - _MAX_BYTES, are_locked=False)
            mapped_result = _open(path, types_by_name)
        except OSError as error:
            _warn(error)
        if mapped_result is None:
            return result
        del result
        # Return the memory of the computation to the system, because Arrow and the C library would keep it.
        pa.default_memory_pool().release_unused()
        with suppress(AttributeError, OSError):  # only glibc has this function
            ctypes.CDLL(None).malloc_trim(0)
        return mapped_result  # type: ignore[no-any-return]


def _warn(error: OSError) -> None:
    sys.stderr.write(f"warning: {error}; each rank computes its own copy (see --cache)\n")


def scratch(count: int, dtype: Any) -> NDArray[Any]:
    """Return an uninitialised array. A large array is backed by an unnamed temporary file instead of memory.

    Functions that compute large results collect rows in such arrays, because the kernel can write their pages to disk.
    """
    size_bytes = count * np.dtype(dtype).itemsize
    if size_bytes < SCRATCH_BYTES:
        return np.empty(count, dtype)
    try:
        with tempfile.TemporaryFile(dir=_folder()) as file:
            # Reserve the disk space, because writing to a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype)
    except OSError:
        return np.empty(count, dtype)


def index_type(count: int) -> type[np.int32 | np.int64]:
    """Return the integer type for numbers up to `count`."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


class Rows:
    """Array that grows to at most `limit` values, allocated with `scratch`."""

    def __init__(self, limit: int, dtype: Any) -> None:
        self._array, self._count = scratch(limit, dtype), 0

    def __len__(self) -> int:
        return self._count

    def add(self, values: NDArray[Any]) -> None:
        """Append values."""
        self._array[self._count : self._count + len(values)] = values
        self._count += len(values)

    @property
    def array(self) -> NDArray[Any]:
        """Values that have been added so far."""
        return self._array[: self._count]


def _folder() -> Path:
    cache_folder = _chosen_folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipmill"
    folder = cache_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(value: object, path: Path) -> None:
    """Write an Arrow file with one row, followed by the checksum of its bytes.

    Each array is stored in a list column named after the array's path in the result. All other values are stored as
    JSON in the metadata.
    """
    columns: dict[str, pa.Array] = {}
    structure = json.dumps(_encode(value, "", columns)).encode()
    batch = pa.record_batch(list(columns.values()), list(columns)).replace_schema_metadata({_STRUCTURE: structure})
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    with path.open("r+b") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        checksum = zlib.crc32(content)
        content.close()
        file.seek(0, os.SEEK_END)
        file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))


def _encode(value: Any, name: str, columns: dict[str, pa.Array]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | pa.StringArray):
        entry = {"column": name}
        if isinstance(value, np.ndarray):
            entry |= {"dtype": value.dtype.str, "shape": value.shape}
            # Store booleans as bytes, because Arrow would pack them into bits, which NumPy cannot map.
            plain = np.ascontiguousarray(value).reshape(-1)
            value = pa.array(plain.view(np.uint8) if plain.dtype == bool else plain)
        columns[name] = pa.LargeListArray.from_arrays(np.array([0, len(value)]), value)
        return entry
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"type": type(value).__name__, "fields": _encode_parts(parts.items(), name, columns)}
    if isinstance(value, dict):
        return {"dict": _encode_parts(value.items(), name, columns)}
    if isinstance(value, list | tuple):
        items = _encode_parts(enumerate(value), name, columns)
        return {"tuple" if isinstance(value, tuple) else "list": list(items.values())}
    raise TypeError(f"{type(value).__name__} cannot be shared")


def _encode_parts(parts: Iterable[tuple[Any, Any]], name: str, columns: dict[str, pa.Array]) -> dict[Any, Any]:
    return {key: _encode(part, f"{name}.{key}" if name else str(key), columns) for key, part in parts}


def _open(path: Path, types: dict[str, type]) -> Any:
    """Map the result in a file; return None if the file is missing or, with a warning, if it is damaged."""
    try:
        with map_arrow_file(path) as mapped:
            content = mapped.read_buffer()
        end = max(content.size - _CHECKSUM_BYTES, 0)
        # Verify the checksum only once after each boot of the machine and after each change of the file.
        mark, file_bytes = _mark_of(path), memoryview(content)
        is_verified = mark.exists() and mark.read_text() == _state(path)
        if not is_verified and zlib.crc32(file_bytes[:end]) != int.from_bytes(file_bytes[end:], "little"):
            raise ValueError(f"{path} does not match its checksum")
        with suppress(OSError):
            os.utime(path)  # the least recently used files are removed first
            mark.write_text(_state(path))
        reader = pa.ipc.open_file(pa.BufferReader(content.slice(0, end)))
        batch = reader.get_batch(0)
    except FileNotFoundError:
        return None
    except (pa.ArrowInvalid, ValueError):
        sys.stderr.write(f"warning: {path} is damaged and will be rebuilt\n")
        return None
    return _decode(json.loads(reader.schema.metadata[_STRUCTURE]), batch, types)


def _mark_of(path: Path) -> Path:
    """Return the path of the file that records the state of `path` at the last verification."""
    return path.with_name(f".{path.name}.verified")


def _state(path: Path) -> str:
    """Return boot ID and file status as a string, which changes if the machine reboots or the file changes."""
    state = path.stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else str(time.monotonic_ns())
    return f"{boot} {state.st_ino} {state.st_size} {state.st_mtime_ns}"


def _decode(value: Any, batch: pa.RecordBatch, types: dict[str, type]) -> Any:
    if not isinstance(value, dict):
        return value
    if "column" in value:
        array = batch.column(value["column"]).flatten()
        if "dtype" not in value:
            return array
        return array.to_numpy().view(np.dtype(value["dtype"])).reshape(value["shape"])
    if "fraction" in value:
        return Fraction(*value["fraction"])
    if "type" in value:
        content = {name: _decode(item, batch, types) for name, item in value["fields"].items()}
        return types[value["type"]](**content)
    if "dict" in value:
        return {name: _decode(item, batch, types) for name, item in value["dict"].items()}
    items = [_decode(item, batch, types) for item in value.get("tuple") or value.get("list") or ()]
    return tuple(items) if "tuple" in value else items
