"""Plan of a column with one sample per chunk: shard N contains the chunks of shard N of `video`.

The shards of such a column (`latents`, `scores`, `captions`) have the IDs, splits and keys of the shards of `video`. A
plan covers the shards of `video` that are committed at that time, so planning is possible while `prep chunk` is
running.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.prep.core.chunk_input import (
    FINGERPRINT_COLUMNS,
    Chunk,
    ChunkLength,
    NextChunk,
    NextChunks,
    chunk_fingerprints,
    chunks_of_shard,
)
from clipmill.prep.core.failure_list import shard_name
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.plan import NUM_CHECK_THREADS, ShardPlan, ShardState, WantedShard, plan_shards, stored_shards
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.variants import WHERE
from clipmill.shards.columns import VIDEO, how_to_make
from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.index import open_index
from clipmill.shards.opening import Damaged, DamagedIndex
from clipmill.shards.selection import empty_selection_error, selected_chunks
from clipmill.shards.where import Where, parse_where

# Reason why there is nothing to do for a column with one sample per chunk.
NO_CHUNKS = "there are no committed chunks yet; `prep status` shows the command that makes them"
_COLUMNS = [*FINGERPRINT_COLUMNS, "key", "video_id", "num_frames", "fps_num", "fps_den"]


HasSample = Callable[[ChunkLength], bool]


@dataclass(frozen=True)
class ChunkShard:
    """Facts that a plan needs about the chunks in one shard of `video`.

    Attributes:
        shard_id: ID of the shard.
        split: Split of the shard.
        fingerprint: Hash of the keys and contents of the chunks. Captions do not affect the hash.
        num_chunks: Number of chunks that get a sample.
        lengths: Number of selected chunks of each length, including chunks that get no sample.
        video_ids: Unique IDs of the videos. A long video spans several shards.
        rows: Rows of the chunks that get a sample; None for all rows.
        next_chunks: Next chunks, if samples also depend on them; otherwise empty.
    """

    shard_id: int
    split: str
    fingerprint: str
    num_chunks: int
    lengths: Counter[ChunkLength]
    video_ids: pa.Array
    rows: tuple[int, ...] | None = None
    next_chunks: NextChunks = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Total duration of the chunks in seconds."""
        return float(sum(length.seconds * count for length, count in self.lengths.items()))

    @property
    def longest_s(self) -> Fraction:
        """Duration of the longest chunk in seconds."""
        return max((length.seconds for length in self.lengths), default=Fraction(0))

    def wanted_shard(self, *, recipe_fingerprint: str) -> WantedShard:
        """Return the shard that should be made from these chunks with a recipe."""
        text = f"{recipe_fingerprint} {self.split} {self.fingerprint}"
        return WantedShard(self.shard_id, self.split, hashlib.sha256(text.encode()).hexdigest(), self.num_chunks)


def current_chunks(data_dir: Path) -> str:
    """Return the name of the current variant of `video`.

    Raises:
        UserError: The data folder has no chunks.
    """
    video = current_variant(data_dir, VIDEO)
    if video is None:
        hint = f"run {how_to_make(VIDEO, data_dir)} to create chunks first"
        raise UserError(f"{data_dir} has no chunks", hint=hint)
    return video


def read_chunk_shards(
    video_dir: Path,
    commits: Iterable[Commit],
    *,
    row_selection: Mapping[int, tuple[int, ...]] | None = None,
    next_chunks: Mapping[int, NextChunks] | None = None,
    has_sample: HasSample | None = None,
) -> tuple[list[ChunkShard], dict[int, Failure]]:
    """Read the committed shards of `video`.

    Args:
        row_selection: Selected rows of each shard, keyed by shard ID; None for all rows. Shards without selected rows
            are omitted.
        next_chunks: Next chunks of each shard, keyed by shard ID; None if samples do not depend on them.
        has_sample: Function that takes the length of a chunk and returns True if the chunk gets a sample; None if all
            chunks get one.

    Returns:
        List of shards, and the failure of each shard with an unreadable index, keyed by shard ID.
    """
    shards, unreadable = [], {}
    with ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        results = pool.map(
            lambda commit: _read_chunk_shard(
                video_dir,
                commit,
                rows=None if row_selection is None else row_selection.get(commit.shard_id, ()),
                next_chunks=None if next_chunks is None else next_chunks.get(commit.shard_id, {}),
                has_sample=has_sample,
            ),
            commits,
        )
        for result in results:
            if isinstance(result, ChunkShard):
                shards.append(result)
            elif result is not None:
                shard_id, failure = result
                unreadable[shard_id] = failure
    return shards, unreadable


