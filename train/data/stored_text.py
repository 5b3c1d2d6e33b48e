"""Embeddings that `prep text` stored for captions, and their locations in the tars of the `text` column."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import num_captions_of
from clipmill.shards.columns import TEXT, command_for, how_to_make
from clipmill.shards.merged_table import variant_state
from clipmill.shards.reader import Variant
from clipmill.train.data.data_folder import index_in
from clipmill.train.data.mapped_tars import (
    MappedTars,
    Part,
    Payload,
    Problem,
    VerifiedMembers,
    member_rows,
    open_maps,
    places_of,
    unusable_error,
)
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    from clipmill.train.data.remote import RemoteTars

_ITEM_BYTES = 2  # float16


@dataclass(frozen=True)
class TextMembers:
    """Tar members that contain embeddings, one per video, ordered by place. Each array has one entry per member.

    A place is an offset in the concatenation of all tars, bytes (clipmill.train.data.mapped_tars).

    Attributes:
        width: Dimension D of embeddings.
        place, size_bytes, crc32: Place, size and checksum of the member's payload (header and array).
        video_row: Row of the video; -1 if the video is not requested.
        max_tokens: Length of the longest sequence if texts are stored as sequences of vectors; 0 for embeddings.
    """

    width: int
    place: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    video_row: NDArray[np.int32]
    max_tokens: int = 0

    @property
    def row_bytes(self) -> int:
        """Size of an embedding, or of one vector of a sequence, in bytes."""
        return self.width * _ITEM_BYTES

    def member_at(self, place: Any) -> Any:
        """Return the member that contains the embedding at a place; an array of members for an array of places."""
        return np.searchsorted(self.place, place, side="right") - 1

    def loader(self, tars: MappedTars) -> VerifiedMembers:
        """Return a loader that reads these members from `tars`, and verifies a member when it is first loaded."""

        def payload(member: int) -> Payload:
            return Payload(int(self.place[member]), int(self.size_bytes[member]), int(self.crc32[member]))

        return VerifiedMembers(tars, len(self.place), payload, column=TEXT, noun="embeddings")

    def row_of(self, content: memoryview, member: int, place: int, *, num_tokens: int = 1) -> Part:
        """Return the embedding or sequence at a place, as a part of the member's bytes."""
        begin = place - int(self.place[member])
        return content, begin, begin + num_tokens * self.row_bytes


@dataclass(frozen=True)
class TextRows:
    """Embeddings of captions, ordered by caption ID. Each array has one entry per caption.

    Attributes:
        caption_id: ID of the caption, ascending.
        video_row: Row of the caption's video; -1 if the video is not requested.
        place: Place of the embedding, or of the first vector of the sequence (see `TextMembers`).
        num_tokens: Length of the sequence; None if texts are stored as embeddings.
    """

    caption_id: NDArray[np.int64]
    video_row: NDArray[np.int32]
    place: NDArray[np.int64]
    num_tokens: NDArray[np.int32] | None = None

    def find(
        self, caption_id: NDArray[np.int64], *, video_row: NDArray[np.int64], video_ids: pa.Array
    ) -> NDArray[np.int64]:
        """Return the index of each caption's embedding; -1 if the caption has no embedding.

        Raises:
            UserError: A caption belongs to different videos in the text column and in the manifest.
        """
        index = np.minimum(np.searchsorted(self.caption_id, caption_id), len(self.caption_id) - 1)
        has_text = self.caption_id[index] == caption_id
        mismatches = np.flatnonzero(has_text & (self.video_row[index] != video_row))
        if len(mismatches):
            first = int(mismatches[0])
            other_row = int(self.video_row[index[first]])
            other_video = f"video {video_ids[other_row].as_py()!r}" if other_row >= 0 else "a video of another split"
            raise UserError(
                f"caption {caption_id[first]} belongs to video {video_ids[int(video_row[first])].as_py()!r} in the "
                f"manifest, but to {other_video} in the text column",
                hint=f"run prep {command_for(TEXT)} again, or use the text column of this manifest",
            )
        return np.where(has_text, index, -1)


