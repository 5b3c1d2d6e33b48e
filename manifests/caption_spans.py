"""Write and read the files that training maps into memory: the captions of a manifest by video and time.

    caption_spans.arrow   one row per time span, ordered by (video, begin_s, end_s), with the captions of the span: a
                          list of (source, row, caption_id), ordered by source and row. All spans of a video are in one
                          batch
    caption_texts.arrow   the texts in the order of captions.parquet, uncompressed

`video` and `row` are row indices in videos.parquet and captions.parquet, and `source` is an index into the sources in
the order of `source_order`. If captions have splits (schema.OPTIONAL_CAPTIONS), the list also contains the index of
each caption's split, or -1 for the split of the video. Labels and likelihoods are only in captions.parquet.

Each write of the manifest derives both files from the tables, and publishes them together with the tables
(clipmill.manifests.write). Each rank maps the files, but only a rank that builds a table of samples verifies them.
"""

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipmill.manifests.caption_table import TextDigest, caption_blocks
from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import report_lost_pages
from clipmill.manifests.store import (
    MAPPED_FILES,
    DamagedManifest,
    manifest_dir,
    read_consistently,
    read_videos,
    table_path,
)

_METADATA_KEY = b"clipmill_captions"  # schema metadata of the spans: names of sources and splits, digest of the texts
_CAPTIONS_PER_BATCH = 1 << 20  # a single video may have more captions
_CAPTIONS_PER_READ = 1 << 21  # large, because each read hashes the IDs of all videos
_TEXTS_PER_BATCH = 1 << 18
_NewArray = Callable[[int, Any], NDArray[Any]]


@dataclass(frozen=True)
class SpanBlock:
    """Block of spans with their captions. A block contains all spans of its videos.

    Attributes:
        video: int32 [S], row index of the video in videos.parquet, or among the videos of a split; ascending.
        begin_s, end_s: float64 [S], span in seconds.
        counts: int32 [S], number of captions of each span. The captions of all spans are concatenated in [C].
        source: int16 [C], index into `CaptionSpans.sources`.
        row: int32 [C], row in captions.parquet.
        caption_id: int64 [C].
        split: int8 [C], index into `CaptionSpans.splits`, or -1 for the split of the video; None if no caption has a
            split.
    """

    video: NDArray[np.int32]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    counts: NDArray[np.int32]
    source: NDArray[np.int16]
    row: NDArray[np.int32]
    caption_id: NDArray[np.int64]
    split: NDArray[np.int8] | None = None

    def select_videos(self, videos: "SplitVideos") -> "SpanBlock | None":
        """Return the captions of a split, with row indices in the split as `video`; None if there are no captions."""
        video, counts = videos.row[self.video], self.counts
        is_kept = video >= 0
        if is_kept.all() and videos.is_in_split is None:
            return replace(self, video=video)
        if not is_kept.any():
            return None
        is_kept_caption = np.repeat(is_kept, counts)
        if videos.is_in_split is not None:
            is_in_split = np.repeat(videos.is_in_split[self.video], counts)
            if self.split is not None:
                is_in_split = np.where(self.split < 0, is_in_split, self.split == videos.split_index)
            is_kept_caption &= is_in_split
            counts = np.add.reduceat(is_kept_caption, np.cumsum(counts) - counts, dtype=np.int32)
            is_kept = counts > 0
            if not is_kept.any():
                return None
        captions = {name: getattr(self, name)[is_kept_caption] for name in ("source", "row", "caption_id")}
        return SpanBlock(video[is_kept], self.begin_s[is_kept], self.end_s[is_kept], counts[is_kept], **captions)

    def expand_captions(self) -> "SpanBlock":
        """Return the block with the span repeated for each of its captions, so that each span has one caption."""
        spans = {name: np.repeat(getattr(self, name), self.counts) for name in ("video", "begin_s", "end_s")}
        return replace(self, **spans, counts=np.ones(len(self.source), np.int32))


@dataclass(frozen=True)
class SplitVideos:
    """Videos of a split, with the information that is needed to select their captions.

    Attributes:
        row: int32 [videos of the manifest], row of each video among the videos of the split; -1 for other videos.
        is_in_split: bool [videos of the manifest], True if the split of the video is this split. Captions without a
            split of their own belong to the split of their video. None if no caption has a split.
        split_index: Index of the split in `CaptionSpans.splits`; -2 if no caption has this split.
    """

    row: NDArray[np.int32]
    is_in_split: NDArray[np.bool_] | None = None
    split_index: int = -2