def _read_chunk_shard(
    video_dir: Path,
    commit: Commit,
    *,
    rows: tuple[int, ...] | None,
    next_chunks: NextChunks | None,
    has_sample: HasSample | None,
) -> ChunkShard | tuple[int, Failure] | None:
    if commit.files is None:
        return None
    path = video_dir / commit.files.index
    try:
        # A plan reads only a few columns of each index. The worker, which reads complete indexes, verifies checksums.
        index = open_index(path, columns=_COLUMNS)
        if not pc.min(index["fps_den"]).as_py():
            raise DamagedIndex(path, "the denominator of a frame rate is 0")
    except (DamagedIndex, OSError) as error:
        # Plan the other shards, even if one is unreadable.
        return commit.shard_id, Failure(shard_name(commit.shard_id), None, str(FailureCode.CHUNK_DAMAGED), str(error))
    if rows is not None and not rows:
        return None
    index = index if rows is None else index.take(pa.array(rows))
    lines = zip(index["key"].to_pylist(), chunk_fingerprints(index), strict=True)
    digest = hashlib.sha256("\n".join(map(" ".join, lines)).encode()).hexdigest()
    all_rows, successors = range(index.num_rows) if rows is None else rows, next_chunks or {}
    if next_chunks is not None:
        next_contents = "".join(successors[row].content if row in successors else "-" for row in all_rows)
        digest = hashlib.sha256(f"{digest}{next_contents}".encode()).hexdigest()
    # Most chunks have one of a few lengths, so call `has_sample` only once per length.
    columns = [index[name].to_pylist() for name in ("num_frames", "fps_num", "fps_den")]
    length_keys = [*zip(*columns, (row in successors for row in all_rows), strict=True)]
    counts = Counter(length_keys)
    lengths = {key: ChunkLength(key[0], Fraction(key[1], key[2]), key[3]) for key in counts}
    if has_sample is not None:
        is_sampled = {key: has_sample(length) for key, length in lengths.items()}
        rows = tuple(row for row, key in zip(all_rows, length_keys, strict=True) if is_sampled[key])
    return ChunkShard(
        shard_id=commit.shard_id,
        split=commit.split,
        fingerprint=digest,
        num_chunks=index.num_rows if rows is None else len(rows),
        lengths=Counter({lengths[key]: count for key, count in counts.items()}),
        video_ids=index["video_id"].unique(),
        rows=rows,
        next_chunks={row: successors[row] for row in all_rows if row in successors},
    )


_FINGERPRINT_DTYPE = "S32"  # NumPy dtype of a chunk fingerprint


class ShardLookup:
    """Lookup table from chunk fingerprints to the shards that have data about these chunks, such as old samples.

    Args:
        fingerprints: Pairs of a shard ID and the fingerprints of the chunks that the shard has data about.
    """

    def __init__(self, fingerprints: Iterable[tuple[int, Sequence[str | bytes]]]) -> None:
        pairs = [(shard_id, np.array(hashes, _FINGERPRINT_DTYPE)) for shard_id, hashes in fingerprints if len(hashes)]
        digits = np.concatenate([np.empty(0, _FINGERPRINT_DTYPE), *(hashes for _, hashes in pairs)])
        shard_ids = np.repeat([shard_id for shard_id, _ in pairs], [len(hashes) for _, hashes in pairs])
        order = np.argsort(digits, kind="stable")
        self._digits, self._shard_ids = digits[order], shard_ids[order]

    def __len__(self) -> int:
        return len(self._digits)

    def find(self, fingerprints: Sequence[str]) -> list[int]:
        """Return the IDs of the shards that have data about any of the chunks, in ascending order."""
        digits = np.array(fingerprints, _FINGERPRINT_DTYPE)
        starts, ends = (np.searchsorted(self._digits, digits, side) for side in ("left", "right"))
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        return sorted({shard_id for start, end in pairs for shard_id in self._shard_ids[start:end].tolist()})


