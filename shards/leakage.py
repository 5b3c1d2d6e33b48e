"""Leakage: pairs of chunks of different splits that look alike (clipmill.shards.look_alikes).

It is computed from the merged scores and the splits of the manifest, for the chunks that look like one of another video
at all.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.quoting import count_noun
from clipmill.manifests.store import read_videos
from clipmill.shards.columns import SCORES
from clipmill.shards.dataset import current_variant
from clipmill.shards.look_alikes import first_of_each_part
from clipmill.shards.scores import open_scores

MAX_PAIRS = 1000
_MAX_SHOWN = 3
_FIRST = ("train", "val", "test")


@dataclass(frozen=True)
class Pair:
    """A chunk and the first chunk of another split that looks like it."""

    split: str
    key: str
    other_split: str
    other_key: str


@dataclass(frozen=True)
class Leakage:
    """Pairs of chunks of different splits that look alike.

    Attributes:
        counts: (split, other split) -> number of chunks of the first that look like a chunk of the second; `train`
            comes second.
        pairs: the first of them, at most MAX_PAIRS of each.
        unknown_because: why there are no scores to tell by, or None.
    """

    counts: dict[tuple[str, str], int]
    pairs: list[Pair]
    unknown_because: str | None = None

    def values(self) -> dict[str, Any]:
        """Return JSON values."""
        counts = [{"split": split, "other_split": other, "num": num} for (split, other), num in self.counts.items()]
        pairs = [asdict(pair) for pair in self.pairs]
        return {"unknown_because": self.unknown_because, "counts": counts, "pairs": pairs}

    def lines(self) -> list[str]:
        """Return the lines of `prep status`."""
        if self.unknown_because is not None:
            return [f"leakage   unknown: {self.unknown_because}"]
        lines = []
        for (split, other), count in self.counts.items():
            verb = "looks" if count == 1 else "look"
            lines.append(
                f"leakage   {count_noun(count, 'chunk')} of split {split} {verb} like a chunk of split {other}"
            )
            mine = [pair for pair in self.pairs if (pair.split, pair.other_split) == (split, other)]
            lines += [f"          {pair.key} looks like {pair.other_key}" for pair in mine[:_MAX_SHOWN]]
            if count > _MAX_SHOWN:
                lines.append(f"          ... and {count - _MAX_SHOWN:,} more (--json)")
        return lines


def find_leakage(data_dir: Path) -> Leakage | None:
    """Find the pairs; None if the data folder has no scores.

    Raises:
        UserError: a record of the data folder is damaged.
    """
    if current_variant(data_dir, SCORES) is None:
        return None
    try:
        table, part, names = _look_alikes(data_dir)
    except UserError as error:
        return Leakage({}, [], unknown_because=str(error))
    first = first_of_each_part(table["phash"].to_numpy(), part, num_parts=len(names))
    counts: dict[tuple[str, str], int] = {}
    pairs: list[Pair] = []
    for number, name in enumerate(names):
        for other, other_name in enumerate(names[:number]):
            leaking = np.flatnonzero((part == number) & (first[:, other] >= 0))
            if len(leaking):
                counts[name, other_name] = len(leaking)
                for row in leaking[:MAX_PAIRS].tolist():
                    pairs.append(Pair(name, _key(table, row), other_name, _key(table, int(first[row, other]))))
    return Leakage(counts, pairs)


def keys_alike(data_dir: Path, *, split: str, other_split: str) -> set[str]:
    """Keys of the chunks of a split that look like a chunk of another one.

    Raises:
        UserError: there are no scores, or they cannot be used.
    """
    table, part, names = _look_alikes(data_dir)
    if not {split, other_split} <= set(names):
        return set()
    first = first_of_each_part(table["phash"].to_numpy(), part, num_parts=len(names))
    alike = (part == names.index(split)) & (first[:, names.index(other_split)] >= 0)
    return {_key(table, row) for row in np.flatnonzero(alike).tolist()}


def _look_alikes(data_dir: Path) -> tuple[pa.Table, NDArray[np.integer], list[str]]:
    """The chunks that look like one of another video, the split of each as an index, and the splits they have."""
    table = open_scores(data_dir, columns=["video_id", "start_ms", "phash", "has_look_alike"]).table
    table = table.filter(table["has_look_alike"])
    videos = read_videos(data_dir)
    rows = pc.index_in(table["video_id"].cast(pa.string()), value_set=videos["video_id"].combine_chunks())
    known = pc.is_valid(rows)
    table, split = table.filter(known), videos["split"].take(rows.filter(known))
    found = set(split.unique().to_pylist())
    names = [*(name for name in _FIRST if name in found), *sorted(found.difference(_FIRST))]
    return table, np.asarray(pc.index_in(split, value_set=pa.array(names, pa.string()))), names


def _key(table: pa.Table, row: int) -> str:
    return chunk_key(table["video_id"][row].as_py(), table["start_ms"][row].as_py())
