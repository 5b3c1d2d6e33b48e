"""The arrays of a column of latents or texts, verified as they are read."""

import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.prep.core.bucket_tars import tars_of
from clipmill.shards.chunk_table import ChunkRows, read_chunk_rows
from clipmill.shards.columns import how_to_make, how_to_repair
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.npy import decompress_frame, load_npy
from clipmill.shards.opening import DamagedTar
from clipmill.shards.reader import Variant


@dataclass(frozen=True)
class ColumnArrays:
    """The samples of a column and what reads their arrays."""

    name: str
    variant: Variant
    rows: ChunkRows

    @classmethod
    def open(cls, data_dir: Path, name: str, *, variant: str | None = None) -> "ColumnArrays":
        """Open a variant of a column, by default the current one.

        Raises:
            UserError: it does not exist, or is empty.
        """
        opened = Variant.open(data_dir, column=name, variant=variant, tars=tars_of(data_dir)).require_complete()
        if not opened.num_samples:
            raise UserError(
                f"{opened.directory} is empty", hint=f"run {how_to_make(name, data_dir)}, and see prep status"
            )
        return cls(name, opened, read_chunk_rows(opened))

    def numbers(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self.rows.table[name].to_numpy()
        return values

    def array(self, at: int) -> NDArray[np.float16]:
        """Return the array of a sample, verified.

        Raises:
            UserError: it is damaged or missing.
        """
        row = self.rows.table.slice(at, 1).select(["shard", "row", "offset", "size", "crc32"]).to_pylist()[0]
        shard = self.variant.shard(row["shard"])
        try:
            payload = shard.read_range(row["offset"], row["size"])
        except DamagedTar as error:
            raise UserError(str(error), hint=how_to_repair(self.name)) from None
        except FileNotFoundError:
            raise UserError(f"{shard.tar_path} is missing", hint=how_to_repair(self.name)) from None
        array = None
        if zlib.crc32(payload) == row["crc32"]:
            array = load_npy(self._unpacked(payload, at))
        if array is None:
            raise UserError(
                f"{shard.tar_name}: the array in row {row['row']} differs from its checksum",
                hint=how_to_repair(self.name),
            )
        return array

    def _unpacked(self, payload: bytes, at: int) -> bytes:
        if not self.rows.member.endswith(".zst"):
            return payload
        shape = [int(self.numbers(name)[at]) for name in ("num_frames", "channels", "height", "width")]
        return decompress_frame(payload, size_bytes=BLOCK_BYTES + 2 * prod(shape))

    def video_rows(self, video_ids: pa.Array) -> NDArray[np.int64]:
        """The row of each sample's video in `video_ids`, -1 for others."""
        entries, codes = self.rows.dictionary_codes("video_id")
        return pc.fill_null(pc.index_in(entries, video_ids), -1).to_numpy().astype(np.int64)[codes]
