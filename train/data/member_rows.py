"""Where the members of samples lie in the tars, from the merged table of a variant or else from its indexes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.shards.chunk_table import ChunkRows, read_chunk_rows
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.opening import Damaged, DamagedIndex
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.data.mapped_tars import unusable_error


def member_rows(variant: Variant) -> ChunkRows:
    """The rows of a variant's merged table, verified, or else of its verified indexes.

    Raises:
        UserError: the table or an index is damaged, or an index is not the committed one.
    """
    column = variant.directory.parent.name
    try:
        return read_chunk_rows(variant)
    except DamagedIndex as error:
        raise unusable_error(error.path, column, error.why) from error
    except Damaged as error:
        raise UserError(str(error), hint=f"run prep {column}, which makes the table again") from error
    except OSError as error:
        raise unusable_error(Path(error.filename or variant.directory), column, str(error)) from error


def places_of(
    variant: Variant,
    table: pa.Table,
    *,
    starts: NDArray[np.int64],
    shard_of: NDArray[np.int64],
    array_bytes: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Places of npy arrays (clipmill.train.data.mapped_tars), one for each row of a merged table, and sizes of headers.

    Args:
        starts: place of each shard's tar.
        shard_of: index in `starts` of each row.
        array_bytes: size of each array; None for members that are not arrays: their own places, and no headers.

    Raises:
        UserError: one would reach beyond its tar, or does not begin on a block: an index is not of its tar.
    """
    tars = variant.tar_files
    offset, size = (table[name].to_numpy().astype(np.int64) for name in ("offset", "size"))
    inside = (offset >= 0) & (size > 0) & (offset + size <= tars.sizes[shard_of])
    header = np.zeros(len(size), np.int64)
    if array_bytes is not None:
        header = size - array_bytes
        inside &= (header > 0) & (header <= size) & ((offset + header) % BLOCK_BYTES == 0)
    bad = np.flatnonzero(~inside)
    if len(bad):
        at = int(bad[np.lexsort((table["row"].to_numpy()[bad], shard_of[bad]))[0]])
        shard = variant.shard(int(tars.shard_ids[shard_of[at]]))
        key = shard.index["key"][int(table["row"][at].as_py())].as_py()
        raise unusable_error(
            shard.index_path, shard.commit.column, f"its position of the array of {key!r} is impossible"
        )
    return starts[shard_of] + offset + header, header.astype(np.int32)


def damaged_index(shard: CommittedShard, why: str) -> UserError:
    """The error for an index that does not match its tar."""
    return unusable_error(shard.index_path, shard.commit.column, why)
