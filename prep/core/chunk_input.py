"""Input of a worker that makes one shard: the chunks with their fingerprints, and samples from earlier commits.

A sample belongs to the content of a chunk, not to the key of the chunk. The sample is therefore reused if the video is
renamed, or if the chunk moves to a different shard. Workers import this module, so it does not load the planner or the
driver.
"""

import json
import math
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from clipmill.manifests.errors import Inaccessible, UserError, first_line
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.chunk_content import ChunkContent, frame_rate, read_chunk
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.columns import SOURCE_MEMBER
from clipmill.shards.commits import Commit
from clipmill.shards.index import extensions_of
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, open_shard
from clipmill.shards.writer import Sample

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


# Columns of a `video` index that identify the content of a chunk. An index has the size and CRC-32 of only one member.
FINGERPRINT_COLUMNS = [
    "span_fingerprint",
    *(f"{member}_{name}" for member in ("mp4", SOURCE_MEMBER) for name in ("size", "crc32")),
]
_NAMES = ("key", "video_id", "start_ms")  # fields that identify a chunk, and its sample in other columns
_FIELDS = ("video_id", "start_ms", "num_frames", "fps_num", "fps_den")  # fields that a sample copies from its chunk
FINGERPRINT_FIELD = "chunk_fingerprint"
# Exceptions that end the shard, because they are caused by the machine, the bucket or the model, not by a single chunk.
SHARD_ERRORS = (UserError, Inaccessible, OSError, MemoryError)


def chunk_fingerprints(index: pa.Table) -> list[str]:
    """Return the content hash (hex) of each chunk in a `video` index: a hash of bytes and source span, not of keys."""
    columns = [index[name].to_pylist() for name in FINGERPRINT_COLUMNS if name in index.column_names]
    lines = ("\0".join(map(str, line)) for line in zip(*columns, strict=True))
    return [blake2b(line.encode(), digest_size=16).hexdigest() for line in lines]


class ChunkLength(NamedTuple):
    """Length of a chunk.

    Attributes:
        num_frames: Number of frames.
        fps: Frames per second.
        has_next: True if the sample also depends on the next chunk of the video, and the next chunk exists.
    """

    num_frames: int
    fps: Fraction
    has_next: bool = False

    @property
    def seconds(self) -> Fraction:
        return self.num_frames / self.fps


class NextChunk(NamedTuple):
    """Reference to the next chunk of a video.

    Attributes:
        shard_id: ID of the shard of `video` that contains the next chunk.
        row: Row of the next chunk in this shard.
        content: Content hash (hex) of the next chunk.
    """

    shard_id: int
    row: int
    content: str


NextChunks = Mapping[int, NextChunk]  # next chunks, keyed by the row of the preceding chunk


def chunks_of_shard(
    video_dir: Path,
    shard_id: int,
    *,
    commits: Mapping[int, Commit],
    next_chunks: NextChunks,
    names: tuple[str, ...] = (),
) -> "list[Chunk]":
    """Open a shard of `video`, and return its chunks in row order.

    Args:
        commits: Commits of the shard and of the shards in `next_chunks`, keyed by shard ID.
        next_chunks: Next chunks, if samples also depend on them; otherwise empty.
        names: Names of the index fields of the column to make.

    Raises:
        Damaged: An index cannot be read.
        FileNotFoundError: An index is missing.
    """
    shard_ids = {shard_id, *(next_chunk.shard_id for next_chunk in next_chunks.values())}
    shards = {number: open_shard(video_dir, commits[number]) for number in sorted(shard_ids)}
    contents = {number: chunk_fingerprints(shard.index) for number, shard in shards.items()}
    chunks = []
    for row, content in enumerate(contents[shard_id]):
        chunk = Chunk(shards[shard_id], row, content, content, names)
        if (successor := next_chunks.get(row)) is not None:
            next_content = contents[successor.shard_id][successor.row]
            fingerprint = blake2b(f"{content} {next_content}".encode(), digest_size=16).hexdigest()
            next_chunk = Chunk(shards[successor.shard_id], successor.row, next_content, next_content, names)
            chunk = replace(chunk, fingerprint=fingerprint, next=next_chunk)
        chunks.append(chunk)
    return chunks


