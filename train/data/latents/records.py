"""Where the latents of every chunk lie, as arrays: 40 bytes a chunk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.keys import chunk_key
from shards.damage import DamagedIndex
from shards.format import BLOCK_BYTES
from shards.index import open_index
from shards.reader import CommittedShard
from train.data.chunks import rows_of

MEMBER = "latents.npy"
ITEM_BYTES = 2  # of float16 and of bfloat16
_SHAPE_COLUMNS = ("channels", "height", "width", "dtype", "fps_num", "fps_den")


@dataclass(frozen=True)
class FrameShape:
    """What all latents of a set have in common."""

    channels: int
    height: int
    width: int
    dtype: str  # float16 or bfloat16
    fps: Fraction

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.height * self.width * ITEM_BYTES

    def __str__(self) -> str:
        return f"{self.channels} x {self.height} x {self.width} {self.dtype} at {self.fps} frames a second"


@dataclass(frozen=True)
class LatentRecords:
    """Chunks that have latents, ordered by (row of the video, start); one entry of each array a chunk.

    Attributes:
        array_address: where the array begins in the mapped tars.
        header_bytes: of the npy header before it.
        crc32: of header and array.
        num_unknown: further chunks, of videos that the manifest does not name.
    """

    shape: FrameShape
    video_row: NDArray[np.int32]
    start_ms: NDArray[np.int64]
    num_frames: NDArray[np.int32]
    array_address: NDArray[np.int64]
    header_bytes: NDArray[np.int32]
    crc32: NDArray[np.uint32]
    num_unknown: int

    def __len__(self) -> int:
        return len(self.video_row)

    def payload(self, chunk: int) -> tuple[int, int]:
        """Address and size of the member of a chunk, header and array."""
        header_bytes = int(self.header_bytes[chunk])
        size = header_bytes + int(self.num_frames[chunk]) * self.shape.frame_bytes
        return int(self.array_address[chunk]) - header_bytes, size


def read_records(
    shards: Sequence[CommittedShard], *, starts: NDArray[np.int64], video_ids: pa.Array, known_ids: pa.Array
) -> LatentRecords | None:
    """Gathers the chunks of the videos `video_ids` from the indexes; None where there are none.

    Args:
        starts: address of each shard's tar.
        video_ids: a video's row is its place here.
        known_ids: all videos of the manifest.

    Raises:
        UserError: chunks have latents of different shapes, or an index does not fit its tar.
    """
    parts: list[dict[str, NDArray[Any]]] = []
    shape: FrameShape | None = None
    seen_in = ""
    num_unknown = 0
    for shard, start in zip(shards, starts.tolist(), strict=True):
        index = index_of(shard, extension=MEMBER)
        video_row = rows_of(index["video_id"], video_ids)
        there = np.flatnonzero(video_row >= 0)
        num_unknown += int((rows_of(index["video_id"], known_ids) < 0).sum())
        if not len(there):
            continue
        for found in _shapes(index.select(_SHAPE_COLUMNS).take(pa.array(there))):
            if shape is not None and found != shape:
                raise UserError(
                    f"latents differ in shape: {shape} in {seen_in}, {found} in {shard.tar_path}",
                    hint="all latents of a variant must be alike: prep latents makes a new variant with one setting",
                )
            shape, seen_in = found, str(shard.tar_path)
        assert shape is not None  # `there` is not empty
        part = _read(shard, index, start=start, shape=shape)
        part["video_row"] = video_row.astype(np.int32)
        parts.append({name: array[there] for name, array in part.items()})
    if shape is None:
        return None
    joined = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    order = np.lexsort((joined["start_ms"], joined["video_row"]))
    return LatentRecords(
        shape=shape, num_unknown=num_unknown, **{name: joined.pop(name)[order] for name in list(joined)}
    )


def key_of(records: LatentRecords, chunk: int, *, video_ids: pa.Array) -> str:
    """Key of a chunk."""
    return chunk_key(video_ids[int(records.video_row[chunk])].as_py(), int(records.start_ms[chunk]))


def index_of(shard: CommittedShard, *, extension: str) -> pa.Table:
    """The shard's index, compared with its commit: what its checksums say of the tar is what was committed.

    It is opened anew each time, so that thousands of shards do not stay mapped.

    Raises:
        UserError: it is damaged or not the committed one, or its samples have no member `extension`.
    """
    try:
        shard.require_committed_index()
        index = open_index(shard.index_path)
    except (DamagedIndex, OSError) as error:
        raise _damaged(shard, str(error)) from error
    if f"{extension}_offset" not in index.column_names:
        raise _damaged(shard, f"its samples have no member {extension}")
    return index


def array_addresses(
    shard: CommittedShard, index: pa.Table, *, extension: str, array_bytes: NDArray[np.int64], start: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Addresses of the arrays of `extension`, one a row of the index, and the sizes of the headers before them.

    Raises:
        UserError: an array would reach beyond the tar, or does not begin on a block: the index is not of this tar.
    """
    assert shard.commit.files is not None
    offset = index[f"{extension}_offset"].to_numpy().astype(np.int64)
    size = index[f"{extension}_size"].to_numpy().astype(np.int64)
    header = size - array_bytes
    inside = (offset >= 0) & (header > 0) & (header <= size) & (offset + size <= shard.commit.files.tar_bytes)
    bad = np.flatnonzero(~inside | ((offset + header) % BLOCK_BYTES != 0))
    if len(bad):
        key = index["key"][int(bad[0])].as_py()
        raise _damaged(shard, f"the array of {key!r} cannot lie where it says")
    return start + offset + header, header.astype(np.int32)


def _read(shard: CommittedShard, index: pa.Table, *, start: int, shape: FrameShape) -> dict[str, NDArray[Any]]:
    num_frames = index["num_frames"].to_numpy()
    address, header_bytes = array_addresses(
        shard,
        index,
        extension=MEMBER,
        array_bytes=num_frames.astype(np.int64) * shape.frame_bytes,
        start=start,
    )
    return {
        "start_ms": index["start_ms"].to_numpy(),
        "num_frames": num_frames,
        "array_address": address,
        "header_bytes": header_bytes,
        "crc32": index[f"{MEMBER}_crc32"].to_numpy(),
    }


def _shapes(index: pa.Table) -> Iterator[FrameShape]:
    for row in index.group_by(list(_SHAPE_COLUMNS)).aggregate([]).to_pylist():
        fps = Fraction(row.pop("fps_num"), row.pop("fps_den"))
        yield FrameShape(**row, fps=fps)


def _damaged(shard: CommittedShard, why: str) -> UserError:
    return UserError(
        f"{shard.index_path} cannot be used: {why}",
        hint=f"prep verify names everything that is damaged, and prep {shard.commit.column} makes it again",
    )