def read_text_rows(variant: Variant, *, starts: NDArray[np.int64], video_ids: pa.Array) -> tuple[TextMembers, TextRows]:
    """Return the locations of the embeddings of all captions.

    The locations come from the variant's merged table or, if there is none, from the indexes of its shards.

    Args:
        starts: Place of each shard's tar.
        video_ids: IDs of the requested videos. The row of a video is its index in this array.

    Raises:
        UserError: Embeddings differ in width, or an index does not match its tar.
    """
    tars, rows = variant.tar_files, member_rows(variant)
    table = rows.table
    shard_of = np.searchsorted(tars.shard_ids, table["shard"].to_numpy())
    shard_order = np.lexsort((table["row"].to_numpy(), shard_of))
    widths = table["width"].to_numpy()
    if (mismatches := np.flatnonzero(widths[shard_order] != widths[shard_order[0]])).size:
        first_row, second_row = (int(shard_order[index]) for index in (mismatches[0] - 1, mismatches[0]))
        first_tar, second_tar = (tars.path(int(shard_of[row])) for row in (first_row, second_row))
        raise UserError(
            f"text embeddings differ in width: {widths[first_row]} in {first_tar}, {widths[second_row]} in "
            f"{second_tar}",
            hint=f"run prep {command_for(TEXT)} again, because all embeddings of a variant must have the same width",
        )
    row_bytes = int(widths[0]) * _ITEM_BYTES
    num_rows = table["num_rows"].to_numpy().astype(np.int64)
    tokens = pc.list_flatten(table["row_tokens"]).to_numpy() if variant.recipe.get("max_tokens") else None
    # Number of vectors before each text, in the order of the table.
    first_vector = None if tokens is None else np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    first = np.cumsum(num_rows) - num_rows
    array_bytes = (
        num_rows if first_vector is None else first_vector[first + num_rows] - first_vector[first]
    ) * row_bytes
    place, header_bytes = places_of(variant, table, starts=starts, shard_of=shard_of, array_bytes=array_bytes)
    entries, codes = rows.dictionary_codes("video_id")
    video_row = index_in(entries, video_ids).astype(np.int32)[codes]
    caption_row, caption_id = (pc.list_flatten(table[name]).to_numpy() for name in ("caption_row", "caption_id"))
    member = np.repeat(np.arange(len(table)), pc.list_value_length(table["caption_row"]).to_numpy())
    same_lists = pc.all(pc.equal(pc.list_value_length(table["caption_row"]), pc.list_value_length(table["caption_id"])))
    is_invalid = (caption_row < 0) | (caption_row >= num_rows[member])
    if not same_lists.as_py() or is_invalid.any():
        shard_index = int(shard_of[member[is_invalid.argmax()]]) if is_invalid.any() else 0
        shard = variant.shard(int(tars.shard_ids[shard_index]))
        raise unusable_error(shard.index_path, shard.commit.column, "it lists rows that its tar does not contain")
    place_order = np.argsort(place, kind="stable")
    members = TextMembers(
        width=int(widths[0]),
        place=(place - header_bytes)[place_order],
        size_bytes=(header_bytes + array_bytes)[place_order],
        crc32=table["crc32"].to_numpy()[place_order],
        video_row=video_row[place_order],
        max_tokens=0 if tokens is None else int(tokens.max(initial=0)),
    )
    text = first[member] + caption_row
    row = caption_row if first_vector is None else first_vector[text] - first_vector[first[member]]
    places = place[member] + row * np.int64(row_bytes)
    id_order = np.argsort(caption_id, kind="stable")
    lengths = None if tokens is None else tokens[text][id_order]
    return members, TextRows(caption_id[id_order], video_row[member][id_order], places[id_order], lengths)