def column_failure(error: Exception) -> SourceFailure:
    """Return the failure (column_error) for an exception in the code of a column, with the line that raised it."""
    # The first frame is the caller. Report the last frame in the folder of the column, not a frame in a library.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    column_frames = [frame for frame in frames if Path(frame.filename).parent == Path(frames[0].filename).parent]
    location = f" ({Path(column_frames[-1].filename).name}, line {column_frames[-1].lineno})" if column_frames else ""
    return SourceFailure(FailureCode.COLUMN_ERROR, f"{type(error).__name__}: {first_line(error)}{location}")


def seconds_of(index: pa.Table, row: int) -> Fraction:
    """Return the duration of a chunk in seconds."""
    return index["num_frames"][row].as_py() / frame_rate(index, row)


class OldSamples:
    """Undamaged samples from earlier commits, found by `chunk_fingerprint`.

    Args:
        variant_dir: Folder of the variant.
        commits: Commits of the column that may contain samples of the chunks. If several commits contain a sample, the
            first one is used.
        fields: Index fields of the column, including `chunk_fingerprint`.
        fingerprints: Fingerprints of the chunks.
    """

    def __init__(
        self, variant_dir: Path, commits: Sequence[Commit], *, fields: Sequence[pa.Field], fingerprints: Collection[str]
    ) -> None:
        self._rows: dict[str, tuple[CommittedShard, int]] = {}
        self._fields = [field.name for field in fields]
        chunk_hashes = frozenset(fingerprints)
        for commit in commits:
            if commit.files is None:
                continue
            with suppress(Damaged, OSError, KeyError):  # the samples read so far remain usable
                shard = open_shard(variant_dir, commit)
                (extension,) = extensions_of(shard.index)
                crc32s = shard.index[f"{extension}_crc32"].to_pylist()
                for row, fingerprint in enumerate(shard.index[FINGERPRINT_FIELD].to_pylist()):
                    is_missing = fingerprint in chunk_hashes and fingerprint not in self._rows
                    if is_missing and zlib.crc32(shard.read(row, extension)) == crc32s[row]:
                        self._rows[fingerprint] = shard, row

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._rows

    def sample(self, fingerprint: str, index: pa.Table, row: int) -> Sample:
        """Return the stored sample of a chunk, with the current key of the chunk.

        Args:
            fingerprint: Fingerprint of a chunk that has a stored sample.
            index: Index of the `video` shard, which contains the current key.
            row: Row of the chunk in this index.
        """
        shard, old_row = self._rows[fingerprint]
        (extension,) = extensions_of(shard.index)
        fields = {name: shard.index[name][old_row].as_py() for name in self._fields}
        member = shard.read(old_row, extension)
        names = {name: index[name][row].as_py() for name in _NAMES}
        if shard.index["key"][old_row].as_py() != names["key"]:
            fields |= {name: names[name] for name in fields.keys() & names}
            if extension.endswith(".json"):
                record = {**parse_json(member), **names}
                member = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return Sample(key=names["key"], members={extension: member}, fields=fields)


