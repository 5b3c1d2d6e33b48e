"""The merged table of `scores`, near-duplicate chunks, and leakage between splits.

The table is `<data>/scores/<variant>/chunks.arrow`, which `prep scores` writes at the end of a run. It is an Arrow IPC
file with one batch, which readers map into memory. Rows are ordered by video (as in the manifest) and start. The
columns are SCORES_FIELDS without `chunk_fingerprint`, and two more. `video_id` is dictionary-encoded, with ascending
codes. `duplicate_of` is the row of the first look-alike chunk in an earlier video, or -1. `has_look_alike` is true if
the chunk has a look-alike in any other video. Scores that could not be computed are null. Readers recognise a stale or
damaged file as clipmill.shards.merged_table defines.

Two chunks look alike if their 64-bit perceptual hashes differ in at most 4 bits. Such hashes agree in at least two of
six bands of 10 or 11 bits (pigeonhole principle). For each of the 15 pairs of bands, the hashes are sorted by these two
bands, and only hashes that agree in both bands are compared.

An image without content, such as a black frame, a single colour or a gradient, is never considered a look-alike
(`is_comparable`). ImageHash's phash compares 64 frequencies with their median, so about half of the bits are set in the
hash of an image with content. Without content, nearly all frequencies are zero, so almost no bits are set (none for
black, one for any other colour). Hashes with fewer than 24 or more than 40 set bits are omitted. Chunks of the same
video are not compared, because chunks of a static shot look alike, but have different captions.

Leakage means that chunks in different splits look alike. It is computed from this table and the splits in the manifest.
If a video has captions in several splits, a chunk belongs to the split of its middle frame, which is the hashed frame.
"""

import shlex
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.divided_videos import read_divided_videos
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key, split_key
from clipmill.manifests.store import read_videos
from clipmill.shards.chunk_table import read_chunk_rows
from clipmill.shards.columns import SCORES, VIDEO, command_for, how_to_make, how_to_repair
from clipmill.shards.dataset import current_variant
from clipmill.shards.merged_table import (
    CHUNKS_FILE,
    DamagedTable,
    is_table_of,
    open_merged_table,
    verify_columns,
    write_merged_table,
)
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES_FIELDS