def encoder_of(variant: Variant) -> str:
    """Return the name, weights fingerprint and width of the encoder that made a variant of the text column."""
    recipe = variant.recipe
    return f"{recipe.get('encoder')} {str(recipe.get('encoder_sha256'))[:8]}, width {recipe.get('width')}"


def require_embeddings(variant: Variant, data_dir: Path) -> None:
    """Raise a UserError if texts are stored as sequences of vectors instead of one embedding per text."""
    if variant.recipe.get("max_tokens"):
        raise UserError(
            f"{variant.directory} stores a sequence of vectors for each text, but one embedding per text is needed",
            hint=f"run {how_to_make(TEXT, data_dir)}, or read the sequences with open_latents",
        )


class StoredText:
    """Memory-mapped `text` column. It takes 20 bytes of memory per caption, regardless of the width. Thread-safe.

    The embeddings of a video are verified when one of them is first needed.

    Args:
        video_ids: IDs of the requested videos.
        videos: Values that identify everything that affects `video_ids` (clipmill.train.data.node_cache).
        tars: Reader of the tars of a remote data folder; None for a local folder. Remote tars are downloaded completely
            into the cache.

    Attributes:
        variant_name: Name of the variant.
        depends_on: Values that identify the version of the variant.

    Raises:
        UserError: The column does not exist or stores sequences of vectors, or a tar is missing or truncated.
    """

    def __init__(
        self,
        data_dir: Path,
        video_ids: pa.Array,
        *,
        videos: tuple[object, ...] = (),
        tars: "RemoteTars | None" = None,
    ) -> None:
        if tars is not None:
            tars.files.copy_column(TEXT)
        variant = Variant.open(data_dir, column=TEXT, tars=tars).require_complete()
        require_embeddings(variant, data_dir)
        self.variant_name = variant.directory.name
        self._variant, self._video_ids = variant, video_ids
        if not variant.num_shards:
            hint = f"run {how_to_make(TEXT, data_dir)}"
            raise UserError(f"{variant.directory} contains no texts", hint=hint)
        self._tars = open_maps([variant], tars, cached_variant=variant)
        self.depends_on: tuple[object, ...] = variant_state(variant.directory, variant.commits)
        self._members, self._rows = open_shared(
            lambda: self._read(variant),
            depends_on=(TEXT, self.depends_on, *videos),
            num_rows=variant.num_samples + num_captions_of(data_dir),
            types=(TextMembers, TextRows),
            prefix=TEXT,
        )
        self._loader = self._members.loader(self._tars)

    def _read(self, variant: Variant) -> tuple[TextMembers, TextRows]:
        self._tars.require_files()
        return read_text_rows(variant, starts=self._tars.starts, video_ids=self._video_ids)

    @property
    def encoder(self) -> str:
        """Name, weights fingerprint and width of the encoder that made the embeddings."""
        return encoder_of(self._variant)

    @property
    def width(self) -> int:
        """Dimension D of the embeddings."""
        return self._members.width

    def has_embedding(self, caption_id: NDArray[np.int64], *, video_row: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the captions that have an embedding; raise UserError as `TextRows.find` does."""
        return self._rows.find(caption_id, video_row=video_row, video_ids=self._video_ids) >= 0

    def embedding(self, caption_id: int, *, key: str) -> NDArray[np.float16]:
        """Return the unit-length embedding of a caption, float16 [D]. The caption must have an embedding.

        Args:
            key: Key of the sample that needs the embedding, for the error.

        Raises:
            SampleFailed: The embeddings of the caption's video do not match their checksum.
        """
        place = int(self._rows.place[int(np.searchsorted(self._rows.caption_id, caption_id))])
        member = int(self._members.member_at(place))
        content = self._loader.load(member)
        if isinstance(content, Problem):
            raise SampleFailed(key, reason=content.reason, detail=content.detail)
        content, begin, end = self._members.row_of(content, member, place)
        return np.frombuffer(content[begin:end], np.float16).copy()
