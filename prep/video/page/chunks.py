"""Read all chunks of a variant for the page of `prep inspect --html`, choose chunks to show, and compute statistics.

The functions scale to a million chunks, because they memory-map a single table and read captions in batches.
"""

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.store import open_captions
from clipmill.prep.core.plan import is_readable, problems_of
from clipmill.shards.chunk_table import Moments, order_of, read_chunk_rows
from clipmill.shards.columns import CAPTIONS
from clipmill.shards.opening import Damaged
from clipmill.shards.pages.figures import Histogram, histogram, middle_items
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES
from clipmill.shards.scores import open_scores
from clipmill.shards.selection import Spans, find_chunks, match_labels, read_label_rows, selected_chunks, stored_rows
from clipmill.shards.where import parse_where

_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den", "size", "shard", "row")
_SPLITS = ("train", "val", "test")  # splits listed first, in this order
BRIEF_SCORES = tuple(score.name for score in SCORES if score.is_brief)
_BATCH_CAPTIONS = 1 << 18
_MAX_TIME_MS = 1e15  # upper limit for times, longer than any video
# Distinct video IDs, the video of each chunk, and the other columns of the chunks.
_Rows = tuple[pa.Array, NDArray[np.int32], pa.Table]


@dataclass(frozen=True)
class Hole:
    """A shard that is at least partly unreadable. `split` and `num_chunks` are None if its commit is damaged."""

    shard_id: int
    split: str | None
    num_chunks: int | None
    reason: str