_STALE = "shards of scores have changed since the table was written"
_ROWS = pa.schema([field for field in SCORES_FIELDS if field.name != "chunk_fingerprint"])
_SCHEMA = pa.schema(
    [
        pa.field("video_id", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        *list(_ROWS)[1:],
        pa.field("duplicate_of", pa.int64(), nullable=False),
        pa.field("has_look_alike", pa.bool_(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Scores:
    """A variant of the column `scores`, and its merged table."""

    table: pa.Table
    variant: Variant


def publish_score_table(variant: Variant) -> Path:
    """Merge the indexes of a variant of `scores` into a table, find near duplicates, and publish the table.

    Returns:
        Path of the table.

    Raises:
        UserError: An index is damaged, or contains a NaN.
    """
    # Collect the rows of all indexes, and add rows of nulls for the chunks that failed.
    tables = [_ROWS.empty_table()]
    for shard in variant.shards():
        try:
            table = shard.index.select(_ROWS.names).cast(_ROWS)
        except (Damaged, OSError, KeyError, pa.ArrowException) as error:
            hint = how_to_repair()
            raise UserError(f"{shard.index_path}: {error}", hint=hint) from error
        for field in _ROWS:
            if pa.types.is_floating(field.type) and pc.any(pc.is_nan(table[field.name])).as_py():
                raise UserError(
                    f"{shard.index_path}: {field.name} is NaN for some chunks",
                    hint=f"remove {shard.index_path}, and run prep {command_for(SCORES)}, which rebuilds that shard",
                )
        tables.append(table)
    failed_keys = {failure.key for commit in variant.commits.values() for failure in commit.failures if failure.key}
    video_ids, starts_ms = zip(*map(split_key, sorted(failed_keys)), strict=True) if failed_keys else ((), ())
    chunks = {"video_id": video_ids, "start_ms": starts_ms}
    nulls = {field.name: pa.nulls(len(failed_keys), field.type) for field in _ROWS if field.name not in chunks}
    rows = pa.concat_tables([*tables, pa.table({**chunks, **nulls}, schema=_ROWS)])
    # Sort the rows by video and start, in one Arrow chunk. Videos that are not in the manifest come last.
    video_column = rows["video_id"].dictionary_encode().combine_chunks()
    ids = video_column.dictionary
    manifest_row = pc.index_in(ids, value_set=read_videos(variant.directory.parent.parent)["video_id"].combine_chunks())
    video_order = pc.sort_indices(
        pa.table({"row": manifest_row, "id": ids}), [("row", "ascending"), ("id", "ascending")]
    )
    rank = np.empty(len(ids), np.int32)
    rank[video_order.to_numpy()] = np.arange(len(ids), dtype=np.int32)
    codes = rank[video_column.indices.to_numpy()]
    order = pa.array(np.lexsort((rows["start_ms"].to_numpy(), codes)))
    video_id = pa.DictionaryArray.from_arrays(pa.array(codes).take(order), ids.take(video_order))
    sorted_rows = rows.drop_columns("video_id").take(order).combine_chunks()
    return write_score_table(variant, sorted_rows.add_column(0, "video_id", video_id))


def write_score_table(variant: Variant, rows: pa.Table) -> Path:
    """Find near duplicates in rows of scores, and publish the merged table.

    Args:
        rows: Scores, ordered by video and start, in one Arrow chunk.

    Returns:
        Path of the table.
    """
    phash = rows["phash"]
    hashed_rows = np.flatnonzero(pc.is_valid(phash))
    hashes = pc.fill_null(phash, 0).to_numpy()[hashed_rows]
    has_content = is_comparable(hashes)
    hashed_rows, hashes = hashed_rows[has_content], hashes[has_content]
    duplicate_of, has_look_alike = np.full(len(rows), -1), np.zeros(len(rows), bool)
    video = rows["video_id"].chunk(0).indices.to_numpy() if len(rows) else np.empty(0, np.int32)
    look_alikes, has_look_alike[hashed_rows] = first_look_alikes(hashes, video=video[hashed_rows])
    duplicate_of[hashed_rows] = np.where(look_alikes >= 0, hashed_rows[look_alikes], -1)
    rows = rows.append_column("duplicate_of", pa.array(duplicate_of))
    rows = rows.append_column("has_look_alike", pa.array(has_look_alike)).cast(_SCHEMA)
    path = variant.directory / CHUNKS_FILE
    write_merged_table(path, rows.combine_chunks(), commits=variant.commits, metadata={})
    return path


def open_scores(data_dir: Path, *, columns: Collection[str] | None = None) -> Scores:
    """Open the merged table of the current variant of `scores`.

    Args:
        columns: Columns to read and verify; None for all.

    Raises:
        UserError: There are no scores; the scores were made from a different variant of `video`; or the table is
            missing, stale or damaged.
    """
    variant = Variant.open(data_dir, column=SCORES).require_complete()
    require_current_chunks(variant, data_dir)
    hint = f"run {how_to_make(SCORES, data_dir)}"
    path = variant.directory / CHUNKS_FILE
    try:
        table = _read_table(path, columns=columns, hint=hint)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing", hint=hint) from error
    if not is_table_of(table, variant.commits):
        raise UserError(f"{path} is stale: {_STALE}", hint=hint)
    return Scores(table, variant)


def require_current_chunks(variant: Variant, data_dir: Path) -> None:
    """Raise a UserError if a variant was not made from the current variant of `video`."""
    column, source = variant.directory.parent.name, variant.recipe.get(VIDEO)
    video = current_variant(data_dir, VIDEO)
    if source is not None and source != video:
        raise UserError(
            f"the column {column} was made from the chunks of {source}, but the current variant of {VIDEO} is {video}",
            hint=f"run prep status --data {shlex.quote(str(data_dir))}, which shows how to rebuild the column",
        )


def score_table_problem(variant: Variant) -> str | None:
    """Return the reason why the merged table is unusable (missing, stale or damaged); None if it is usable."""
    path = variant.directory / CHUNKS_FILE
    try:
        table = _read_table(path, columns=None, hint="")
    except FileNotFoundError:
        return f"{path} is missing"
    except UserError as error:
        return str(error)
    return None if is_table_of(table, variant.commits) else f"{path} is stale: {_STALE}"


def _read_table(path: Path, *, columns: Collection[str] | None, hint: str) -> pa.Table:
    """Read and verify columns of a merged table.

    Raises:
        FileNotFoundError: The table does not exist.
        UserError: The table is damaged.
    """
    try:
        return verify_columns(open_merged_table(path), path, columns=columns)
    except FileNotFoundError:
        raise
    except (DamagedTable, OSError) as error:
        raise UserError(str(error), hint=hint) from error


MAX_DISTANCE = 4  # maximum number of bits in which the hashes of look-alikes differ
MIN_BITS, MAX_BITS = 24, 40  # range of the number of set bits in the hash of an image with content
_BANDS = ((0, 11), (11, 11), (22, 11), (33, 11), (44, 10), (54, 10))  # first bit, number of bits
_NONE = np.iinfo(np.int64).max


def is_comparable(phash: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return True for each hash of an image with content, bool [N].

    Args:
        phash: Perceptual hashes, uint64 [N].
    """
    bits = np.bitwise_count(phash)
    return (bits >= MIN_BITS) & (bits <= MAX_BITS)


def find_close_pairs(hashes: NDArray[np.uint64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Find the pairs of hashes that differ in at most MAX_DISTANCE bits.

    Args:
        hashes: Distinct hashes, uint64 [N].

    Yields:
        Indices (i, j) of the hashes in a block of pairs, int64 [pairs] each. A pair may occur up to 15 times.
    """
    for band, other_band in combinations(_BANDS, 2):
        key = _extract_bits(hashes, *band) << np.uint32(other_band[1]) | _extract_bits(hashes, *other_band)
        order = np.argsort(key, kind="stable")
        key, sorted_hashes = key[order], hashes[order]
        # Count the later hashes that have the same key as each hash.
        is_last = np.append(key[1:] != key[:-1], True)
        ends = np.flatnonzero(is_last)
        num_later = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(key))
        left = np.flatnonzero(num_later)
        for step in range(1, int(num_later.max(initial=0)) + 1):
            left = left[num_later[left] >= step]
            matches = left[np.bitwise_count(sorted_hashes[left] ^ sorted_hashes[left + step]) <= MAX_DISTANCE]
            if len(matches):
                yield order[matches], order[matches + step]


def _extract_bits(hashes: NDArray[np.uint64], first_bit: int, num_bits: int) -> NDArray[np.uint32]:
    return ((hashes >> np.uint64(first_bit)) & np.uint64((1 << num_bits) - 1)).astype(np.uint32)


def first_look_alikes(
    phash: NDArray[np.uint64], *, video: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Find the look-alikes of each row in other videos.

    Args:
        phash: Hashes of comparable frames, uint64 [N].
        video: Index of each frame's video, [N], in ascending order.

    Returns:
        Row of the first look-alike in an earlier video, or -1, int64 [N].
        True if the row has a look-alike in any other video, bool [N].
    """
    hashes, first_row, group = np.unique(phash, return_index=True, return_inverse=True)
    last_row = np.empty(len(hashes), np.int64)
    last_row[group] = np.arange(len(phash))  # the last value wins
    first_alike, last_alike = first_row.copy(), last_row.copy()
    for left, right in find_close_pairs(hashes):
        for hash_index, other_index in ((left, right), (right, left)):
            np.minimum.at(first_alike, hash_index, first_row[other_index])
            np.maximum.at(last_alike, hash_index, last_row[other_index])
    look_alike = first_alike[group]
    is_duplicate = video[look_alike] < video
    has_look_alike = is_duplicate | (video[last_alike[group]] > video)
    return np.where(is_duplicate, look_alike, -1), has_look_alike


def first_look_alikes_by_part(
    phash: NDArray[np.uint64], part: NDArray[np.integer], *, num_parts: int
) -> NDArray[np.int64]:
    """Find the first look-alike of each row in each part.

    Args:
        phash: Hashes of comparable frames, uint64 [N].
        part: Part of each row, [N], from 0 to num_parts - 1.

    Returns:
        Row of the first look-alike, or -1, int64 [N, num_parts].
    """
    hashes, group = np.unique(phash, return_inverse=True)
    first_row = np.full((len(hashes), num_parts), _NONE)
    np.minimum.at(first_row, (group, part), np.arange(len(phash)))
    first_alike = first_row.copy()
    for left, right in find_close_pairs(hashes):
        np.minimum.at(first_alike, left, first_row[right])
        np.minimum.at(first_alike, right, first_row[left])
    return np.where(first_alike == _NONE, -1, first_alike)[group]


MAX_PAIRS = 1000  # maximum number of pairs to list for each pair of splits
_MAX_SHOWN = 3  # maximum number of pairs that `prep status` shows
_FIRST_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Pair:
    """A chunk, and its first look-alike in another split."""

    split: str
    key: str
    other_split: str
    other_key: str


@dataclass(frozen=True)
class Leakage:
    """Chunks in different splits that look alike.

    Attributes:
        counts: (split, other split) -> number of chunks in the first split that look like a chunk in the other split.
            `train` is only ever the second split of a pair.
        pairs: First pairs for each entry of `counts`, at most MAX_PAIRS each.
        unknown_because: Reason why the scores cannot be used; None if they can be used.
    """

    counts: dict[tuple[str, str], int]
    pairs: list[Pair]
    unknown_because: str | None = None

    def values(self) -> dict[str, Any]:
        """Return the leakage as a JSON-serialisable dict."""
        counts = [{"split": split, "other_split": other, "num": num} for (split, other), num in self.counts.items()]
        pairs = [asdict(pair) for pair in self.pairs]
        return {"unknown_because": self.unknown_because, "counts": counts, "pairs": pairs}

    def lines(self) -> list[str]:
        """Return the lines that `prep status` prints."""
        if self.unknown_because is not None:
            return [f"leakage   unknown: {self.unknown_because}"]
        lines = []
        for (split, other), count in self.counts.items():
            verb = "looks" if count == 1 else "look"
            lines.append(
                f"leakage   {count_noun(count, 'chunk')} of split {split} {verb} like a chunk of split {other}"
            )
            pairs = [pair for pair in self.pairs if (pair.split, pair.other_split) == (split, other)]
            lines += [f"          {pair.key} looks like {pair.other_key}" for pair in pairs[:_MAX_SHOWN]]
            if count > _MAX_SHOWN:
                lines.append(f"          ... and {count - _MAX_SHOWN:,} more (--json)")
        return lines


def find_leakage(data_dir: Path) -> Leakage | None:
    """Find look-alikes in different splits; return None if the data folder has no scores.

    Raises:
        UserError: A record of the data folder is damaged.
    """
    if current_variant(data_dir, SCORES) is None:
        return None
    try:
        table, part, names = _look_alikes(data_dir)
    except UserError as error:
        return Leakage({}, [], unknown_because=str(error))
    look_alikes = first_look_alikes_by_part(table["phash"].to_numpy(), part, num_parts=len(names))
    counts: dict[tuple[str, str], int] = {}
    pairs: list[Pair] = []
    for split_index, name in enumerate(names):
        for other_index, other_name in enumerate(names[:split_index]):
            rows = np.flatnonzero((part == split_index) & (look_alikes[:, other_index] >= 0))
            if len(rows):
                counts[name, other_name] = len(rows)
                for row in rows[:MAX_PAIRS].tolist():
                    other_row = int(look_alikes[row, other_index])
                    pairs.append(Pair(name, key_of_row(table, row), other_name, key_of_row(table, other_row)))
    return Leakage(counts, pairs)


def look_alike_keys(data_dir: Path, *, split: str, other_split: str) -> set[str]:
    """Return the keys of the chunks in a split that look like a chunk in another split.

    Raises:
        UserError: There are no scores, or they cannot be used.
    """
    table, part, names = _look_alikes(data_dir)
    if not {split, other_split} <= set(names):
        return set()
    look_alikes = first_look_alikes_by_part(table["phash"].to_numpy(), part, num_parts=len(names))
    has_look_alike = (part == names.index(split)) & (look_alikes[:, names.index(other_split)] >= 0)
    return {key_of_row(table, row) for row in np.flatnonzero(has_look_alike).tolist()}


def _look_alikes(data_dir: Path) -> tuple[pa.Table, NDArray[np.integer], list[str]]:
    """Return the chunks that look like a chunk in another video, and the split of each chunk.

    Returns:
        Rows of the merged table.
        Index of each row's split in the list of splits, [rows].
        Names of the splits.
    """
    table = open_scores(data_dir, columns=["video_id", "start_ms", "phash", "has_look_alike"]).table
    table = table.filter(table["has_look_alike"])
    videos = read_videos(data_dir)
    rows = pc.index_in(table["video_id"].cast(pa.string()), value_set=videos["video_id"].combine_chunks())
    is_in_manifest = pc.is_valid(rows)
    table, rows = table.filter(is_in_manifest), rows.filter(is_in_manifest)
    split = videos["split"].take(rows)
    if (divided := read_divided_videos(data_dir)) is not None:
        middle_us = _middles_us(data_dir, table, is_needed=np.isin(rows.to_numpy(), divided.video))
        split_indices = divided.find_splits(video=rows.to_numpy(), at_us=middle_us)
        split = pc.coalesce(pa.array(divided.splits).take(pa.array(split_indices, mask=split_indices < 0)), split)
    split_names = set(split.unique().to_pylist())
    names = [*(name for name in _FIRST_SPLITS if name in split_names), *sorted(split_names.difference(_FIRST_SPLITS))]
    return table, np.asarray(pc.index_in(split, value_set=pa.array(names, pa.string()))), names


def _middles_us(data_dir: Path, table: pa.Table, *, is_needed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the time of the middle of each chunk in microseconds, from the current variant of `video`, int64 [rows].

    Args:
        is_needed: True for rows whose middle is needed, bool [rows]. Other rows get the start of the chunk.
    """
    names = ("start_ms", "num_frames", "fps_num", "fps_den")
    try:
        chunks = read_chunk_rows(Variant.open(data_dir), columns=("video_id", *names)).table
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair()) from error
    video_ids = pc.unique(table["video_id"].filter(pa.array(is_needed)).cast(pa.string()))
    chunks = chunks.filter(pc.is_in(chunks["video_id"].cast(pa.string()), value_set=video_ids))
    length_s = {
        chunk_key(video_id, start_ms): num_frames * fps_den / fps_num
        for video_id, start_ms, num_frames, fps_num, fps_den in zip(
            *(chunks[name].to_pylist() for name in ("video_id", *names)), strict=True
        )
    }
    middles_us = table["start_ms"].to_numpy() * 1000
    for row in np.flatnonzero(is_needed).tolist():
        middles_us[row] += round(length_s.get(key_of_row(table, row), 0) * 500_000)
    return middles_us


def key_of_row(table: pa.Table, row: int) -> str:
    """Return the key of the chunk in a row of the table."""
    return chunk_key(table["video_id"][row].as_py(), table["start_ms"][row].as_py())
