"""Where the embedding of every caption lies: the `text` column's indexes, joined with the mapped tars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from shards.reader import CommittedShard
from train.data.chunks import rows_of
from train.data.latents.records import array_addresses, index_of

MEMBER = "text.npy"
ITEM_BYTES = 2  # of float16


@dataclass(frozen=True)
class TextMembers:
    """The members that hold embeddings, ordered by address; one entry of each array a video.

    Attributes:
        width: D.
        address, size_bytes, crc32: of the payload, header and array.
        video_row: of its video, -1 for one that is not among those asked for.
    """

    width: int
    address: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    video_row: NDArray[np.int32]

    @property
    def row_bytes(self) -> int:
        return self.width * ITEM_BYTES


@dataclass(frozen=True)
class TextRows:
    """Embeddings of captions, ordered by caption id.

    Attributes:
        caption_id: ascending.
        video_row: of the caption's video, as in `TextMembers`.
        address: of the caption's row in the mapped tars.
    """

    caption_id: NDArray[np.int64]
    video_row: NDArray[np.int32]
    address: NDArray[np.int64]


def read_text_rows(
    shards: Sequence[CommittedShard], *, starts: NDArray[np.int64], video_ids: pa.Array
) -> tuple[TextMembers, TextRows]:
    """Gathers the rows of all captions from the indexes.

    Args:
        starts: address of each shard's tar.
        video_ids: a video's row is its place here.

    Raises:
        UserError: embeddings differ in width, or an index does not fit its tar.
    """
    parts: list[dict[str, NDArray[Any]]] = []
    width, seen_in = 0, ""
    for shard, start in zip(shards, starts.tolist(), strict=True):
        index = index_of(shard, extension=MEMBER)
        for found in pc.unique(index["width"]).to_pylist():
            if width and found != width:
                raise UserError(
                    f"text embeddings differ in width: {width} in {seen_in}, {found} in {shard.tar_path}",
                    hint="all embeddings of a variant must be alike: run prep text again",
                )
            width, seen_in = found, str(shard.tar_path)
        parts.append(_read(shard, index, start=start, width=width, video_ids=video_ids))
    joined = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    by_address = np.argsort(joined["member_address"], kind="stable")
    members = TextMembers(
        width=width,
        address=joined["member_address"][by_address],
        size_bytes=joined["member_bytes"][by_address],
        crc32=joined["member_crc32"][by_address],
        video_row=joined["member_video"][by_address],
    )
    by_id = np.argsort(joined["caption_id"], kind="stable")
    return members, TextRows(**{name: joined.pop(name)[by_id] for name in ("caption_id", "video_row", "address")})


def _read(
    shard: CommittedShard, index: pa.Table, *, start: int, width: int, video_ids: pa.Array
) -> dict[str, NDArray[Any]]:
    num_rows = index["num_rows"].to_numpy().astype(np.int64)
    row_bytes = width * ITEM_BYTES
    address, header_bytes = array_addresses(
        shard, index, extension=MEMBER, array_bytes=num_rows * row_bytes, start=start
    )
    video_row = rows_of(index["video_id"], video_ids).astype(np.int32)
    caption_row = pc.list_flatten(index["caption_row"]).to_numpy()
    member = pc.list_parent_indices(index["caption_row"]).to_numpy()
    same_lists = pc.all(pc.equal(pc.list_value_length(index["caption_row"]), pc.list_value_length(index["caption_id"])))
    if not same_lists.as_py() or ((caption_row < 0) | (caption_row >= num_rows[member])).any():
        raise UserError(
            f"{shard.index_path} cannot be used: it names rows that its tar does not have",
            hint="prep verify names everything that is damaged, and prep text makes it again",
        )
    return {
        "caption_id": pc.list_flatten(index["caption_id"]).to_numpy(),
        "video_row": video_row[member],
        "address": address[member] + caption_row * np.int64(row_bytes),
        "member_address": address - header_bytes,
        "member_bytes": header_bytes + num_rows * row_bytes,
        "member_crc32": index[f"{MEMBER}_crc32"].to_numpy(),
        "member_video": video_row,
    }