@dataclass(frozen=True)
class Chunks:
    """Chunks ordered by video and start. Each array except `video_ids` has one entry per chunk.

    Attributes:
        video_ids: Distinct video IDs.
        video: Video of each chunk, as an index into `video_ids`, in ascending order.
        start_ms: Start of each chunk in its video.
        duration_s: Duration of each chunk.
        size_bytes: Size of the MP4 file of each chunk or, for an indexed chunk, of its packets.
        split: Split of each chunk, as an index into `splits`.
        shard: Shard ID of each chunk.
        row: Row of each chunk in the index of its shard.
        holes: Shards that cannot be read, by shard ID.
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

    def key(self, index: int) -> str:
        """Return the key of the chunk at an index."""
        return chunk_key(self.video_ids[int(self.video[index])].as_py(), int(self.start_ms[index]))

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> "Chunks":
        """Return the chunks that `rows`, an array of indices or a mask, selects."""
        names = ("video", "start_ms", "duration_s", "size_bytes", "split", "shard", "row")
        arrays = {name: getattr(self, name)[rows] for name in names}
        return Chunks(video_ids=self.video_ids, splits=self.splits, holes=self.holes, **arrays)

    def select(self, where: str, data_dir: Path) -> "Chunks":
        """Return the chunks that the expression `where` selects.

        Raises:
            UserError: `where` is not a valid expression for chunks, or selects no chunk.
        """
        condition = parse_where(where, data_dir=data_dir)
        condition.require(("chunk", "video", "label"), because="the page shows chunks")
        is_kept = selected_chunks(
            condition, data_dir, video_ids=self.video_ids, video_row=self.video, start_ms=self.start_ms
        )
        if not is_kept.any():
            raise UserError(
                f"--where '{condition.text}' matches none of the {len(self):,} chunks",
                hint="use a less restrictive condition",
            )
        return self.take(is_kept)


def read_chunks(variant: Variant) -> Chunks:
    """Read the chunks of a variant from its merged table or, if the table cannot be used, from the readable indexes.

    Raises:
        UserError: No shard can be read.
    """
    holes = {
        shard_id: Hole(shard_id, None, None, reason)
        if (commit := variant.commits.get(shard_id)) is None
        else Hole(shard_id, commit.split, commit.files.num_samples if commit.files else 0, reason)
        for shard_id, (_, reason) in problems_of(variant).items()
    }
    split_of = {commit.shard_id: commit.split for commit in variant.commits.values() if commit.files is not None}
    rows = None
    if len(holes) < len(split_of) + len(variant.damaged):
        with suppress(Damaged, OSError):  # the indexes have the same content
            merged_rows = read_chunk_rows(variant, columns=("video_id", *_COLUMNS))
            rows = _sort_rows(*merged_rows.dictionary_codes("video_id"), merged_rows.table)
    if rows is None:
        rows = _read_indexes(variant, holes)
    if rows is None:
        raise UserError(f"no readable shards in {variant.directory}", hint="run `prep verify` to find what is damaged")
    video_ids, video, table = rows
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


def _sort_rows(ids: pa.Array, codes: NDArray[np.int32], table: pa.Table) -> _Rows:
    """Sort the chunks by video, in the order of `ids`, and then by start; `ids` may contain duplicates."""
    encoded_ids = ids.dictionary_encode()
    video = encoded_ids.indices.to_numpy()[codes]
    order = order_of(video, table["start_ms"].to_numpy())
    rows = slice(None) if order is None else order
    table = table.select(_COLUMNS)
    return encoded_ids.dictionary, video[rows], table if order is None else table.take(pa.array(order))


def _read_indexes(variant: Variant, holes: dict[int, Hole]) -> _Rows | None:
    """Read the chunks from all readable indexes; return None if there are none. Add unreadable shards to `holes`."""
    parts = []
    for shard in variant.shards():
        if not is_readable(shard):
            reason = "its index cannot be read"
            holes.setdefault(shard.shard_id, Hole(shard.shard_id, shard.split, shard.num_samples, reason))
            continue
        index = shard.index
        part = index.select(["video_id", "start_ms", "num_frames", "fps_num", "fps_den"])
        # The size of a chunk is the size of its file, or of its packets in the source file.
        if "mp4_size" in index.column_names:
            sizes = index["mp4_size"]
        else:
            sizes = pa.array([sum(packets) for packets in index["packet_size"].to_pylist()], pa.uint64())
        part = part.append_column("size", sizes)
        part = part.append_column("shard", pa.array(np.full(index.num_rows, shard.shard_id, np.int32)))
        part = part.append_column("row", pa.array(np.arange(index.num_rows, dtype=np.int32)))
        parts.append(part.replace_schema_metadata())
        shard.close()
    if not parts:
        return None
    rows = pa.concat_tables(parts)
    encoded_ids = rows["video_id"].combine_chunks().dictionary_encode()
    return _sort_rows(encoded_ids.dictionary, encoded_ids.indices.to_numpy(), rows)


def choose_chunks(chunks: Chunks, *, num_chunks: int) -> NDArray[np.int64]:
    """Return the rows of up to `num_chunks` chunks, evenly spaced in each split, in ascending order.

    Half of the chunks are divided equally among the splits, and the other half in proportion to the size of each split.
    Therefore even a validation split of one percent is included.
    """
    sizes = np.bincount(chunks.split, minlength=len(chunks.splits))
    total = min(num_chunks, len(chunks))
    equal_counts = np.minimum(sizes, total // (2 * max(1, int(np.count_nonzero(sizes)))))
    rest_sizes = sizes - equal_counts
    exact_counts = rest_sizes * (total - int(equal_counts.sum())) / max(1, int(rest_sizes.sum()))
    counts = equal_counts + np.floor(exact_counts).astype(np.int64)
    # The counts were rounded down. The splits with the largest remainders get the remaining chunks.
    remainder_order = np.argsort(np.floor(exact_counts) - exact_counts, kind="stable")
    counts[remainder_order[: total - int(counts.sum())]] += 1
    rows = [
        np.flatnonzero(chunks.split == split)[np.array(middle_items(range(int(sizes[split])), at_most=count), np.int64)]
        for split, count in enumerate(counts.tolist())
    ]
    return np.sort(np.concatenate(rows))


@dataclass(frozen=True)
class SplitTotal:
    """Totals of the chunks in a split."""

    name: str
    num_videos: int
    num_chunks: int
    seconds: float
    size_bytes: int


@dataclass(frozen=True)
class Distribution:
    """Histogram with its title and unit; `about` describes the values."""

    title: str
    unit: str
    about: str
    histogram: Histogram


@dataclass(frozen=True)
class ChunkScores:
    """Scores of chunks.

    Attributes:
        table: Table of scores.
        rows: Row of each chunk in the table; -1 for a chunk without scores.
    """

    table: pa.Table
    rows: NDArray[np.int64]

    def values(self, index: int) -> dict[str, float]:
        """Return the known scores of the chunk at an index."""
        row = int(self.rows[index])
        values = {name: self.table[name][row].as_py() for name in BRIEF_SCORES} if row >= 0 else {}
        return {name: float(value) for name, value in values.items() if value is not None}


def split_totals(chunks: Chunks) -> list[SplitTotal]:
    """Return the totals of each split that contains chunks."""
    totals = []
    for code, name in enumerate(chunks.splits):
        mask = chunks.split == code
        if mask.any():
            seconds, size_bytes = float(chunks.duration_s[mask].sum()), int(chunks.size_bytes[mask].sum())
            totals.append(SplitTotal(name, len(np.unique(chunks.video[mask])), int(mask.sum()), seconds, size_bytes))
    return totals


def scores_of(chunks: Chunks, data_dir: Path) -> ChunkScores | None:
    """Return the scores of chunks of the current variant; None if no chunk has scores.

    Raises:
        UserError: The table of scores is missing or cannot be used.
    """
    table = open_scores(data_dir, columns={"video_id", "start_ms", *BRIEF_SCORES}).table
    rows = find_chunks(table, video_ids=chunks.video_ids, video_row=chunks.video, start_ms=chunks.start_ms)
    return ChunkScores(table, rows) if (rows >= 0).any() else None


def model_captions_of(chunks: Chunks, data_dir: Path) -> dict[int, str]:
    """Return the generated captions from the column `captions`, by row of the chunk in `chunks`.

    Raises:
        UserError: The captions cannot be used.
    """
    table, _ = stored_rows(data_dir, CAPTIONS, ["caption_text"])
    rows = find_chunks(table, video_ids=chunks.video_ids, video_row=chunks.video, start_ms=chunks.start_ms)
    chunk_rows = np.flatnonzero(rows >= 0)
    texts = table["caption_text"].take(pa.array(rows[chunk_rows])).to_pylist()
    return dict(zip(chunk_rows.tolist(), texts, strict=True))


def labels_of(chunks: Chunks, chunk_rows: NDArray[np.int64], data_dir: Path) -> dict[int, tuple[tuple[str, str], ...]]:
    """Return the names and values of the labels on captions that overlap the chunks in `chunk_rows`, by row.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    label_rows = read_label_rows(data_dir)
    begin_s = chunks.start_ms[chunk_rows] / 1000
    spans = Spans(chunks.video[chunk_rows], begin_s, begin_s + chunks.duration_s[chunk_rows])
    part, caption = match_labels(label_rows, spans, video_ids=chunks.video_ids, must_cover=False)
    names = [name for name in label_rows.column_names if name.startswith(LABEL_PREFIX)]
    labels_by_chunk: dict[int, dict[tuple[str, str], None]] = {}
    for row, chunk_row in zip(caption.tolist(), chunk_rows[part].tolist(), strict=True):
        for name in names if row >= 0 else ():
            if (value := label_rows[name][row].as_py()) is not None:
                labels_by_chunk.setdefault(chunk_row, {})[name.removeprefix(LABEL_PREFIX), value] = None
    return {chunk_row: tuple(labels) for chunk_row, labels in labels_by_chunk.items()}


