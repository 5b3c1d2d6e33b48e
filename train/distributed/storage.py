"""Whole or sharded tensors on disk through torch.distributed.checkpoint, for any number of ranks.

torch's own metadata file is a pickle and is never read. A JSON table replaces it, and tensors are loaded with
torch.load(weights_only=True), so that reading a checkpoint cannot execute code.
"""

import io
import os
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from clipmill.train.distributed.world import World

_NUM_THREADS = 2  # per rank; enough to keep a disk busy

# torch warns if there is no process group, which one process does not need.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Table = dict[str, Any]


class Storage:
    """Writes the tensors of checkpoints. All ranks call its methods in the same order."""

    def __init__(self, world: World) -> None:
        # A separate group, because checkpoints are written during training with its own collectives.
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        # Without pinned or shared memory, so that no resource outlives the copies. (DefaultStager can be used only once
        # in torch 2.11.)
        self._stager = StateDictStager(pin_memory=False, share_memory=False)

    def staged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to the CPU, reusing the memory of the previous call."""
        return cast(dict[str, torch.Tensor], self._stager.stage(dict(tensors)))

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Table:
        """Write this rank's parts of `tensors` into `folder`; replicated tensors are written once.

        Returns the table of all pieces and their files, the same on all ranks. Raises OSError if this rank could not
        write its parts, FailedElsewhere if another could not.
        """
        files = _Files()
        writer = _Writer(str(folder), thread_count=_NUM_THREADS, sync_files=False)
        writer.fs = files
        metadata = dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self._group,
            no_dist=self._group is None,
        )
        failed = self.gather(files.error is not None)
        if files.error is not None:
            raise files.error
        if any(failed):
            raise FailedElsewhere(f"rank {failed.index(True)} could not write its parts")
        return _table(metadata)

    def gather(self, value: Any) -> list[Any]:
        """All-gather plain values in the writing thread."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


def read_into(folder: Path, table: Table, tensors: Mapping[str, torch.Tensor], *, world: World) -> None:
    """Load stored tensors into whole or sharded ones of the same names and sizes (or ValueError); all ranks call it."""
    try:
        dcp.load(
            dict(tensors),
            storage_reader=_Reader(folder, table),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=world.size == 1,
        )
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise ValueError(f"rank {rank}: {reason}") from error


def dtype_of(name: str) -> torch.dtype:
    """The dtype by its name in the table; ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


class FailedElsewhere(Exception):
    """Another rank could not write its parts and reports the reason."""


class _Files(FileSystem):
    """Files that are flushed to disk and record the first write error in `error` instead of raising it.

    torch writes from its own threads: an error raised there is printed and lost, or turned into a message about the
    internals of an archive. Writes after an error are discarded.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with closing(_Stream(Path(path), self)) as stream:
            yield stream


class _Stream(io.RawIOBase):
    def __init__(self, path: Path, files: _Files) -> None:
        self._path, self._files, self._position = path, files, 0
        self._file: BinaryIO | None = None
        with self._errors_kept():
            self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        # Tens of small writes per tensor: without a context manager.
        if self._file is not None and self._files.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._keep(error)
        num_bytes = len(data) if type(data) is bytes else memoryview(data).nbytes
        self._position += num_bytes
        return num_bytes

    def close(self) -> None:
        if not self.closed and self._file is not None:
            with self._errors_kept(), self._file as file:
                file.flush()
                os.fsync(file.fileno())
        super().close()

    @contextmanager
    def _errors_kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._keep(error)

    def _keep(self, error: OSError) -> None:
        if self._files.error is None:
            self._files.error = OSError(error.errno, error.strerror, str(self._path))


class _Writer(dcp.FileSystemWriter):
    """Makes `dcp.save` return the location of each tensor, which torch 2.11 only stores in its file."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}


class _Reader(dcp.FileSystemReader):
    """Reads by a table of plain values instead of the pickled one."""

    def __init__(self, folder: Path, table: Table) -> None:
        super().__init__(str(folder))
        self._metadata = _metadata(table)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def _table(metadata: Metadata) -> Table:
    table: Table = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor: only tensors are stored here, and all other values in JSON")
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        pieces = []
        for chunk in entry.chunks:
            place: _StorageInfo = metadata.storage_data[MetadataIndex(name, torch.Size(chunk.offsets))]
            where = {"file": place.relative_path, "begin": place.offset, "length": place.length}
            pieces.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
        table[name] = {"dtype": dtype, "size": list(entry.size), "pieces": pieces}
    return table


def _metadata(table: Table) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for name, entry in table.items():
        chunks = []
        for piece in entry["pieces"]:
            if Path(piece["file"]).name != piece["file"]:
                raise ValueError(f"{piece['file']!r} is not a file name")
            offsets = torch.Size(piece["offsets"])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece["sizes"])))
            places[MetadataIndex(name, offsets)] = _StorageInfo(piece["file"], piece["begin"], piece["length"])
        properties = TensorProperties(dtype=dtype_of(entry["dtype"]))
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    return Metadata(entries, storage_data=places)
