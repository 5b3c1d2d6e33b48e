"""The chunks of a variant as arrays, from its merged table or its indexes, and the choice of those to show."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key
from clipmill.prep.core.plan import is_readable, problems_of
from clipmill.shards.chunk_table import order_of, read_chunk_rows
from clipmill.shards.opening import Damaged
from clipmill.shards.pages.figures import evenly_within
from clipmill.shards.reader import Variant
from clipmill.shards.selection import selected_chunks
from clipmill.shards.where import parse_where

_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den", "size", "shard", "row")
_SPLITS = ("train", "val", "test")  # in this order, before others


@dataclass(frozen=True)
class Hole:
    """A shard that cannot be read, or only in part. `num_chunks` is None if its commit is damaged."""

    shard_id: int
    split: str | None
    num_chunks: int | None
    why: str


@dataclass(frozen=True)
class Chunks:
    """Chunks ordered by video and start, one entry of each array per chunk.

    Attributes:
        video_ids: distinct ids of videos.
        video: the video of each chunk, as an index of `video_ids`, ascending.
        start_ms, duration_s, size_bytes: its start in the video, its duration, and the size of its MP4 file.
        split: of each chunk, as an index of `splits`.
        shard, row: where it is: shard ID, and row of the shard's index.
        holes: shards that cannot be read, by shard ID.
    """

    video_ids: pa.Array
    video: NDArray[np.int32]
    start_ms: NDArray[np.int64]
    duration_s: NDArray[np.float64]
    size_bytes: NDArray[np.int64]
    splits: tuple[str, ...]
    split: NDArray[np.int32]
    shard: NDArray[np.int32]
    row: NDArray[np.int32]
    holes: Mapping[int, Hole]

    def __len__(self) -> int:
        return len(self.video)

    @property
    def bits_per_s(self) -> NDArray[np.float64]:
        """Bit rate of each chunk."""
        return self.size_bytes * 8 / np.maximum(self.duration_s, 1e-3)

    def key(self, number: int) -> str:
        """Return the key of a chunk."""
        return chunk_key(self.video_ids[int(self.video[number])].as_py(), int(self.start_ms[number]))

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> "Chunks":
        """Return some of the chunks."""
        names = ("video", "start_ms", "duration_s", "size_bytes", "split", "shard", "row")
        arrays = {name: getattr(self, name)[rows] for name in names}
        return Chunks(video_ids=self.video_ids, splits=self.splits, holes=self.holes, **arrays)

    def kept(self, where: str, data_dir: Path) -> "Chunks":
        """Return the chunks that an expression keeps.

        Raises:
            UserError: it is not an expression on chunks, or keeps none.
        """
        parsed = parse_where(where)
        parsed.require(("chunk", "video", "label"), because="the page shows chunks")
        is_kept = selected_chunks(
            parsed, data_dir, video_ids=self.video_ids, video_row=self.video, start_ms=self.start_ms
        )
        if not is_kept.any():
            raise UserError(
                f"--where '{parsed.text}' keeps none of {len(self):,} chunks", hint="use a weaker condition"
            )
        return self.take(is_kept)


def read_chunks(variant: Variant) -> Chunks:
    """Return the chunks of a variant. Without a usable merged table they are those of the readable indexes.

    Raises:
        UserError: no shard can be read.
    """
    holes = {
        shard_id: Hole(shard_id, None, None, why)
        if (commit := variant.commits.get(shard_id)) is None
        else Hole(shard_id, commit.split, commit.files.num_samples if commit.files else 0, why)
        for shard_id, (_, why) in problems_of(variant).items()
    }
    split_of = {commit.shard_id: commit.split for commit in variant.commits.values() if commit.files is not None}
    found = None if len(holes) >= len(split_of) + len(variant.damaged) else _merged(variant)
    if found is None:
        found = _collected(variant, holes)
    if found is None:
        raise UserError(f"no readable shards in {variant.directory}", hint="run `prep verify` to find what is damaged")
    video_ids, video, table = found
    columns = {name: table[name].to_numpy() for name in _COLUMNS}
    names = set(split_of.values())
    splits = (*(name for name in _SPLITS if name in names), *sorted(names.difference(_SPLITS)))
    code_of_shard = np.full(max(split_of) + 1, -1, np.int32)
    for shard_id, split in split_of.items():
        code_of_shard[shard_id] = splits.index(split)
    return Chunks(
        video_ids=video_ids,
        video=video,
        start_ms=columns["start_ms"],
        duration_s=columns["num_frames"] * columns["fps_den"].astype(np.float64) / columns["fps_num"],
        size_bytes=columns["size"].astype(np.int64),
        splits=splits,
        split=code_of_shard[columns["shard"]],
        shard=columns["shard"],
        row=columns["row"],
        holes=holes,
    )


_Rows = tuple[
    pa.Array, NDArray[np.int32], pa.Table
]  # distinct ids of videos; the video of each chunk; its other columns


def _merged(variant: Variant) -> _Rows | None:
    try:
        rows = read_chunk_rows(variant, columns=("video_id", *_COLUMNS))
    except (Damaged, OSError):
        return None  # the readable indexes have as much
    return _in_order(*rows.dictionary_codes("video_id"), rows.table)


def _in_order(ids: pa.Array, codes: NDArray[np.int32], table: pa.Table) -> _Rows:
    """Order the chunks by video, as they occur in the table, and start; `ids` may occur several times."""
    distinct = ids.dictionary_encode()
    video = distinct.indices.to_numpy()[codes]
    order = order_of(video, table["start_ms"].to_numpy())
    rows = slice(None) if order is None else order
    table = table.select(_COLUMNS)
    return distinct.dictionary, video[rows], table if order is None else table.take(pa.array(order))


def _collected(variant: Variant, holes: dict[int, Hole]) -> _Rows | None:
    parts = []
    for shard in variant.shards():
        if not is_readable(shard):
            why = "its index cannot be read"
            holes.setdefault(shard.shard_id, Hole(shard.shard_id, shard.split, shard.num_samples, why))
            continue
        index = shard.index
        part = index.select(["video_id", "start_ms", "num_frames", "fps_num", "fps_den"])
        part = part.append_column("size", index["mp4_size"])
        part = part.append_column("shard", pa.array(np.full(index.num_rows, shard.shard_id, np.int32)))
        part = part.append_column("row", pa.array(np.arange(index.num_rows, dtype=np.int32)))
        parts.append(part.replace_schema_metadata())
        shard.close()
    if not parts:
        return None
    rows = pa.concat_tables(parts)
    coded = rows["video_id"].combine_chunks().dictionary_encode()
    return _in_order(coded.dictionary, coded.indices.to_numpy(), rows)


def chosen(chunks: Chunks, *, num_chunks: int) -> NDArray[np.int64]:
    """Return the rows of up to `num_chunks` chunks, ascending: evenly spaced in each split, small splits included.

    Half of them are shared out to the splits alike and the other half by size, so that a validation split of one
    percent is seen too.
    """
    sizes = np.bincount(chunks.split, minlength=len(chunks.splits))
    shares = _shares(sizes, min(num_chunks, len(chunks)))
    picked = [
        np.flatnonzero(chunks.split == split)[
            np.array(evenly_within(range(int(sizes[split])), at_most=share), np.int64)
        ]
        for split, share in enumerate(shares)
    ]
    return np.sort(np.concatenate(picked))


def _shares(sizes: NDArray[np.int64], total: int) -> list[int]:
    """Return how many chunks to take of each split. They add up to `total`, at most the sum of `sizes`."""
    alike = np.minimum(sizes, total // (2 * max(1, int(np.count_nonzero(sizes)))))
    left = sizes - alike
    exact = left * (total - int(alike.sum())) / max(1, int(left.sum()))
    shares = alike + np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(np.floor(exact) - exact, kind="stable")
    shares[by_remainder[: total - int(shares.sum())]] += 1
    return [int(share) for share in shares]
