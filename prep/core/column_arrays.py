"""Read and verify single arrays of the columns `latents` and `text`.

Commands that read a few chunks of many shards use this module. If the data folder is in a bucket, only the requested
byte ranges are fetched.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import Mirror, mirror_of
from clipmill.shards.chunk_table import ChunkRows, read_chunk_rows
from clipmill.shards.columns import how_to_make, how_to_repair
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.npy import decompress_frame, load_npy
from clipmill.shards.opening import DamagedTar
from clipmill.shards.reader import Variant
from clipmill.shards.tars import TarBytes


def bucket_tars(data_dir: Path) -> TarBytes | None:
    """Return a byte-range reader for the tars of a data folder in a bucket; None if the folder is local."""
    mirror = mirror_of(data_dir)
    return None if mirror is None else BucketTars(mirror)


@dataclass(eq=False)
class BucketTars:
    """`TarBytes` that fetches only the requested byte ranges of a tar in a bucket.

    Opening the tar as a file would fetch half a gigabyte for a single chunk.
    """

    mirror: Mirror
    gap_bytes = 1 << 18

    def name(self, path: Path) -> str:
        """Return the local path. When a command prints this path, it is replaced with the URL in the bucket."""
        return str(path)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        content = self.mirror.read_range(path, offset, size)
        if len(content) != size:
            raise DamagedTar(path, f"truncated: it ends before byte {offset + size}, which the index refers to")
        return content

    def read_ranges(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(path, offset, size) for offset, size in ranges]

    def provide(self, index: Path, *, size_bytes: int, sha256: str | None = None) -> None:
        """Do nothing, because the index is fetched when it is opened."""


@dataclass(frozen=True)
class ColumnArrays:
    """Samples of a variant, with access to their arrays by row.

    Attributes:
        name: Name of the column.
        variant: Opened variant.
        rows: Merged index of the variant.
    """

    name: str
    variant: Variant
    rows: ChunkRows

    @classmethod
    def open(cls, data_dir: Path, name: str, *, variant: str | None = None) -> "ColumnArrays":
        """Open a variant of a column, by default the current variant.

        Raises:
            UserError: The variant does not exist, is incomplete, or is empty.
        """
        opened_variant = Variant.open(data_dir, column=name, variant=variant, tars=bucket_tars(data_dir))
        opened_variant.require_complete()
        if not opened_variant.num_samples:
            raise UserError(
                f"{opened_variant.directory} is empty", hint=f"run {how_to_make(name, data_dir)}, and see prep status"
            )
        return cls(name, opened_variant, read_chunk_rows(opened_variant))

    def field_values(self, name: str) -> NDArray[Any]:
        """Return a numeric field of all samples, [samples]."""
        values: NDArray[Any] = self.rows.table[name].to_numpy()
        return values

    def array(self, row: int) -> NDArray[np.float16]:
        """Read and verify the array of a sample.

        Args:
            row: Row of the sample in `rows`.

        Raises:
            UserError: The array is damaged or missing.
        """
        entry = self.rows.table.slice(row, 1).select(["shard", "row", "offset", "size", "crc32"]).to_pylist()[0]
        shard = self.variant.shard(entry["shard"])
        try:
            payload = shard.read_range(entry["offset"], entry["size"])
        except DamagedTar as error:
            raise UserError(str(error), hint=how_to_repair()) from None
        except FileNotFoundError:
            raise UserError(f"{shard.tar_path} is missing", hint=how_to_repair()) from None
        array = None
        if zlib.crc32(payload) == entry["crc32"]:
            if self.rows.member.endswith(".zst"):
                shape = [int(self.field_values(name)[row]) for name in ("num_frames", "channels", "height", "width")]
                payload = decompress_frame(payload, size_bytes=BLOCK_BYTES + 2 * prod(shape))
            array = load_npy(payload)
        if array is None:
            raise UserError(
                f"{shard.tar_name}: the array in row {entry['row']} does not match its checksum",
                hint=how_to_repair(),
            )
        return array

    def video_rows(self, video_ids: pa.Array) -> NDArray[np.int64]:
        """Return the row in `video_ids` of each sample's video, int64 [samples]; -1 if `video_ids` lacks the video."""
        entries, codes = self.rows.dictionary_codes("video_id")
        return pc.fill_null(pc.index_in(entries, video_ids), -1).to_numpy().astype(np.int64)[codes]