class CaptionSpans:
    """Captions by video and time, from a table or from the files of a manifest.

    Args:
        spans, texts: Contents of caption_spans.arrow and caption_texts.arrow.

    Attributes:
        mark: Identity of the files. A cache of arrays derived from the captions is valid only for this identity.
    """

    mark: tuple[object, ...] = ()

    def __init__(self, spans: pa.Buffer, texts: pa.Buffer) -> None:
        self._spans, self._texts = spans, texts

    def verify(self) -> None:
        """Verify the checksums of stored files, and raise DamagedManifest on a mismatch. Do nothing for a table."""

    @classmethod
    def from_table(cls, captions: pa.Table, video_ids: pa.Array) -> "CaptionSpans":
        """Build an instance from a table with the columns of captions.parquet.

        Args:
            video_ids: IDs of the videos in the order of videos.parquet.
        """
        spans, texts = pa.BufferOutputStream(), pa.BufferOutputStream()
        write_caption_spans(captions, video_ids, spans=spans, texts=texts)
        return cls(spans.getvalue(), texts.getvalue())

    @cached_property
    def texts(self) -> pa.ChunkedArray:
        """Text of each caption, in the order of captions.parquet."""
        return pa.ipc.open_file(self._texts).read_all()["text"]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, in the order of `source_order`."""
        return tuple(self._metadata["sources"])

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the captions' splits; empty if every caption belongs to the split of its video."""
        return tuple(self._metadata.get("splits", ()))

    @property
    def texts_sha256(self) -> str:
        """Digest of all texts (`TextDigest`), as hexadecimal digits."""
        return str(self._metadata["texts_sha256"])

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads(pa.ipc.open_file(self._spans).schema.metadata[_METADATA_KEY])
        return metadata

    def blocks(self, videos: SplitVideos | None = None) -> Iterator[SpanBlock]:
        """Yield the spans in blocks, in the order of the file.

        Args:
            videos: Videos of a split. Only the captions of this split are yielded, and `video` is a row index among
                these videos. None yields all captions, as views of the file, and `video` is a row index in
                videos.parquet.
        """
        reader = pa.ipc.open_file(self._spans)
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            captions = batch["captions"]
            names = [field.name for field in captions.type.value_type]
            fields = {name: captions.values.field(name).to_numpy() for name in names}
            columns = {name: batch[name].to_numpy() for name in ("video", "begin_s", "end_s")}
            block = SpanBlock(**columns, counts=np.diff(captions.offsets.to_numpy()), **fields)
            selected_block = block if videos is None else block.select_videos(videos)
            if selected_block is not None:
                yield selected_block


def is_model_source(source: str) -> bool:
    """Return True if a model wrote the captions of a source, such as `captioner@1f2e3d4c`.

    Training uses such captions only on request.
    """
    return "@" in source


def source_order(name: str) -> tuple[bool, str]:
    """Return the sort key of a source. Sources are sorted by name, with model sources last."""
    return is_model_source(name), name


