"""The plan of a column with one sample for each chunk: shard N holds the chunks of shard N of `video`.

It covers the shards of `video` committed so far, even while `prep chunk` is running; a later plan covers the rest.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.formatting import count_noun
from clipmill.prep.core.chunk_input import Chunk, chunks_of_shard
from clipmill.prep.core.chunk_shards import ChunkShard, HasSample, read_chunk_shards
from clipmill.prep.core.next_chunks import next_chunks
from clipmill.prep.core.plan import ShardPlan, ShardState, plan_shards, stored_shards
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.selection import WHERE
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit, Failure, read_commits
from clipmill.shards.dataset import variant_dir
from clipmill.shards.index import open_index
from clipmill.shards.opening import Damaged, DamagedIndex
from clipmill.shards.selection import empty_selection_error, selected_chunks
from clipmill.shards.where import Where, parse_where

_DIGITS = "S32"  # of the fingerprint of a chunk


class Holders:
    """Shards that hold something about chunks, by the fingerprints of these chunks.

    Args:
        fingerprints: (Shard id, fingerprints of the chunks that it holds something about).
    """

    def __init__(self, fingerprints: Iterable[tuple[int, Sequence[str | bytes]]]) -> None:
        pairs = [(shard_id, np.array(of_shard, _DIGITS)) for shard_id, of_shard in fingerprints if len(of_shard)]
        digits = np.concatenate([np.empty(0, _DIGITS), *(of_shard for _, of_shard in pairs)])
        shard_ids = np.repeat([shard_id for shard_id, _ in pairs], [len(of_shard) for _, of_shard in pairs])
        order = np.argsort(digits, kind="stable")
        self._digits, self._shard_ids = digits[order], shard_ids[order]

    def __len__(self) -> int:
        return len(self._digits)

    def of(self, fingerprints: Sequence[str]) -> list[int]:
        """Return the shards that hold something about any of the chunks, ascending."""
        wanted = np.array(fingerprints, _DIGITS)
        begins, ends = (np.searchsorted(self._digits, wanted, side) for side in ("left", "right"))
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        return sorted({shard_id for begin, end in pairs for shard_id in self._shard_ids[begin:end].tolist()})


@dataclass(frozen=True)
class ChunksPlan:
    """A plan and its inputs.

    Attributes:
        shards: the shards, in order of their ids.
        chunk_shards: shards of `video` whose samples are wanted, by shard id.
        num_videos: number of videos with committed chunks.
        unreadable: shards of `video` that cannot be planned because their index is unreadable.
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
        """Number of chunks whose samples are wanted."""
        return sum(shard.num_chunks for shard in self.shards)

    def video_ids(self, shard: ShardPlan) -> list[str]:
        """Return the ids of the videos in a shard."""
        ids: list[str] = self.chunk_shards[shard.shard_id].video_ids.to_pylist()
        return ids

    def chunks(self, shard_id: int) -> list[Chunk]:
        """Return the chunks of a shard of `video`, by row.

        Raises:
            Damaged: An index cannot be read.
            FileNotFoundError: An index is missing.
        """
        following = self.chunk_shards[shard_id].following
        return chunks_of_shard(self.video_dir, shard_id, commits=self.video_commits, following=following)

    def old_commits(self, shard_id: int) -> tuple[Commit, ...]:
        """Return the commits that may hold samples of a shard: its own, and others that its chunks have left."""
        own = [shard_id] if shard_id in self.commits else []
        return tuple(self.commits[other] for other in dict.fromkeys([*own, *self.holding(shard_id, self._left)]))

    def holding(self, shard_id: int, holders: Holders) -> list[int]:
        """Return which of the holders hold something about chunks of a shard."""
        if len(holders):
            with suppress(Damaged, OSError):  # the worker names an index that cannot be read
                return holders.of([chunk.fingerprint for chunk in self.chunks(shard_id)])
        return []

    @cached_property
    def _left(self) -> Holders:
        """The samples of the shards that may have lost chunks to others."""
        states = (ShardState.CHANGED, ShardState.ORPHANED, ShardState.MISSING, ShardState.CORRUPT)
        shard_ids = [shard.shard_id for shard in self.shards if shard.state in states]
        return Holders((shard_id, self._stored_fingerprints(shard_id)) for shard_id in shard_ids)

    def _stored_fingerprints(self, shard_id: int) -> list[str]:
        commit = self.commits.get(shard_id)
        if commit is not None and commit.files is not None:
            with suppress(DamagedIndex, OSError):
                index = open_index(self.variant_dir / commit.files.index, columns=["chunk_fingerprint"])
                fingerprints: list[str] = index["chunk_fingerprint"].to_pylist()
                return fingerprints
        return []


def plan_chunks(
    data_dir: Path,
    recipe: Recipe[Any],
    *,
    retry_codes: frozenset[str] = frozenset(),
    reads_next: bool = False,
    has_sample: HasSample | None = None,
) -> ChunksPlan:
    """Plan a recipe for the committed shards of its `video` variant in `data_dir`.

    Args:
        retry_codes: failure codes to try again even if nothing changed.
        reads_next: True if samples also depend on the next chunks.
        has_sample: which chunks get a sample; None for all.

    Raises:
        UserError: the condition of its settings selects nothing, or uses scores that chunks lack.
    """
    column, where = recipe.values["column"], getattr(recipe.settings, WHERE, None)
    video_dir = variant_dir(data_dir, VIDEO, recipe.video)
    folder = variant_dir(data_dir, column, recipe.variant)
    video, own = read_commits(video_dir), stored_shards(folder)
    chosen = None
    if where is not None:
        chosen = selected_rows(data_dir, video_dir, video.commits.values(), parse_where(where), column=column)
    chunk_shards, unreadable = read_chunk_shards(
        video_dir,
        video.commits.values(),
        chosen=chosen,
        following=next_chunks(video_dir, video.commits) if reads_next else None,
        has_sample=has_sample,
    )
    unknown = {damaged.shard_id for damaged in video.damaged} | unreadable.keys()
    fingerprint = recipe.fingerprint
    shards = plan_shards(
        (shard.wanted(recipe_fingerprint=fingerprint) for shard in chunk_shards),
        own.without(unknown),
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
        commits=own.commits,
        shards=list(shards),
        chunk_shards={shard.shard_id: shard for shard in chunk_shards},
        num_videos=len(pa.chunked_array([shard.video_ids for shard in chunk_shards], pa.string()).unique()),
        unreadable=list(unreadable.values()),
    )


def selected_rows(
    data_dir: Path, video_dir: Path, commits: Iterable[Commit], where: Where, *, column: str
) -> dict[int, tuple[int, ...]]:
    """Return the rows of the selected chunks of each shard whose index is readable."""
    because = f"prep {column} takes chunks, whatever captions they have"
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
    coded = pa.chunked_array(ids).dictionary_encode().combine_chunks()
    selected = selected_chunks(
        where,
        data_dir,
        video_ids=coded.dictionary,
        video_row=coded.indices.to_numpy(),
        start_ms=np.concatenate(starts),
    )
    if not selected.any():
        raise empty_selection_error(where, what=count_noun(len(selected), "chunk"))
    of_shards = np.split(selected, np.cumsum(sizes)[:-1])
    return {one: tuple(np.flatnonzero(mask).tolist()) for one, mask in zip(shard_ids, of_shards, strict=True)}
