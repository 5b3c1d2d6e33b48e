"""Shards of chunks as the input of another column, for its plan: which are committed, and what identifies them.

Columns with one sample for each chunk (`latents`, `scores`, `captions`) have shards with the ids, splits and keys of
`video`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.prep.core.chunk_input import FINGERPRINT_COLUMNS, ChunkLength, Following, chunk_fingerprints
from clipmill.prep.core.failure_list import shard_name
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.plan import NUM_CHECK_THREADS, WantedShard
from clipmill.shards.columns import VIDEO, command_for, how_to_make
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.dataset import current_variant
from clipmill.shards.index import open_index
from clipmill.shards.opening import DamagedIndex

# Why a column that is made of chunks had nothing to do.
NO_CHUNKS = f"there are no committed chunks yet; run it again after `prep {command_for(VIDEO)}`"
_COLUMNS = [*FINGERPRINT_COLUMNS, "key", "video_id", "num_frames", "fps_num", "fps_den"]


HasSample = Callable[[ChunkLength], bool]


@dataclass(frozen=True)
class ChunkShard:
    """What a plan needs to know about a shard of chunks.

    Attributes:
        fingerprint: hash of the keys and bytes of its chunks; captions do not affect it.
        lengths: number of chunks by their length.
        video_ids: ids of the videos of its chunks, without duplicates; a long video spans several shards.
        rows: the chunks that get a sample, as rows of the shard; None for all.
        following: the next chunks, if samples depend on them too.
    """

    shard_id: int
    split: str
    fingerprint: str
    num_chunks: int
    lengths: Counter[ChunkLength]
    video_ids: pa.Array
    rows: tuple[int, ...] | None = None
    following: Following = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Total duration of its chunks."""
        return float(sum(length.seconds * count for length, count in self.lengths.items()))

    @property
    def longest_s(self) -> Fraction:
        """Duration of its longest chunk in seconds."""
        return max((length.seconds for length in self.lengths), default=Fraction(0))

    def wanted(self, *, recipe_fingerprint: str) -> WantedShard:
        """Return the shard that a recipe wants to have made from these chunks."""
        text = f"{recipe_fingerprint} {self.split} {self.fingerprint}"
        return WantedShard(self.shard_id, self.split, hashlib.sha256(text.encode()).hexdigest(), self.num_chunks)


def current_chunks(data_dir: Path) -> str:
    """Return the current variant of `video`.

    Raises:
        UserError: there is none.
    """
    video = current_variant(data_dir, VIDEO)
    if video is None:
        hint = f"create them first: {how_to_make(VIDEO, data_dir)}"
        raise UserError(f"{data_dir} has no chunks", hint=hint)
    return video


def read_chunk_shards(
    video_dir: Path,
    commits: Iterable[Commit],
    *,
    chosen: Mapping[int, tuple[int, ...]] | None = None,
    following: Mapping[int, Following] | None = None,
    has_sample: HasSample | None = None,
) -> tuple[list[ChunkShard], dict[int, Failure]]:
    """Return the committed shards of chunks, and by shard id the failures of those whose index is unreadable.

    Args:
        chosen: the wanted rows of each shard, by shard id; shards without any are left out. None for all rows.
        following: the next chunks of each shard, by shard id, if samples depend on them; None if they do not.
        has_sample: which of the wanted chunks get a sample; None for all.
    """
    shards, unreadable = [], {}

    def read(commit: Commit) -> ChunkShard | tuple[int, Failure] | None:
        rows = None if chosen is None else chosen.get(commit.shard_id, ())
        its_following = None if following is None else following.get(commit.shard_id, {})
        return _read_chunk_shard(video_dir, commit, rows=rows, following=its_following, has_sample=has_sample)

    with ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        for found in pool.map(read, commits):
            if isinstance(found, ChunkShard):
                shards.append(found)
            elif found is not None:
                unreadable[found[0]] = found[1]
    return shards, unreadable


def _read_chunk_shard(
    video_dir: Path,
    commit: Commit,
    *,
    rows: tuple[int, ...] | None,
    following: Following | None,
    has_sample: HasSample | None,
) -> ChunkShard | tuple[int, Failure] | None:
    if commit.files is None:
        return None
    path = video_dir / commit.files.index
    try:
        # Its checksum is verified by the worker that reads chunks: a plan reads few columns of all indexes.
        index = open_index(path, columns=_COLUMNS)
        if not pc.min(index["fps_den"]).as_py():
            raise DamagedIndex(path, "a frame rate is not a number")
    except (DamagedIndex, OSError) as error:
        return commit.shard_id, Failure(shard_name(commit.shard_id), None, str(FailureCode.CHUNK_DAMAGED), str(error))
    if rows is not None and not rows:
        return None
    index = index if rows is None else index.take(pa.array(rows))
    lines = zip(index["key"].to_pylist(), chunk_fingerprints(index), strict=True)
    digest = hashlib.sha256("\n".join(map(" ".join, lines)).encode()).hexdigest()
    selected, after = range(index.num_rows) if rows is None else rows, following or {}
    if following is not None:
        covered = "".join(after[row].content if row in after else "-" for row in selected)
        digest = hashlib.sha256(f"{digest}{covered}".encode()).hexdigest()
    columns = [index[name].to_pylist() for name in ("num_frames", "fps_num", "fps_den")]
    numbers = [*zip(*columns, (row in after for row in selected), strict=True)]
    counts = Counter(numbers)
    length_of = {key: ChunkLength(key[0], Fraction(key[1], key[2]), key[3]) for key in counts}
    if has_sample is not None:
        have_sample = {key: has_sample(length) for key, length in length_of.items()}
        rows = tuple(row for row, key in zip(selected, numbers, strict=True) if have_sample[key])
    return ChunkShard(
        shard_id=commit.shard_id,
        split=commit.split,
        fingerprint=digest,
        num_chunks=index.num_rows if rows is None else len(rows),
        lengths=Counter({length_of[key]: count for key, count in counts.items()}),
        video_ids=index["video_id"].unique(),
        rows=rows,
        following={row: after[row] for row in selected if row in after},
    )