@dataclass(frozen=True)
class ChunksPlan:
    """Plan of a column with one sample per chunk, and the inputs of the plan.

    Attributes:
        recipe: Recipe of the variant.
        data_dir: Data folder.
        variant_dir: Folder of the variant.
        video_dir: Folder of the `video` variant with the chunks.
        video_commits: Commits of the `video` variant, keyed by shard ID.
        commits: Commits of the variant, keyed by shard ID.
        shards: Planned shards, in the order of their IDs.
        chunk_shards: Shards of `video` whose chunks get samples, keyed by shard ID.
        num_videos: Number of videos with at least one chunk that the settings select.
        unreadable: Failures of shards of `video` that cannot be planned because their index is unreadable.
    """

    recipe: Recipe[Any]
    data_dir: Path
    variant_dir: Path
    video_dir: Path
    video_commits: dict[int, Commit]
    commits: dict[int, Commit]
    shards: list[ShardPlan]
    chunk_shards: dict[int, ChunkShard]
    num_videos: int
    unreadable: list[Failure]

    @property
    def num_chunks(self) -> int:
        """Number of chunks that get a sample."""
        return sum(shard.num_chunks for shard in self.shards)

    def video_ids(self, shard: ShardPlan) -> list[str]:
        """Return the IDs of the videos in a shard."""
        ids: list[str] = self.chunk_shards[shard.shard_id].video_ids.to_pylist()
        return ids

    def chunks(self, shard_id: int) -> list[Chunk]:
        """Return the chunks of a shard of `video`, in row order.

        Raises:
            Damaged: An index cannot be read.
            FileNotFoundError: An index is missing.
        """
        next_chunks = self.chunk_shards[shard_id].next_chunks
        return chunks_of_shard(self.video_dir, shard_id, commits=self.video_commits, next_chunks=next_chunks)

    def old_commits(self, shard_id: int) -> tuple[Commit, ...]:
        """Return the commits that may contain samples for a shard: its own, and commits of shards that lost chunks."""
        committed_ids = [shard_id] if shard_id in self.commits else []
        source_ids = self.find_shards(shard_id, self._lost_samples_lookup)
        return tuple(self.commits[other] for other in dict.fromkeys([*committed_ids, *source_ids]))

    def find_shards(self, shard_id: int, lookup: ShardLookup) -> list[int]:
        """Return the IDs of the shards that, according to `lookup`, have data about the chunks of a shard."""
        if len(lookup):
            with suppress(Damaged, OSError):  # the worker reports unreadable indexes
                return lookup.find([chunk.fingerprint for chunk in self.chunks(shard_id)])
        return []

    @cached_property
    def _lost_samples_lookup(self) -> ShardLookup:
        """Lookup table of the stored samples in shards whose chunks may have moved to other shards."""
        states = (ShardState.CHANGED, ShardState.ORPHANED, ShardState.MISSING, ShardState.CORRUPT)
        fingerprints: list[tuple[int, list[str]]] = []
        for shard in self.shards:
            commit = self.commits.get(shard.shard_id)
            if shard.state in states and commit is not None and commit.files is not None:
                with suppress(DamagedIndex, OSError):  # samples that cannot be read are made again
                    index = open_index(self.variant_dir / commit.files.index, columns=["chunk_fingerprint"])
                    fingerprints.append((shard.shard_id, index["chunk_fingerprint"].to_pylist()))
        return ShardLookup(fingerprints)


def plan_chunks(
    data_dir: Path,
    recipe: Recipe[Any],
    *,
    retry_codes: frozenset[str] = frozenset(),
    reads_next: bool = False,
    has_sample: HasSample | None = None,
) -> ChunksPlan:
    """Plan the shards of a column from the committed shards of the recipe's `video` variant.

    Args:
        retry_codes: Codes of failures to retry even if nothing has changed.
        reads_next: True if samples also depend on the next chunks.
        has_sample: Function that takes the length of a chunk and returns True if the chunk gets a sample; None if all
            chunks get one.

    Raises:
        UserError: `where` in the settings is invalid, selects no chunk, or uses values that some chunks lack.
    """
    column, where = recipe.values["column"], getattr(recipe.settings, WHERE, None)
    video_dir = variant_dir(data_dir, VIDEO, recipe.video)
    folder = variant_dir(data_dir, column, recipe.variant)
    video, stored = read_commits(video_dir), stored_shards(folder)
    row_selection = None
    if where is not None:
        row_selection = selected_rows(
            data_dir, video_dir, video.commits.values(), parse_where(where, data_dir=data_dir), column=column
        )
    chunk_shards, unreadable = read_chunk_shards(
        video_dir,
        video.commits.values(),
        row_selection=row_selection,
        next_chunks=find_next_chunks(video_dir, video.commits) if reads_next else None,
        has_sample=has_sample,
    )
    # The content of these shards of `video` is unknown, so keep the samples that are stored for them.
    unreadable_ids = {damaged.shard_id for damaged in video.damaged} | unreadable.keys()
    fingerprint = recipe.fingerprint
    shards = plan_shards(
        (shard.wanted_shard(recipe_fingerprint=fingerprint) for shard in chunk_shards),
        stored.without(unreadable_ids),
        what_changed="its chunks",
        orphaned_because="the chunks are no longer in the video column"
        if where is None
        else "none of its chunks is selected",
        retry_codes=retry_codes,
    )
    return ChunksPlan(
        recipe=recipe,
        data_dir=data_dir,
        variant_dir=folder,
        video_dir=video_dir,
        video_commits=video.commits,
        commits=stored.commits,
        shards=list(shards),
        chunk_shards={shard.shard_id: shard for shard in chunk_shards},
        num_videos=len(pa.chunked_array([shard.video_ids for shard in chunk_shards], pa.string()).unique()),
        unreadable=list(unreadable.values()),
    )


