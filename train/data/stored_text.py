"""Embeddings of captions that `prep text` has stored: where each lies in the mapped tars of the `text` column."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from shards.reader import CommittedShard, Variant
from train.data.chunks import rows_of
from train.data.mapped_tars import (
    MappedTars,
    Payload,
    VerifiedMembers,
    array_addresses,
    damaged_index,
    verified_index,
)
from train.data.outcomes import SampleFailed
from train.data.remote import RemoteTars
from train.data.remote_maps import open_maps

_MEMBER = "text.npy"
_ITEM_BYTES = 2  # of float16


@dataclass(frozen=True)
class TextMembers:
    """The members that hold embeddings, ordered by address; one entry of each array per video.

    Attributes:
        width: D.
        address, size_bytes, crc32: of the payload, header and array.
        video_row: of its video; -1 for a video that is not among those asked for.
    """

    width: int
    address: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    video_row: NDArray[np.int32]

    @property
    def row_bytes(self) -> int:
        """Size of an embedding."""
        return self.width * _ITEM_BYTES

    def member_at(self, address: Any) -> Any:
        """The member that holds the embedding at an address, or those at an array of addresses."""
        return np.searchsorted(self.address, address, side="right") - 1

    def verified(self, tars: MappedTars) -> VerifiedMembers:
        """Verification of these members of `tars`."""

        def payload(member: int) -> Payload:
            return Payload(int(self.address[member]), int(self.size_bytes[member]), int(self.crc32[member]))

        return VerifiedMembers(tars, len(self.address), payload, column="text", noun="embeddings")


@dataclass(frozen=True)
class TextRows:
    """Embeddings of captions, ordered by caption id.

    Attributes:
        caption_id: ascending.
        video_row: of the caption's video, as in `TextMembers`.
        address: of the embedding in the mapped tars.
    """

    caption_id: NDArray[np.int64]
    video_row: NDArray[np.int32]
    address: NDArray[np.int64]

    def find(
        self, caption_id: NDArray[np.int64], *, video_row: NDArray[np.int64], video_ids: pa.Array
    ) -> NDArray[np.int64]:
        """For each caption its index here, -1 if it has no embedding.

        Raises:
            UserError: a caption belongs to another video here than in the manifest.
        """
        index = np.minimum(np.searchsorted(self.caption_id, caption_id), len(self.caption_id) - 1)
        found = self.caption_id[index] == caption_id
        strange = np.flatnonzero(found & (self.video_row[index] != video_row))
        if len(strange):
            at = int(strange[0])
            theirs = int(self.video_row[index[at]])
            other = repr(video_ids[theirs].as_py()) if theirs >= 0 else "a video that is not of this split"
            raise UserError(
                f"caption {caption_id[at]} is of video {video_ids[int(video_row[at])].as_py()!r} in the manifest, and "
                f"of {other} in the text column: they belong to different data sets",
                hint="run prep text again, or use the text column of this manifest",
            )
        return np.where(found, index, -1)


def read_text_rows(
    shards: Sequence[CommittedShard], *, starts: NDArray[np.int64], video_ids: pa.Array
) -> tuple[TextMembers, TextRows]:
    """Collect the embeddings of all captions from the indexes.

    Args:
        starts: address of each shard's tar.
        video_ids: a video's row is its index here.

    Raises:
        UserError: embeddings differ in width, or an index does not match its tar.
    """
    parts: list[dict[str, NDArray[Any]]] = []
    width, seen_in = 0, ""
    for shard, start in zip(shards, starts.tolist(), strict=True):
        index, _ = verified_index(shard, members=[_MEMBER])
        for found in pc.unique(index["width"]).to_pylist():
            if width and found != width:
                raise UserError(
                    f"text embeddings differ in width: {width} in {seen_in}, {found} in {shard.tar_path}",
                    hint="all embeddings of a variant must be alike: run prep text again",
                )
            width, seen_in = found, str(shard.tar_path)
        parts.append(_read(shard, index, start=start, row_bytes=width * _ITEM_BYTES, video_ids=video_ids))
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
    shard: CommittedShard, index: pa.Table, *, start: int, row_bytes: int, video_ids: pa.Array
) -> dict[str, NDArray[Any]]:
    num_rows = index["num_rows"].to_numpy().astype(np.int64)
    array_bytes = num_rows * row_bytes
    address, header_bytes = array_addresses(shard, index, member=_MEMBER, array_bytes=array_bytes, start=start)
    video_row = rows_of(index["video_id"], video_ids).astype(np.int32)
    caption_row = pc.list_flatten(index["caption_row"]).to_numpy()
    member = pc.list_parent_indices(index["caption_row"]).to_numpy()
    same_lists = pc.all(pc.equal(pc.list_value_length(index["caption_row"]), pc.list_value_length(index["caption_id"])))
    if not same_lists.as_py() or ((caption_row < 0) | (caption_row >= num_rows[member])).any():
        raise damaged_index(shard, "it names rows that its tar does not have")
    return {
        "caption_id": pc.list_flatten(index["caption_id"]).to_numpy(),
        "video_row": video_row[member],
        "address": address[member] + caption_row * np.int64(row_bytes),
        "member_address": address - header_bytes,
        "member_bytes": header_bytes + array_bytes,
        "member_crc32": index[f"{_MEMBER}_crc32"].to_numpy(),
        "member_video": video_row,
    }


def encoder_of(variant: Variant) -> str:
    """The model that made the embeddings of a variant of the text column, by its weights."""
    recipe = variant.recipe
    return f"{recipe.get('clip')} {str(recipe.get('clip_sha256'))[:8]}, width {recipe.get('width')}"


class StoredText:
    """The `text` column mapped into memory: 20 bytes per caption, whatever the width. Thread-safe.

    The embeddings of a video are verified when the first of them is needed.

    Args:
        tars: reads the tars of a remote data folder, which are fetched into the cache as a whole.

    Raises:
        UserError: there is no such column, or a tar is missing or truncated.
    """

    def __init__(self, data_dir: Path, video_ids: pa.Array, *, tars: RemoteTars | None = None) -> None:
        if tars is not None:
            tars.files.copy_column("text")
        variant = Variant.open(data_dir, column="text", tars=tars).whole()
        self.variant_name = variant.directory.name
        self._variant, self._video_ids = variant, video_ids
        shards = variant.shards()
        if not shards:
            hint = f"run prep text --data {shlex.quote(str(data_dir))}"
            raise UserError(f"{variant.directory} has no text of any video", hint=hint)
        self._tars = open_maps(shards, tars, whole=shards)
        self._members, self._rows = read_text_rows(shards, starts=self._tars.starts, video_ids=video_ids)
        self._verified = self._members.verified(self._tars)

    @property
    def encoder(self) -> str:
        """The model that made the embeddings."""
        return encoder_of(self._variant)

    @property
    def width(self) -> int:
        """D of the embeddings."""
        return self._members.width

    def has(self, caption_id: NDArray[np.int64], *, video_row: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which captions have an embedding; raises UserError like `TextRows.find`."""
        return self._rows.find(caption_id, video_row=video_row, video_ids=self._video_ids) >= 0

    def embedding(self, caption_id: int, *, key: str) -> NDArray[np.float16]:
        """The embedding of a caption that has one, float16 [D] of unit length.

        Args:
            key: of the sample that needs it.

        Raises:
            SampleFailed: the embeddings of its video do not match their checksum.
        """
        address = int(self._rows.address[int(np.searchsorted(self._rows.caption_id, caption_id))])
        if problem := self._verified.problem(int(self._members.member_at(address))):
            raise SampleFailed(key, reason=problem.reason, detail=problem.detail)
        return np.frombuffer(self._tars.bytes_at(address, self._members.row_bytes), np.float16).copy()