def write_caption_spans(
    captions: pa.Table | pq.ParquetFile,
    video_ids: pa.Array,
    *,
    spans: Any,
    texts: Any,
    metadata: dict[bytes, bytes] | None = None,
    scratch_folder: Path | None = None,
) -> None:
    """Write caption_spans.arrow and caption_texts.arrow for a table of captions.

    Args:
        captions: Table, or a Parquet file that was opened with dictionary encoding of video_id and source.
        video_ids: IDs of the videos in the order of videos.parquet.
        spans, texts: Path or Arrow output stream for each file.
        metadata: Additional schema metadata for both files.
        scratch_folder: Folder for unnamed temporary files, which take 30 bytes per caption. None uses memory instead.

    Raises:
        ValueError: A caption refers to a video that is not in `video_ids`.
    """

    def new_array(count: int, kind: Any) -> NDArray[Any]:
        if scratch_folder is None:
            return np.empty(count, kind)
        with TemporaryFile(dir=scratch_folder) as file:
            # The space is reserved, because a write to a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, max(count, 1) * np.dtype(kind).itemsize)
            return np.frombuffer(mmap.mmap(file.fileno(), 0), kind, count=count)

    schema = pa.schema([pa.field("text", pa.string(), nullable=False)], metadata=metadata or {})
    digest = TextDigest()
    with pa.ipc.new_file(texts, schema) as writer:
        for block in caption_blocks(captions, ["text"], num_rows=_TEXTS_PER_BATCH):
            for batch in block.combine_chunks().to_batches(max_chunksize=_TEXTS_PER_BATCH):
                digest.add(batch["text"])
                writer.write_batch(pa.record_batch([batch["text"]], schema=schema))
    texts_sha256 = digest.hexdigest()
    columns, names = _read_columns(captions, video_ids, new_array=new_array)
    content = json.dumps({**names, "texts_sha256": texts_sha256}).encode()
    item = pa.struct([("source", pa.int16()), ("row", pa.int32()), ("caption_id", pa.int64())])
    if "split" in columns:
        item = pa.struct([*item, ("split", pa.int8())])
    kinds = [("video", pa.int32()), ("begin_s", pa.float64()), ("end_s", pa.float64()), ("captions", pa.list_(item))]
    fields = [pa.field(name, kind, nullable=False) for name, kind in kinds]
    schema = pa.schema(fields, metadata={**(metadata or {}), _METADATA_KEY: content})
    with pa.ipc.new_file(spans, schema) as writer:
        for rows in _batch_rows(columns["video"], num_videos=len(video_ids)):
            batch = {name: array[rows] for name, array in columns.items()}
            order = np.lexsort((batch["source"], batch["end_s"], batch["begin_s"], batch["video"]))
            batch = {name: array[order] for name, array in batch.items()}
            keys = (batch[name] for name in ("video", "begin_s", "end_s"))
            is_new = np.any([np.r_[True, key[1:] != key[:-1]] for key in keys], axis=0)
            starts = np.flatnonzero(is_new)
            batch["row"] = rows[order]
            items = pa.StructArray.from_arrays([pa.array(batch[field.name]) for field in item], fields=list(item))
            offsets = pa.array(np.append(starts, len(rows)).astype(np.int32))
            arrays = [pa.array(batch[name][starts]) for name in ("video", "begin_s", "end_s")]
            writer.write_batch(pa.record_batch([*arrays, pa.ListArray.from_arrays(offsets, items)], schema=schema))


def _read_columns(
    captions: pa.Table | pq.ParquetFile, video_ids: pa.Array, *, new_array: _NewArray
) -> tuple[dict[str, NDArray[Any]], dict[str, list[str]]]:
    """Read the columns that are needed to build the spans.

    Returns:
        The columns in the order of captions.parquet, and the names of the sources and of the captions' splits.
    """
    is_table = isinstance(captions, pa.Table)
    num_rows = captions.num_rows if is_table else captions.metadata.num_rows
    kinds = {"video": np.int32, "begin_s": np.float64, "end_s": np.float64, "caption_id": np.int64, "source": np.int16}
    names = (captions.schema if is_table else captions.schema_arrow).names
    split_kind = {"split": np.int8} if "split" in names else {}
    columns = {name: new_array(num_rows, kind) for name, kind in {**kinds, **split_kind}.items()}
    codes: dict[str, int] = {}
    splits: dict[str, int] = {}
    num_read = 0
    input_names = ["video_id", "begin_s", "end_s", "caption_id", "source", *split_kind]
    for table in caption_blocks(captions, input_names, num_rows=_CAPTIONS_PER_READ):
        part = slice(num_read, num_read + len(table))
        num_read += len(table)
        for name in ("begin_s", "end_s", "caption_id"):
            columns[name][part] = table[name].to_numpy()
        arrays = (table[name].combine_chunks() for name in ("video_id", "source"))
        video, source = (array if pa.types.is_dictionary(array.type) else array.dictionary_encode() for array in arrays)
        video_row = pc.index_in(video.dictionary, value_set=video_ids)
        if video_row.null_count:
            raise ValueError("captions refer to a video that is not in the table of videos")
        columns["video"][part] = video_row.to_numpy(zero_copy_only=False)[video.indices.to_numpy()]
        block_codes = [codes.setdefault(name, len(codes)) for name in source.dictionary.to_pylist()]
        columns["source"][part] = np.array(block_codes, np.int16)[source.indices.to_numpy()]
        if split_kind:
            split = table["split"].combine_chunks().dictionary_encode()
            split_indices = [splits.setdefault(name, len(splits)) for name in split.dictionary.to_pylist()]
            columns["split"][part] = np.array([*split_indices, -1], np.int8)[split.indices.fill_null(-1).to_numpy()]
    sources = sorted(codes, key=source_order)
    source_index = np.empty(len(sources), np.int16)
    source_index[[codes[name] for name in sources]] = np.arange(len(sources))
    for start in range(0, num_rows, _CAPTIONS_PER_READ):
        part = slice(start, start + _CAPTIONS_PER_READ)
        columns["source"][part] = source_index[columns["source"][part]]
    return columns, {"sources": sources, **({"splits": list(splits)} if splits else {})}