def selected_rows(
    data_dir: Path, video_dir: Path, commits: Iterable[Commit], where: Where, *, column: str
) -> dict[int, tuple[int, ...]]:
    """Return the rows of the selected chunks, keyed by shard ID, for all shards with a readable index."""
    because = f"prep {column} selects chunks, regardless of their captions"
    where.require(("chunk", "video", "label"), because=because)
    ids, starts, shard_ids, sizes = [], [], [], []
    for commit in commits:
        with suppress(DamagedIndex, OSError):  # reported by `read_chunk_shards`
            if commit.files is not None:
                index = open_index(video_dir / commit.files.index, columns=["video_id", "start_ms"])
                ids.append(index["video_id"].combine_chunks())
                starts.append(index["start_ms"].to_numpy())
                shard_ids.append(commit.shard_id)
                sizes.append(index.num_rows)
    if not sizes:
        return {}
    id_column = pa.chunked_array(ids).dictionary_encode().combine_chunks()
    is_selected = selected_chunks(
        where,
        data_dir,
        video_ids=id_column.dictionary,
        video_row=id_column.indices.to_numpy(),
        start_ms=np.concatenate(starts),
    )
    if not is_selected.any():
        raise empty_selection_error(where, what=count_noun(len(is_selected), "chunk"))
    masks = np.split(is_selected, np.cumsum(sizes)[:-1])
    return {shard_id: tuple(np.flatnonzero(mask).tolist()) for shard_id, mask in zip(shard_ids, masks, strict=True)}


_NUMERIC_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den", "width", "height")
_NEXT_COLUMNS = [*FINGERPRINT_COLUMNS, "video_id", *_NUMERIC_COLUMNS]


def find_next_chunks(video_dir: Path, commits: Mapping[int, Commit]) -> dict[int, NextChunks]:
    """Find the next chunk of each chunk: the chunk that follows without a gap, with the same resolution.

    The next chunk may be in a different shard. It may also be missing, because encoding failed or `prep chunk` is still
    running. The sample of the preceding chunk is then made as if the video ended there, and is made again once the
    next chunk exists.

    Returns:
        Next chunks, keyed by the shard ID and then by the row of the preceding chunk.
    """
    indexes: dict[int, pa.Table] = {}
    for shard_id, commit in commits.items():
        with suppress(DamagedIndex, OSError):  # reported by `read_chunk_shards`
            if commit.files is not None:
                indexes[shard_id] = open_index(video_dir / commit.files.index, columns=_NEXT_COLUMNS)
    if not indexes:
        return {}
    contents = {shard_id: chunk_fingerprints(index) for shard_id, index in indexes.items()}
    video = pa.chunked_array([index["video_id"].combine_chunks() for index in indexes.values()])
    video_row = video.dictionary_encode().combine_chunks().indices.to_numpy()
    columns = {
        name: np.concatenate([index[name].to_numpy() for index in indexes.values()]).astype(np.int64)
        for name in _NUMERIC_COLUMNS
    }
    shard = np.repeat([*indexes], [len(index) for index in indexes.values()])
    row = np.concatenate([np.arange(len(index)) for index in indexes.values()])
    # If the chunks are sorted by video and time, only the following chunk can be the next chunk.
    order = np.lexsort((columns["start_ms"], video_row))
    chunks, successors = order[:-1], order[1:]
    # Allow a gap of up to one frame, plus a millisecond because both times are rounded.
    max_step_ms = (columns["num_frames"] + 1) * 1000 * columns["fps_den"] // columns["fps_num"] + 1
    is_next = (video_row[chunks] == video_row[successors]) & (
        columns["start_ms"][successors] - columns["start_ms"][chunks] <= max_step_ms[chunks]
    )
    for name in ("width", "height"):
        is_next &= columns[name][chunks] == columns[name][successors]
    next_chunks: dict[int, dict[int, NextChunk]] = {}
    for chunk, successor in zip(chunks[is_next].tolist(), successors[is_next].tolist(), strict=True):
        shard_id, next_row = int(shard[successor]), int(row[successor])
        next_chunk = NextChunk(shard_id, next_row, contents[shard_id][next_row])
        next_chunks.setdefault(int(shard[chunk]), {})[int(row[chunk])] = next_chunk
    return {**next_chunks}
