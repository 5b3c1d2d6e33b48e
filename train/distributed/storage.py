"""Write and read complete or sharded tensors with torch.distributed.checkpoint, on any number of ranks.

torch plans which rank writes and reads which part. The parts are stored as plain bytes, and a JSON table lists their
locations, so that reading a checkpoint cannot execute code.
"""

import io
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from clipmill.train.distributed.world import World

# torch warns if there is no process group, but a single process does not need one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# Tensor name -> dtype, size and `pieces`: parts of the tensor (offsets, sizes) and their locations (file, begin).
Table = dict[str, Any]


class Storage:
    """Writer for the tensors of checkpoints. All ranks must call its methods in the same order."""

    def __init__(self, world: World) -> None:
        # Use a separate group, because a thread writes checkpoints while training runs its own collectives.
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if world.size > 1 else None
        # Use neither pinned nor shared memory, which would outlive the copies. DefaultStager could be used only once.
        self._stager = StateDictStager(pin_memory=False, share_memory=False)

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to the CPU. The memory of the previous copies is reused."""
        return cast(dict[str, torch.Tensor], self._stager.stage(dict(tensors)))

    def write(self, file: Path, tensors: Mapping[str, torch.Tensor]) -> Table:
        """Write this rank's parts of `tensors` into a file. Only one rank writes a replicated tensor.

        Returns:
            Table of the tensors and their locations, the same on all ranks.

        Raises:
            OSError: This rank could not write its parts.
            FailedElsewhere: Another rank could not write its parts.
        """
        writer = _Writer(file)
        metadata = dcp.save(
            dict(sorted(tensors.items())),  # in a resumed run, the optimizer's state has a different order
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self._group,
            no_dist=self._group is None,
        )
        self.agree(writer.error)
        return _table(metadata)

    def agree(self, error: Exception | None) -> None:
        """Raise the error of this rank, or FailedElsewhere if another rank has failed. All ranks must call this method.

        Args:
            error: Error of this rank, if any.
        """
        failures = self.gather(error is not None)
        if error is not None:
            raise error
        if any(failures):
            raise FailedElsewhere(f"rank {failures.index(True)} could not write its parts")

    def gather(self, value: Any) -> list[Any]:
        """Gather plain values from all ranks. The checkpoint thread may call this method during training."""
        if self._group is None:
            return [value]
        all_values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(all_values, value, group=self._group)
        return all_values


def read_into(
    folder: Path,
    table: Table,
    tensors: Mapping[str, torch.Tensor],
    *,
    world: World,
    open_part: Callable[[Path], BinaryIO],
) -> None:
    """Load stored tensors into the memory of `tensors`. All ranks must call this function.

    Args:
        tensors: Tensors with the stored names and sizes.
        open_part: Function that opens a file in the folder.

    Raises:
        ValueError: A rank could not read a tensor, or a stored size differs.
    """
    try:
        dcp.load(
            dict(tensors),
            storage_reader=_Reader(folder, table, open_part),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=world.size == 1,
        )
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise ValueError(f"rank {rank}: {reason}") from error


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with a name from the table.

    Raises:
        ValueError: torch has no dtype with this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


class FailedElsewhere(Exception):
    """Error on the ranks that wrote their parts while another rank failed. The message names the failed rank."""


class _Writer(dcp.FileSystemWriter):
    """Writer that stores the tensors of a rank in one file, and reports their locations.

    torch's own writer stores each tensor as an archive, which takes longer than a step of a small model.

    Attributes:
        error: Error of this rank. It is not raised immediately, because the other ranks wait for this rank.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file.parent))
        self._file = file
        self.error: OSError | None = None

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        results = []
        try:
            with self._file.open("wb") as file:
                for item in plan.items:
                    tensor = cast(torch.Tensor, planner.resolve_data(item))
                    offset, content = file.tell(), _bytes_of(tensor.detach().cpu().contiguous())
                    file.write(content)
                    location = _StorageInfo(self._file.name, offset, len(content))
                    results.append(WriteResult(item.index, size_in_bytes=len(content), storage_data=location))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # an error from `write` does not contain the path
            self.error = OSError(error.errno, error.strerror, str(self._file))
        future.set_result([] if self.error else results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {
            result.index: result.storage_data for rank_results in results for result in rank_results
        }


@dataclass(frozen=True)
class _Piece:
    """Location of a part of a tensor: file and offset in bytes, with the dtype and shape of the part."""

    file: str
    offset: int
    dtype: torch.dtype
    sizes: torch.Size


class _Reader(dcp.FileSystemReader):
    """Reader for the files of `_Writer`. The table contains the locations of the tensors."""

    def __init__(self, folder: Path, table: Table, open_part: Callable[[Path], BinaryIO]) -> None:
        super().__init__(str(folder))
        self._folder, self._metadata, self._open_part = folder, _metadata(table), open_part

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        pieces: dict[MetadataIndex, _Piece] = self.storage_data
        # Read one file at a time, because a file that is fetched from a bucket takes disk space while it is open.
        items = sorted(plan.items, key=lambda item: pieces[item.storage_index].file)
        for name, file_items in groupby(items, key=lambda item: pieces[item.storage_index].file):
            with self._open_part(self._folder / name) as file:
                for item in file_items:
                    piece, target = pieces[item.storage_index], planner.resolve_tensor(item).detach()
                    content = narrow_tensor_by_index(_read(piece, file), item.storage_offsets, item.lengths)
                    if content.size() != target.size():
                        sizes = f"{[*content.size()]}, not {[*target.size()]}"
                        raise ValueError(f"{item.storage_index.fqn} has size {sizes}")
                    target.copy_(content)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, in the byte order of this machine."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _read(piece: _Piece, file: BinaryIO) -> torch.Tensor:
    tensor = torch.empty(piece.sizes, dtype=piece.dtype)
    content = _bytes_of(tensor)
    file.seek(piece.offset)
    if (num_bytes := cast(io.BufferedReader, file).readinto(content)) != len(content):
        raise ValueError(f"{piece.file} ends after {num_bytes} of the {len(content)} bytes of a tensor")
    return tensor


def _table(metadata: Metadata) -> Table:
    table: Table = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor: other values are stored as JSON")
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        pieces = []
        for chunk in entry.chunks:
            location: _StorageInfo = metadata.storage_data[MetadataIndex(name, torch.Size(chunk.offsets))]
            bounds = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            pieces.append({**bounds, "file": location.relative_path, "begin": location.offset})
        table[name] = {"dtype": dtype, "size": list(entry.size), "pieces": pieces}
    return table


def _metadata(table: Table) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    pieces = {}
    for name, entry in table.items():
        chunks, dtype = [], dtype_of(entry["dtype"])
        for piece in entry["pieces"]:
            if Path(piece["file"]).name != piece["file"]:
                raise ValueError(f"{piece['file']!r} is not a file name")
            offsets, sizes = torch.Size(piece["offsets"]), torch.Size(piece["sizes"])
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            pieces[MetadataIndex(name, offsets)] = _Piece(piece["file"], piece["begin"], dtype, sizes)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["size"]), chunks)
    return Metadata(entries, storage_data=pieces)
