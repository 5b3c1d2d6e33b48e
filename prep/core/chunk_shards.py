"""Shards of chunks as the input of another column: which are committed, what identifies their chunks, and their bytes.

Columns that hold one sample for each chunk (`latents`, `scores`) have shards with the ids, splits and keys of `video`.
A sample belongs to the content of its chunk, not to its key: it is kept when the video gets another name or shard.
"""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.checked_json import parse_json
from clipmill.manifests.errors import UserError
from clipmill.prep.core.failure_list import shard_name
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.plan import NUM_CHECK_THREADS, WantedShard
from clipmill.shards.columns import VIDEO, command_for, how_to_make
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.damage import Damaged, DamagedIndex
from clipmill.shards.dataset import current_variant
from clipmill.shards.index import extensions_of, open_index
from clipmill.shards.reader import CommittedShard, open_shard
from clipmill.shards.writer import Sample

# Why a column that is made of chunks had nothing to do.
NO_CHUNKS = f"there are no committed chunks yet; run it again after `prep {command_for(VIDEO)}`"
FINGERPRINT_COLUMNS = ["span_fingerprint", "mp4_size", "mp4_crc32"]
_NAMES = ("key", "video_id", "start_ms")  # of a chunk in `video`, and of its sample in another column
_COLUMNS = [*FINGERPRINT_COLUMNS, "key", "video_id", "num_frames", "fps_num", "fps_den"]


@dataclass(frozen=True)
class ChunkShard:
    """What a plan needs to know about a shard of chunks.

    Attributes:
        fingerprint: hash of the keys and bytes of its chunks; captions do not affect it.
        lengths: number of chunks by (number of frames, frame rate).
        video_ids: ids of the videos of its chunks, without duplicates; a long video spans several shards.
        rows: the chunks that are wanted, as rows of the shard; None for all. The other fields are those of them.
    """

    shard_id: int
    split: str
    fingerprint: str
    num_chunks: int
    lengths: Counter[tuple[int, Fraction]]
    video_ids: pa.Array
    rows: tuple[int, ...] | None = None

    @property
    def seconds(self) -> float:
        """Total duration of its chunks."""
        return float(sum(frames / fps * count for (frames, fps), count in self.lengths.items()))

    @property
    def longest_s(self) -> Fraction:
        """Duration of its longest chunk in seconds."""
        return max((frames / fps for frames, fps in self.lengths), default=Fraction(0))

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
    video_dir: Path, commits: Iterable[Commit], *, chosen: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[list[ChunkShard], dict[int, Failure]]:
    """Return the committed shards of chunks, and by shard id the failures of those whose index is unreadable.

    Args:
        chosen: the wanted rows of each shard, by shard id; shards without any are left out. None for all rows.
    """
    shards, unreadable = [], {}

    def read(commit: Commit) -> ChunkShard | tuple[int, Failure] | None:
        return _read_chunk_shard(video_dir, commit, rows=None if chosen is None else chosen.get(commit.shard_id, ()))

    with ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        for found in pool.map(read, commits):
            if isinstance(found, ChunkShard):
                shards.append(found)
            elif found is not None:
                unreadable[found[0]] = found[1]
    return shards, unreadable


def _read_chunk_shard(
    video_dir: Path, commit: Commit, *, rows: tuple[int, ...] | None
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
    columns = [index[name].to_pylist() for name in ("num_frames", "fps_num", "fps_den")]
    numbers = Counter(zip(*columns, strict=True))
    lengths = Counter({(frames, Fraction(num, den)): count for (frames, num, den), count in numbers.items()})
    video_ids = index["video_id"].unique()
    return ChunkShard(commit.shard_id, commit.split, digest, index.num_rows, lengths, video_ids, rows)


def chunk_fingerprints(index: pa.Table) -> list[str]:
    """Return one hash (hex) per chunk of a `video` index over its bytes and what they are encoded from, not its key."""
    columns = [index[name].to_pylist() for name in FINGERPRINT_COLUMNS]
    lines = ("\0".join(map(str, line)) for line in zip(*columns, strict=True))
    return [hashlib.blake2b(line.encode(), digest_size=16).hexdigest() for line in lines]


def frame_rate(index: pa.Table, row: int) -> Fraction:
    """Return the frame rate of a chunk."""
    return Fraction(index["fps_num"][row].as_py(), index["fps_den"][row].as_py())


def seconds_of(index: pa.Table, row: int) -> Fraction:
    """Return the duration of a chunk in seconds."""
    return index["num_frames"][row].as_py() / frame_rate(index, row)


def read_chunk(video: CommittedShard, row: int) -> bytes:
    """Read the MP4 file of a chunk.

    Raises:
        SourceFailure: chunk_damaged, if its bytes differ from those committed.
    """
    try:
        content = video.read(row, "mp4")
    except (Damaged, OSError) as error:
        raise SourceFailure(FailureCode.CHUNK_DAMAGED, f"the chunk cannot be read: {error}") from None
    if zlib.crc32(content) != video.index["mp4_crc32"][row].as_py():
        raise SourceFailure(FailureCode.CHUNK_DAMAGED, f"its content in {video.tar_path.name} differs from the commit")
    return content


class OldSamples:
    """Samples of earlier commits by `chunk_fingerprint`, as far as their bytes are undamaged.

    Args:
        commits: Commits of the column that may hold samples of the chunks; the first that has a sample counts.
        fields: Index fields of the column, among them `chunk_fingerprint`.
        wanted: Fingerprints of the chunks.
    """

    def __init__(
        self, variant_dir: Path, commits: Sequence[Commit], *, fields: Sequence[pa.Field], wanted: Collection[str]
    ) -> None:
        self._rows: dict[str, tuple[CommittedShard, int]] = {}
        self._fields = [field.name for field in fields]
        chosen = frozenset(wanted)
        for commit in commits:
            if commit.files is not None:
                with suppress(Damaged, OSError, KeyError):  # the samples read so far remain usable
                    self._add(open_shard(variant_dir, commit), chosen)

    def _add(self, shard: CommittedShard, wanted: frozenset[str]) -> None:
        (extension,) = extensions_of(shard.index)
        crc32s = shard.index[f"{extension}_crc32"].to_pylist()
        for row, fingerprint in enumerate(shard.index["chunk_fingerprint"].to_pylist()):
            is_missing = fingerprint in wanted and fingerprint not in self._rows
            if is_missing and zlib.crc32(shard.read(row, extension)) == crc32s[row]:
                self._rows[fingerprint] = shard, row

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._rows

    def sample(self, fingerprint: str, index: pa.Table, row: int) -> Sample:
        """Return the sample of the chunk in `row` of a `video` index, under the key that the chunk has there.

        Args:
            fingerprint: Fingerprint of the chunk, of which there must be a sample.
        """
        shard, old_row = self._rows[fingerprint]
        (extension,) = extensions_of(shard.index)
        fields = {name: shard.index[name][old_row].as_py() for name in self._fields}
        member = shard.read(old_row, extension)
        names = {name: index[name][row].as_py() for name in _NAMES}
        if shard.index["key"][old_row].as_py() != names["key"]:
            fields |= {name: names[name] for name in fields.keys() & names}
            if extension.endswith(".json"):
                renamed = {**parse_json(member), **names}
                member = json.dumps(renamed, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return Sample(key=names["key"], members={extension: member}, fields=fields)
