"""Embeddings of captions that `prep text` made once, read by caption id."""

import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.errors import UserError
from shards.reader import Variant
from train.data.latents.captions import find_embedded
from train.data.latents.checksums import text_members
from train.data.latents.mapped_tars import MappedTars
from train.data.latents.text_rows import TextMembers, TextRows, read_text_rows
from train.data.outcomes import SampleFailed


class StoredText:
    """The `text` column, mapped into memory: 20 bytes a caption, whatever the width. Safe to use from many threads.

    The embeddings of a video are compared with their checksum when the first of them is asked for.

    Raises:
        UserError: there is no such column, or a tar is missing or cut short.
    """

    def __init__(self, data_dir: Path, video_ids: pa.Array) -> None:
        variant = Variant.open(data_dir, column="text").whole()
        self.variant_name = variant.directory.name
        self._video_ids = video_ids
        shards = variant.shards()
        if not shards:
            hint = f"run prep text --data {shlex.quote(str(data_dir))}"
            raise UserError(f"{variant.directory} has no text of any video", hint=hint)
        self._tars = MappedTars(shards)
        members, rows = read_text_rows(shards, starts=self._tars.starts, video_ids=video_ids)
        self._members: TextMembers = members
        self._rows: TextRows = rows
        self._checked = text_members(self._tars, members)

    @property
    def width(self) -> int:
        """D of the embeddings."""
        return self._members.width

    def has(self, caption_id: NDArray[np.int64], *, video_row: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether captions have an embedding.

        Raises:
            UserError: one has it under another video than the manifest says.
        """
        return find_embedded(caption_id, self._rows, video_row=video_row, video_ids=self._video_ids) >= 0

    def embedding(self, caption_id: int, *, key: str) -> NDArray[np.float16]:
        """The embedding of a caption that has one, float16 [D] of unit length.

        Args:
            key: of the sample that it is for.

        Raises:
            SampleFailed: the embeddings of its video are not those written.
        """
        place = int(np.searchsorted(self._rows.caption_id, caption_id))
        address = int(self._rows.address[place])
        member = int(np.searchsorted(self._members.address, address, side="right")) - 1
        if problem := self._checked.problem(member):
            raise SampleFailed(key, reason=problem.reason, detail=problem.detail)
        return np.frombuffer(self._tars.bytes_at(address, self._members.row_bytes), np.float16).copy()