def _batch_rows(video: NDArray[np.int32], *, num_videos: int) -> Iterator[NDArray[np.int32]]:
    """Yield the row indices of the captions in each batch, in ascending order.

    A batch contains about `_CAPTIONS_PER_BATCH` captions from consecutive videos.

    Args:
        video: int32 [N], row of each caption's video.
    """
    counts = np.zeros(num_videos, np.int64)
    parts = [slice(start, start + _CAPTIONS_PER_READ) for start in range(0, len(video), _CAPTIONS_PER_READ)]
    for part in parts:
        counts += np.bincount(video[part], minlength=num_videos)
    # NumPy uses radix sort for 16-bit integers.
    batch_of_video = ((np.cumsum(counts) - counts) // _CAPTIONS_PER_BATCH).astype(np.uint16)
    ends = np.cumsum(np.bincount(batch_of_video, weights=counts)).astype(np.int64)
    starts = np.r_[0, ends][:-1]
    order, next_offset = np.empty(len(video), np.int32), starts.copy()
    for part in parts:
        batch = batch_of_video[video[part]]
        rows, first = part.start + np.argsort(batch, kind="stable"), 0
        for index, count in enumerate(np.bincount(batch).tolist()):
            order[next_offset[index] : next_offset[index] + count] = rows[first : first + count]
            next_offset[index] += count
            first += count
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end > start:
            yield order[start:end]


class StoredCaptions(CaptionSpans):
    """Snapshot of the captions of a manifest. The content of the files is not checked until `verify` is called.

    Args:
        paths: Paths of the files in MAPPED_FILES.
        entries: Entry of each file in manifest.json.
    """

    def __init__(self, paths: Sequence[Path], entries: Sequence[Mapping[str, Any]]) -> None:
        self._paths, self._entries = paths, entries
        stats = [path.stat() for path in paths]
        self.mark = tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)
        report_lost_pages()
        self._buffers = []
        for path in paths:
            with path.open("rb") as file:
                self._buffers.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        super().__init__(*map(pa.py_buffer, self._buffers))

    def verify(self) -> None:
        for path, entry, buffer in zip(self._paths, self._entries, self._buffers, strict=True):
            if zlib.crc32(buffer) != entry["crc32"]:
                raise DamagedManifest(path, "its checksum does not match manifest.json")
            buffer.madvise(mmap.MADV_DONTNEED)  # otherwise, these pages would count as memory of this process


def open_stored_captions(data_dir: Path) -> StoredCaptions:
    """Map the captions of the current manifest. They do not change if the manifest is replaced later.

    Raises:
        UserError: The manifest is missing, or one of its files is missing or has the wrong size.
    """

    def read(manifest: dict[str, Any]) -> StoredCaptions:
        folder = manifest_dir(data_dir)
        paths = [table_path(folder, name, manifest=manifest, checks_content=False) for name in MAPPED_FILES]
        return StoredCaptions(paths, [manifest["tables"][name] for name in MAPPED_FILES])

    return read_consistently(data_dir, read)


def split_videos(captions: CaptionSpans, data_dir: Path, split: str, *, video_ids: pa.Array) -> SplitVideos:
    """Find the rows of a split's videos in the current manifest.

    Args:
        video_ids: IDs of the videos of the split (clipmill.manifests.divided_videos.find_split_videos).

    Raises:
        UserError: `video_ids` are not the videos of the split, because the manifest was replaced in the meantime.
    """
    videos = read_videos(data_dir, columns=["video_id", "split"])
    is_in_split, expected_ids = pc.equal(videos["split"], split), pa.chunked_array([video_ids])
    is_member = is_in_split
    # If the IDs differ, some captions of videos from other splits belong to the split.
    if not (has_same_videos := videos["video_id"].filter(is_member).equals(expected_ids)):
        is_member = pc.or_(is_in_split, pc.is_in(videos["video_id"], value_set=video_ids))
        if not videos["video_id"].filter(is_member).equals(expected_ids):
            raise UserError(f"the manifest of {data_dir} was replaced while it was read", hint="run the command again")
    is_member = is_member.to_numpy()
    row = np.where(is_member, np.cumsum(is_member) - 1, -1).astype(np.int32)
    if has_same_videos and not captions.splits:
        return SplitVideos(row)
    split_index = captions.splits.index(split) if split in captions.splits else -2
    return SplitVideos(row, is_in_split.to_numpy(), split_index)