def count_captions(chunks: Chunks, data_dir: Path) -> NDArray[np.int64]:
    """Count the captions in the manifest that overlap each chunk: int64 [chunks].

    The caption table is read in batches, because tens of millions of captions do not fit into memory.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    end_ms = chunks.start_ms + np.ceil(chunks.duration_s * 1000).astype(np.int64)
    moments = Moments.build(chunks.video, chunks.start_ms, end_ms)
    begin, end = (moments.numbers(chunks.video, times) for times in (chunks.start_ms, end_ms))
    change = np.zeros(len(chunks) + 1, np.int64)
    with closing(open_captions(data_dir, dictionary_columns=["video_id"])) as file:
        for batch in file.iter_batches(_BATCH_CAPTIONS, columns=["video_id", "begin_s", "end_s"]):
            ids = batch.column(0)
            video_rows = pc.fill_null(pc.index_in(ids.dictionary, value_set=chunks.video_ids), -1).to_numpy()
            video = video_rows[ids.indices.to_numpy()].astype(np.int64)
            times = (np.clip(batch.column(name).to_numpy() * 1000, 0, _MAX_TIME_MS) for name in (1, 2))
            begins, ends = (moments.numbers(video, time.astype(np.int64)) for time in times)
            first = np.searchsorted(end, begins, side="right")
            last = np.searchsorted(begin, ends, side="left")
            overlaps = (video >= 0) & (last > first)
            change += np.bincount(first[overlaps], minlength=len(change))
            change -= np.bincount(last[overlaps], minlength=len(change))
    return np.cumsum(change[:-1])


def distributions(
    chunks: Chunks, *, captions: NDArray[np.int64] | None, scores: ChunkScores | None
) -> list[Distribution]:
    """Return the distribution of each quantity that is known."""
    kbit_s = chunks.size_bytes * 8 / np.maximum(chunks.duration_s, 1e-3) / 1000
    known_distributions = [
        Distribution("Length", "s", "seconds of video in each chunk", histogram(chunks.duration_s)),
        Distribution("Bit rate", "kbit/s", "size of each chunk divided by its length", histogram(kbit_s)),
    ]
    if captions is not None and captions.any():
        about = "captions in the manifest that overlap each chunk"
        caption_histogram = histogram(captions.astype(np.float64), is_count=True)
        known_distributions.append(Distribution("Captions", "", about, caption_histogram))
    for score in SCORES:
        if scores is None or not score.sort_label:
            continue
        values = scores.table[score.name].to_numpy()[scores.rows[scores.rows >= 0]].astype(np.float64)
        values = values[~np.isnan(values)]
        if len(values):
            about = f"score of {count_noun(len(values), 'chunk')}, {score.meaning}"
            score_histogram = histogram(values, bounds=score.bounds, is_count=score.is_count)
            known_distributions.append(Distribution(score.title, "", about, score_histogram))
    return known_distributions
