"""The numbers at the top of a page: totals by split, and distributions of length, bit rate, captions and scores."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import open_captions
from clipmill.prep.video.page.chunks import Chunks
from clipmill.shards.chunk_table import Moments
from clipmill.shards.columns import CAPTIONS
from clipmill.shards.pages.figures import Histogram, histogram
from clipmill.shards.score_fields import SCORES
from clipmill.shards.scores import open_scores
from clipmill.shards.selection import Spans, find_chunks, match_labels, read_labelled, stored_rows

BRIEF = tuple(score.name for score in SCORES if score.is_brief)
_BATCH_CAPTIONS = 1 << 18
_LONGEST_MS = 1e15  # longer than any video


@dataclass(frozen=True)
class SplitTotal:
    """The chunks of a split."""

    name: str
    num_videos: int
    num_chunks: int
    seconds: float
    size_bytes: int


@dataclass(frozen=True)
class Distribution:
    """A histogram with its name and unit; `about` says what its values are."""

    title: str
    unit: str
    about: str
    histogram: Histogram


@dataclass(frozen=True)
class ChunkScores:
    """The scores of chunks: `rows` are their rows in the table of scores, -1 for those that have none."""

    table: pa.Table
    rows: NDArray[np.int64]

    def of(self, number: int) -> dict[str, float]:
        """Return the known scores of a chunk."""
        row = int(self.rows[number])
        values = {name: self.table[name][row].as_py() for name in BRIEF} if row >= 0 else {}
        return {name: float(value) for name, value in values.items() if value is not None}

    def known(self, name: str) -> NDArray[np.float64]:
        """Return the known values of a score."""
        values = self.table[name].to_numpy()[self.rows[self.rows >= 0]].astype(np.float64)
        return values[~np.isnan(values)]


def split_totals(chunks: Chunks) -> list[SplitTotal]:
    """Return the totals of each split that has chunks."""
    totals = []
    for code, name in enumerate(chunks.splits):
        mine = chunks.split == code
        if mine.any():
            seconds, size_bytes = float(chunks.duration_s[mine].sum()), int(chunks.size_bytes[mine].sum())
            totals.append(SplitTotal(name, len(np.unique(chunks.video[mine])), int(mine.sum()), seconds, size_bytes))
    return totals


def scores_of(chunks: Chunks, data_dir: Path) -> ChunkScores | None:
    """Return the scores of chunks of the current variant.

    Raises:
        UserError: there are none, or they cannot be used.
    """
    table = open_scores(data_dir, columns={"video_id", "start_ms", *BRIEF}).table
    rows = find_chunks(table, video_ids=chunks.video_ids, video_row=chunks.video, start_ms=chunks.start_ms)
    return ChunkScores(table, rows) if (rows >= 0).any() else None


def written_of(chunks: Chunks, data_dir: Path) -> dict[int, str]:
    """Return the captions of the column `captions` by the number of their chunk.

    Raises:
        UserError: they cannot be used.
    """
    table, _ = stored_rows(data_dir, CAPTIONS, ["caption_text"])
    rows = find_chunks(table, video_ids=chunks.video_ids, video_row=chunks.video, start_ms=chunks.start_ms)
    numbers = np.flatnonzero(rows >= 0)
    texts = table["caption_text"].take(pa.array(rows[numbers])).to_pylist()
    return dict(zip(numbers.tolist(), texts, strict=True))


def labels_of(chunks: Chunks, numbers: NDArray[np.int64], data_dir: Path) -> dict[int, tuple[str, ...]]:
    """Return the labels of the captions that overlap some chunks, such as "success true", by the number of the chunk.

    Raises:
        UserError: there is no manifest, or it is damaged.
    """
    labelled = read_labelled(data_dir)
    begin_s = chunks.start_ms[numbers] / 1000
    spans = Spans(chunks.video[numbers], begin_s, begin_s + chunks.duration_s[numbers])
    part, caption = match_labels(labelled, spans, video_ids=chunks.video_ids, covering=False)
    names = [name for name in labelled.column_names if name.startswith(LABEL_PREFIX)]
    labels_by_chunk: dict[int, dict[str, None]] = {}
    for row, number in zip(caption.tolist(), numbers[part].tolist(), strict=True):
        for name in names if row >= 0 else ():
            if (value := labelled[name][row].as_py()) is not None:
                labels_by_chunk.setdefault(number, {})[f"{name.removeprefix(LABEL_PREFIX)} {value}"] = None
    return {number: tuple(labels) for number, labels in labels_by_chunk.items()}


def num_captions(chunks: Chunks, data_dir: Path) -> NDArray[np.int64]:
    """Return how many captions of the manifest overlap each chunk, int64 [chunks].

    The table of captions is read in batches: tens of millions of captions are not held.

    Raises:
        UserError: there is no manifest, or it is damaged.
    """
    end_ms = chunks.start_ms + np.ceil(chunks.duration_s * 1000).astype(np.int64)
    moments = Moments.of(chunks.video, chunks.start_ms, end_ms)
    begin, end = (moments.numbers(chunks.video, times) for times in (chunks.start_ms, end_ms))
    change = np.zeros(len(chunks) + 1, np.int64)
    with closing(open_captions(data_dir, coded=["video_id"])) as file:
        for batch in file.iter_batches(_BATCH_CAPTIONS, columns=["video_id", "begin_s", "end_s"]):
            coded = batch.column(0)
            known = pc.fill_null(pc.index_in(coded.dictionary, value_set=chunks.video_ids), -1).to_numpy()
            video = known[coded.indices.to_numpy()].astype(np.int64)
            times = (np.clip(batch.column(name).to_numpy() * 1000, 0, _LONGEST_MS) for name in (1, 2))
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
    """Return the distributions that are known."""
    found = [
        Distribution("Length", "s", "seconds of video in each chunk", histogram(chunks.duration_s)),
        Distribution("Bit rate", "kbit/s", "size of each MP4 file by its length", histogram(chunks.bits_per_s / 1000)),
    ]
    if captions is not None and captions.any():
        about = "captions of the manifest that overlap each chunk"
        found.append(Distribution("Captions", "", about, histogram(captions.astype(np.float64), is_count=True)))
    for score in SCORES:
        if scores is not None and score.order and len(known := scores.known(score.name)):
            about = f"score of {count_noun(len(known), 'chunk')}, {score.meaning}"
            shown = histogram(known, bounds=score.bounds, is_count=score.is_count)
            found.append(Distribution(score.title, "", about, shown))
    return found
