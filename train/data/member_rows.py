"""Where the members of samples lie in the mapped tars, from the merged table of a variant or else from its indexes."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.errors import UserError
from shards.chunk_table import collect_rows, open_chunk_table
from shards.damage import Damaged, DamagedIndex
from shards.format import BLOCK_BYTES
from shards.index import open_index
from shards.reader import CommittedShard, Variant
from train.data.mapped_tars import unusable


def verified_index(shard: CommittedShard, *, members: Sequence[str]) -> tuple[pa.Table, str]:
    """The shard's index, verified against its commit, so that its checksums of the tar can be trusted; and a member.

    It is opened each time, so that the indexes of thousands of shards do not stay mapped.

    Args:
        members: extensions, of which its samples must have one, which is returned too.

    Raises:
        UserError: the index is damaged or not the committed one, or its samples lack the member.
    """
    try:
        shard.require_committed_index()
        index = open_index(shard.index_path)
    except (DamagedIndex, OSError) as error:
        raise unusable(shard.index_path, shard.commit.column, str(error)) from error
    for member in members:
        if f"{member}_offset" in index.column_names:
            return index, member
    raise unusable(shard.index_path, shard.commit.column, f"its samples have no member {members[0]}")


def member_rows(variant: Variant, *, members: Sequence[str], order: pa.Array) -> tuple[pa.Table, str]:
    """The rows of a variant's merged table, verified, or else of its verified indexes; and which member they are of.

    Args:
        members: extensions, of which its samples must have one.
        order: ids of videos, in the order of the rows that are read from indexes.

    Raises:
        UserError: an index is damaged or not the committed one, or its samples lack the member.
    """
    column = variant.directory.parent.name
    try:
        merged = open_chunk_table(variant)
        if merged is not None:
            return merged.verified(), merged.member
    except Damaged as error:
        raise UserError(str(error), hint=f"run prep {column}, which makes the table again") from error
    try:
        collected = collect_rows(
            variant, column=column, check=lambda shard: verified_index(shard, members=members), order=order
        )
    except DamagedIndex as error:
        raise unusable(error.path, column, error.why) from error
    return collected.table, collected.member


def addresses_of(
    variant: Variant,
    table: pa.Table,
    *,
    starts: NDArray[np.int64],
    shard_of: NDArray[np.int64],
    array_bytes: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Addresses of npy arrays, one per row of a merged table, and the sizes of the headers before them.

    Args:
        starts: address of each shard's tar.
        shard_of: index in `starts` of each row.
        array_bytes: size of each array; None for members that are no arrays: their own addresses, and no headers.

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
        raise unusable(shard.index_path, shard.commit.column, f"its position of the array of {key!r} is impossible")
    return starts[shard_of] + offset + header, header.astype(np.int32)


def damaged_index(shard: CommittedShard, why: str) -> UserError:
    """The error for an index that does not match its tar."""
    return unusable(shard.index_path, shard.commit.column, why)
