"""Arrays that all ranks of a machine share: computed by one of them, written to a file, and mapped by all.

Opening a set of millions of samples sorts and searches arrays of as many rows. Done by every rank, it takes as much
time and memory again for each of them. Here the first rank computes under a lock, and publishes the result in the
folder of `--cache`, or in the user's cache folder; the others, and later runs on the same data, map it. Results are
named by a hash of everything that they depend on: commits, manifest, split, settings, and the format.

Small sets are computed by every rank, without a file. So are large ones if the folder cannot be written, which is said
on standard error. The folder holds at most `_MAX_BYTES`; results that were not used for the longest time are removed.
"""

import ctypes
import hashlib
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.locks import locked
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import published
from clipmill.manifests.storage.cache import evict, files_in

FOLDER = "opened"
MIN_ROWS = 200_000  # sets below it take less than a second, and a few megabytes
SCRATCH_BYTES = 32 << 20  # smaller arrays cost less in memory, whose pages the kernel need not keep for a file
_MAX_BYTES = 64 << 30
_FORMAT = 2  # increased whenever what `compute` returns for the same data changes
_STRUCTURE = b"clipmill_structure"
_T = TypeVar("_T")
_chosen: Path | None = None


def choose_folder(folder: Path | None) -> None:
    """Set the cache folder of this process (`--cache`); None keeps the one that was set, or the user's."""
    global _chosen
    _chosen = folder or _chosen


def shared(
    compute: Callable[[], _T], *, of: Sequence[object], num_rows: int, types: Sequence[type], column: str = "set"
) -> _T:
    """The result of `compute`, of arrays that are mapped read-only if there are many rows.

    Args:
        compute: returns frozen dataclasses, tuples, lists, dicts with names, numbers, strings and fractions, NumPy
            arrays, and Arrow arrays of strings without nulls.
        of: everything that the result depends on, in a form whose `repr` identifies it.
        num_rows: approximate number of rows of the result.
        types: the dataclasses in it.
        column: a word for the name of the file.
    """
    if num_rows < MIN_ROWS:
        return compute()
    key = hashlib.sha256(repr([_FORMAT, *of]).encode()).hexdigest()[:32]
    by_name = {kind.__name__: kind for kind in types}
    with ExitStack() as held:
        try:
            path = _folder() / f"{column}-{key}"
            held.enter_context(locked(path.with_name(f".{key}.lock")))
            found = _opened(path, by_name)
        except OSError as error:
            _warn(error)
            return compute()
        if found is not None:
            return found  # type: ignore[no-any-return]
        computed = compute()
        try:
            with published(path) as temporary:
                _write(computed, temporary)
            _make_room(path.parent, keep=path)
            found = _opened(path, by_name)
        except OSError as error:
            _warn(error)
        if found is None:
            return computed
        del computed
        _give_back_memory()
        return found  # type: ignore[no-any-return]


def _warn(error: OSError) -> None:
    sys.stderr.write(f"warning: {error}; every rank computes for itself what it would share (see --cache)\n")


def _give_back_memory() -> None:
    """Return to the system what computing took: Arrow and the C library would keep it for later."""
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError, OSError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)


def scratch(count: int, kind: Any) -> NDArray[Any]:
    """An array without values. A large one is a mapped file without a name, which takes no memory of the process.

    What computes shared arrays collects its rows in these, so that the kernel can write them to the disk.
    """
    size_bytes = count * np.dtype(kind).itemsize
    if size_bytes < SCRATCH_BYTES:
        return np.empty(count, kind)
    try:
        with tempfile.TemporaryFile(dir=_folder()) as file:
            # Reserved, because writing to a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), kind)
    except OSError:
        return np.empty(count, kind)