@dataclass(frozen=True)
class Chunk:
    """Chunk in a shard of `video`.

    Attributes:
        video: Shard of `video` that contains the chunk.
        row: Row of the chunk in this shard.
        content: Content hash (hex) of the chunk.
        fingerprint: Hash (hex) of everything that the sample depends on: the content of the chunk and, if the column
            reads the next chunk, the content of the next chunk.
        names: Names of the index fields of the column to make.
        next: Next chunk of the video; None if there is none, or if `ChunkWork.reads_next` is False.
    """

    video: CommittedShard
    row: int
    content: str
    fingerprint: str
    names: tuple[str, ...]
    next: "Chunk | None" = None

    def __getitem__(self, name: str) -> Any:
        """Return a field of the chunk's index row: `key`, or one of `clipmill.shards.format.VIDEO_FIELDS`."""
        return self.video.index[name][self.row].as_py()

    @property
    def key(self) -> str:
        """Key of the chunk and of its sample."""
        return str(self["key"])

    @property
    def fps(self) -> Fraction:
        """Frames per second."""
        return frame_rate(self.video.index, self.row)

    @property
    def length(self) -> ChunkLength:
        """Length of the chunk."""
        return ChunkLength(self["num_frames"], self.fps, self.next is not None)

    def read(self) -> ChunkContent:
        """Read the content of the chunk.

        Raises:
            SourceFailure: chunk_damaged if the chunk cannot be read, or does not match its committed checksum.
        """
        return read_chunk(self.video, self.row)

    def frames(self, indices: Sequence[int] | None = None) -> "Iterator[VideoFrame]":
        """Decode frames of the chunk, and yield them in presentation order.

        Frames that no selected frame depends on are not decoded. Frame i is displayed i / `fps` seconds after the start
        of the chunk.

        Args:
            indices: Indices of the frames, from 0 to `num_frames` - 1, in strictly ascending order; None for all
                frames.

        Raises:
            SourceFailure: The chunk is damaged or cannot be decoded.
            ValueError: The indices do not increase, or are out of range.
        """
        num_frames = self["num_frames"]
        frame_indices = range(num_frames) if indices is None else indices
        for previous_index, index in pairwise((-1, *frame_indices)):
            if not previous_index < index < num_frames:
                context = f" after {previous_index}" if previous_index >= 0 else ""
                raise ValueError(
                    f"{self.key}: frames() got index {index}{context}; "
                    f"indices must be in strictly ascending order, from 0 to {num_frames - 1}"
                )
        return self.read().frames(frame_indices)

    def fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all index fields of the sample, in the order that the column declares.

        Args:
            values: Values by field name. If `video_id`, `start_ms`, `num_frames`, `fps_num` or `fps_den` is missing, it
                is copied from the chunk.
        """
        copied_fields = {name: self[name] for name in _FIELDS if name in self.names and name not in values}
        all_fields = {**copied_fields, **values, FINGERPRINT_FIELD: self.fingerprint}
        return {name: all_fields[name] for name in [*self.names, *all_fields] if name in all_fields}

    def sample(self, members: Mapping[str, bytes], values: Mapping[str, Any]) -> Sample:
        """Return the sample of the chunk.

        Args:
            members: Content of each member, keyed by extension.
            values: Values by field name (see `fields`).

        Raises:
            SourceFailure: not_finite if a value is not a finite number.
        """
        fields = self.fields(values)
        if names := [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]:
            raise SourceFailure(FailureCode.NOT_FINITE, f"{', '.join(names)}: not a finite number")
        return Sample(key=self.key, members=dict(members), fields=fields)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a shard that have no stored sample. `ChunkWork.make` iterates over these chunks.

    Attributes:
        variant_dir: Folder of the variant to make.
        shard_id: ID of the shard.
        planned_rows: Rows of the shard that get a sample, including copied samples.
        rows: Rows of the chunks without a stored sample.
        shard_chunks: All chunks of the shard, in row order.
        fingerprints: Fingerprints of `shard_chunks`.
        options: Options from `ChunkWork.workers`, equal for all workers; None by default.
        extra_input: Further input from `ChunkWork.extra_input` for this shard; None by default.
        known_rows: Rows for which `make` already has a result, such as a stored answer of a language model. `make` adds
            these rows, and their duration does not count as work of the run.
        show: Function that reports the number of finished chunks, for columns whose chunks do not finish in order.
    """

    variant_dir: Path
    shard_id: int
    planned_rows: Sequence[int]
    rows: Sequence[int]
    shard_chunks: Sequence[Chunk]
    fingerprints: Sequence[str]
    options: Any = None
    extra_input: Any = None
    known_rows: set[int] = field(default_factory=set)
    show: Callable[[int], None] = lambda num_done: None

    @property
    def video(self) -> CommittedShard:
        """Shard of `video` that contains the chunks."""
        return self.shard_chunks[0].video

    def __iter__(self) -> Iterator[Chunk]:
        return (self.shard_chunks[row] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def each(self, make: Callable[[Chunk], Sample]) -> Iterator[Sample | SourceFailure]:
        """Call `make` for each chunk, and yield the sample that it returns or the failure that it raises.

        An unexpected exception becomes a failure of the chunk (column_error), with the line that raised the exception.
        An exception in `SHARD_ERRORS` is raised again.
        """
        for chunk in self:
            try:
                yield make(chunk)
            except SourceFailure as failure:
                yield failure
            except SHARD_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001 - the code of a column may raise anything
                yield column_failure(error)