def index_type(count: int) -> type[np.int32 | np.int64]:
    """The type for numbers up to `count`."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


class Rows:
    """Collects the values of an array in `scratch`, at most `limit` of them."""

    def __init__(self, limit: int, kind: Any) -> None:
        self._array, self._count = scratch(limit, kind), 0

    def __len__(self) -> int:
        return self._count

    def add(self, values: NDArray[Any]) -> None:
        """Add the next values."""
        self._array[self._count : self._count + len(values)] = values
        self._count += len(values)

    @property
    def array(self) -> NDArray[Any]:
        """The values so far."""
        return self._array[: self._count]


def _folder() -> Path:
    chosen = _chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipmill"
    folder = chosen / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _make_room(folder: Path, *, keep: Path) -> None:
    """Remove the results that were not used for the longest time; a process that maps one keeps it until it ends."""
    files = files_in(folder)
    results = {path: state for path, state in files.items() if path != keep and not path.name.startswith(".")}
    evict(results, excess_bytes=sum(state.st_size for state in files.values()) - _MAX_BYTES, are_locked=False)


def _write(value: object, path: Path) -> None:
    """Write an Arrow file of one row: the buffers as columns, and the structure as JSON in the metadata."""
    buffers: list[pa.Buffer] = []
    metadata = {_STRUCTURE: json.dumps(_encoded(value, buffers)).encode()}
    kind = pa.large_binary()
    ends = [pa.py_buffer(np.array([0, buffer.size])) for buffer in buffers]
    columns = [pa.Array.from_buffers(kind, 1, [None, end, one]) for end, one in zip(ends, buffers, strict=True)]
    schema = pa.schema([pa.field(str(number), kind) for number in range(len(buffers))], metadata=metadata)
    with pa.ipc.new_file(path, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def _encoded(value: Any, buffers: list[pa.Buffer]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        buffers.append(pa.py_buffer(np.ascontiguousarray(value).reshape(-1).view(np.uint8)))
        return {"array": value.dtype.str, "shape": value.shape, "at": len(buffers) - 1}
    if isinstance(value, pa.StringArray):
        _, starts, content = value.buffers()
        count = len(value)
        offsets = (
            np.frombuffer(starts, np.int32)[value.offset : value.offset + count + 1] if count else np.zeros(1, np.int32)
        )
        text = np.frombuffer(content or b"", np.uint8)[offsets[0] : offsets[-1]]
        return {"texts": [_encoded(array, buffers) for array in (offsets - offsets[0], text)]}
    if isinstance(value, Fraction):
        return {"fraction": [value.numerator, value.denominator]}
    if is_dataclass(value):
        content = {field.name: _encoded(getattr(value, field.name), buffers) for field in fields(value)}
        return {"type": type(value).__name__, "fields": content}
    if isinstance(value, dict):
        return {"dict": {name: _encoded(item, buffers) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_encoded(item, buffers) for item in value]}
    raise TypeError(f"{type(value).__name__} cannot be shared")


def _opened(path: Path, types: dict[str, type]) -> Any:
    """The result in a file, mapped; None if there is no such file, or it is not whole."""
    try:
        with map_arrow_file(path) as mapped:
            reader = pa.ipc.open_file(mapped)
            buffers = [column.buffers()[2] for column in reader.get_batch(0).columns]
    except (FileNotFoundError, pa.ArrowInvalid):
        return None
    with suppress(OSError):
        os.utime(path)
    return _decoded(json.loads(reader.schema.metadata[_STRUCTURE]), buffers, types)


def _decoded(value: Any, buffers: list[pa.Buffer], types: dict[str, type]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.frombuffer(buffers[value["at"]] or b"", np.dtype(value["array"])).reshape(value["shape"])
    if "texts" in value:
        offsets, text = (pa.py_buffer(_decoded(item, buffers, types)) for item in value["texts"])
        return pa.StringArray.from_buffers(offsets.size // 4 - 1, offsets, text)
    if "fraction" in value:
        return Fraction(*value["fraction"])
    if "type" in value:
        content = {name: _decoded(item, buffers, types) for name, item in value["fields"].items()}
        return types[value["type"]](**content)
    if "dict" in value:
        return {name: _decoded(item, buffers, types) for name, item in value["dict"].items()}
    items = [_decoded(item, buffers, types) for item in value.get("tuple") or value.get("list") or ()]
    return tuple(items) if "tuple" in value else items
