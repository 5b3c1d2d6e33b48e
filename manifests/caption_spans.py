"""The captions of a large manifest in the order in which training opens them, in files that are mapped into memory.

    caption_spans.json             the tables that the files were made of; size and CRC-32 of each file
    caption_spans-<16 hex>.arrow   one row per span (video, begin_s, end_s), ordered by these, with its captions: a list
                                   of (source, row, caption_id), ordered by source and row. Whole videos in each batch.
    caption_texts-<16 hex>.arrow   the texts in the order of captions.parquet, uncompressed

`video` and `row` are rows of videos.parquet and captions.parquet; `source` is a number in the order of `source_order`.
The digits in the names are of the checksum of captions.parquet. Everything is derived: files that are missing or of
other tables cost time, never data, and the next command of `prep` writes them again. Small manifests have none.
"""

import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipmill.manifests.caption_digest import TextDigest
from clipmill.manifests.checked_json import publish_checked_json, read_checked_json
from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import folder_lock, published, remove, remove_temporaries
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.store import manifest_dir, open_captions, read_manifest, read_videos
from clipmill.manifests.table_files import CAPTIONS_FILE, VIDEOS_FILE

SPANS_RECORD = "caption_spans.json"
MIN_CAPTIONS = 200_000  # fewer are opened in less than a second without these files
_FORMAT = 1
_FILE = re.compile(r"caption_(spans|texts)-[0-9a-f]{16}\.arrow")
_BATCH = 1 << 20  # captions in a batch, or more if a video has more
_READ = 1 << 21  # captions read at a time: for each of these blocks, the ids of all videos are hashed
_TEXTS = 1 << 18  # texts in a batch


class DamagedSpans(UserError):
    """A file of the captions by span differs from its checksum."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}", hint="remove it; the next prep chunk writes it again")
        self.path = path


@dataclass(frozen=True)
class SpanBlock:
    """Consecutive spans, those of whole videos; zero-copy views of the file.

    Attributes:
        video: int32 [S], row of videos.parquet, ascending.
        begin_s, end_s: float64 [S].
        first: int32 [S + 1], where the captions of each span begin in the next three arrays.
        source: int16 [C]; row: int32 [C], of captions.parquet; caption_id: int64 [C].
    """

    video: NDArray[np.int32]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    first: NDArray[np.int32]
    source: NDArray[np.int16]
    row: NDArray[np.int32]
    caption_id: NDArray[np.int64]


@dataclass(frozen=True)
class CaptionSpans:
    """The files of one manifest.

    Attributes:
        sources: names of the sources by number.
        texts_sha256: `TextDigest` of all texts.
    """

    spans_path: Path
    texts_path: Path
    crc32: Mapping[str, int]
    sources: tuple[str, ...]
    num_captions: int
    texts_sha256: str

    @property
    def mark(self) -> tuple[object, ...]:
        """What arrays that are read of these files depend on."""
        found = (path.stat() for path in (self.spans_path, self.texts_path))
        return self.texts_sha256, *((one.st_size, one.st_mtime_ns, one.st_ino) for one in found)

    def verify(self) -> None:
        """Read both files.

        Raises:
            DamagedSpans: one differs from its checksum.
            OSError: it cannot be read.
        """
        for path in (self.spans_path, self.texts_path):
            if _crc32(path) != self.crc32[path.name]:
                raise DamagedSpans(path, f"its content differs from {SPANS_RECORD}")

    def blocks(self) -> Iterator[SpanBlock]:
        """The spans in order."""
        with map_arrow_file(self.spans_path) as mapped:
            reader = pa.ipc.open_file(mapped)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                captions = batch["captions"]
                fields = {name: captions.values.field(name).to_numpy() for name in ("source", "row", "caption_id")}
                columns = {name: batch[name].to_numpy() for name in ("video", "begin_s", "end_s")}
                yield SpanBlock(**columns, first=captions.offsets.to_numpy(), **fields)

    def texts(self) -> pa.ChunkedArray:
        """The texts by row of captions.parquet, mapped."""
        with map_arrow_file(self.texts_path) as mapped:
            return pa.ipc.open_file(mapped).read_all()["text"]


def source_order(name: str) -> tuple[bool, str]:
    """The sort key of sources: by name, those of models (`captioner@1f2e3d4c`) last."""
    return "@" in name, name


def open_caption_spans(data_dir: Path) -> CaptionSpans | None:
    """Return the files of the current manifest; None if there are none, or some of other tables or another format.

    Their contents are not verified yet.

    Raises:
        UserError: there is no manifest.
    """
    folder = manifest_dir(data_dir)
    made_of = _tables(read_manifest(data_dir))
    try:
        record = read_checked_json(folder / SPANS_RECORD)
    except (OSError, ValueError):
        return None
    if made_of is None or record.get("format") != _FORMAT or record.get("tables") != made_of:
        return None
    files: dict[str, dict[str, int]] = record["files"]
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return None
    spans_path, texts_path = (folder / name for name in sorted(files))
    crc32 = {name: entry["crc32"] for name, entry in files.items()}
    sources, count = tuple(record["sources"]), int(record["num_captions"])
    return CaptionSpans(spans_path, texts_path, crc32, sources, count, record["texts_sha256"])


def update_caption_spans(data_dir: Path) -> bool:
    """Write the files of the current manifest unless they are there; return whether they were written.

    Folders in a bucket have none.

    Raises:
        UserError: the manifest cannot be read.
        OSError: a file cannot be written.
        ValueError: the tables of the manifest do not match.
    """
    folder = manifest_dir(data_dir)
    made_of = _tables(read_manifest(data_dir))
    if made_of is None or mirror_of(folder) is not None or open_caption_spans(data_dir) is not None:
        return False
    with folder_lock(folder):
        return open_caption_spans(data_dir) is None and _update(data_dir, made_of)


def _update(data_dir: Path, made_of: Mapping[str, Any]) -> bool:
    folder = manifest_dir(data_dir)
    with open_captions(data_dir, coded=["video_id", "source"]) as file:
        if file.metadata.num_rows < MIN_CAPTIONS:
            _remove_files(folder, keep=())
            return False
        digits = made_of[CAPTIONS_FILE]["sha256"][:16]
        spans, texts = (folder / f"caption_{what}-{digits}.arrow" for what in ("spans", "texts"))
        names = _write_spans(spans, file, read_videos(data_dir)["video_id"].combine_chunks())
        texts_sha256 = _write_texts(texts, file)
        num_captions = file.metadata.num_rows
    files = {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in (spans, texts)}
    record = {"format": _FORMAT, "tables": made_of, "files": files, "sources": names}
    record |= {"num_captions": num_captions, "texts_sha256": texts_sha256}
    is_current = _tables(read_manifest(data_dir)) == made_of  # else `prep manifest` has run meanwhile
    if is_current:
        publish_checked_json(folder / SPANS_RECORD, record)
    _remove_files(folder, keep=files)
    return is_current


def _tables(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entries of the tables that the files are made of; None for a manifest without checksums."""
    tables = manifest.get("tables", {})
    return {name: tables[name] for name in (CAPTIONS_FILE, VIDEOS_FILE)} if CAPTIONS_FILE in tables else None


def _remove_files(folder: Path, *, keep: Iterable[str]) -> None:
    remove_temporaries(folder, of=lambda name: _FILE.fullmatch(name) is not None)
    for path in folder.glob("caption_*-*.arrow"):
        if _FILE.fullmatch(path.name) and path.name not in keep:
            remove(path)


def _crc32(path: Path) -> int:
    with map_arrow_file(path) as mapped:
        return zlib.crc32(mapped.read_buffer())


def _write_texts(path: Path, file: pq.ParquetFile) -> str:
    """Write the texts and return their digest."""
    digest, schema = TextDigest(), pa.schema([pa.field("text", pa.string(), nullable=False)])
    with published(path) as temporary, pa.ipc.new_file(temporary, schema) as writer:
        for batch in file.iter_batches(_TEXTS, columns=["text"]):
            digest.add(batch["text"])
            writer.write_batch(pa.record_batch([batch["text"]], schema=schema))
    return digest.hexdigest()


def _write_spans(path: Path, file: pq.ParquetFile, video_ids: pa.Array) -> list[str]:
    """Write the spans and return the names of the sources."""
    columns, names = _read_columns(file, video_ids, folder=path.parent)
    item = pa.struct([("source", pa.int16()), ("row", pa.int32()), ("caption_id", pa.int64())])
    fields = [("video", pa.int32()), ("begin_s", pa.float64()), ("end_s", pa.float64()), ("captions", pa.list_(item))]
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])
    with published(path) as temporary, pa.ipc.new_file(temporary, schema) as writer:
        for rows in _rows_of_batches(columns["video"], num_videos=len(video_ids)):
            own = {name: array[rows] for name, array in columns.items()}
            order = np.lexsort((own["source"], own["end_s"], own["begin_s"], own["video"]))
            own = {name: array[order] for name, array in own.items()}
            keys = (own[name] for name in ("video", "begin_s", "end_s"))
            is_new = np.any([np.r_[True, key[1:] != key[:-1]] for key in keys], axis=0)
            begins = np.flatnonzero(is_new)
            items = [own["source"], rows[order], own["caption_id"]]
            captions = pa.StructArray.from_arrays([pa.array(one) for one in items], fields=list(item))
            first = pa.array(np.append(begins, len(rows)).astype(np.int32))
            arrays = [pa.array(own[name][begins]) for name in ("video", "begin_s", "end_s")]
            writer.write_batch(pa.record_batch([*arrays, pa.ListArray.from_arrays(first, captions)], schema=schema))
    return names


def _read_columns(
    file: pq.ParquetFile, video_ids: pa.Array, *, folder: Path
) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """What the spans are made of, by row, and the names of the sources.

    The columns are in files without names in `folder`, since together they have 30 bytes per caption.
    """
    kinds = {"video": np.int32, "begin_s": np.float64, "end_s": np.float64, "caption_id": np.int64, "source": np.int16}
    columns: dict[str, NDArray[Any]] = {
        name: _in_file(folder, file.metadata.num_rows, kind) for name, kind in kinds.items()
    }
    codes: dict[str, int] = {}
    begin = 0
    for table in _blocks(file, ["video_id", "begin_s", "end_s", "caption_id", "source"]):
        part = slice(begin, begin + len(table))
        begin += len(table)
        for name in ("begin_s", "end_s", "caption_id"):
            columns[name][part] = table[name].to_numpy()
        video = table["video_id"].combine_chunks()
        video_row = pc.index_in(video.dictionary, value_set=video_ids)
        if video_row.null_count:
            raise ValueError("captions refer to a video that is not in the table of videos")
        video_row = video_row.to_numpy(zero_copy_only=False)
        columns["video"][part] = video_row[video.indices.to_numpy()]
        source = table["source"].combine_chunks()
        own = [codes.setdefault(name, len(codes)) for name in source.dictionary.to_pylist()]
        columns["source"][part] = np.array(own, np.int16)[source.indices.to_numpy()]
    names = sorted(codes, key=source_order)
    number = np.empty(len(names), np.int16)
    number[[codes[name] for name in names]] = np.arange(len(names))
    for begin in range(0, len(columns["source"]), _READ):
        part = slice(begin, begin + _READ)
        columns["source"][part] = number[columns["source"][part]]
    return columns, names


def _in_file(folder: Path, count: int, kind: Any) -> NDArray[Any]:
    with TemporaryFile(dir=folder) as file:
        # Reserved, because writing to a mapped file on a full disk would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(count, 1) * np.dtype(kind).itemsize)
        return np.frombuffer(mmap.mmap(file.fileno(), 0), kind, count=count)


def _blocks(file: pq.ParquetFile, columns: list[str]) -> Iterator[pa.Table]:
    groups: list[int] = []
    count = 0
    for group in range(file.num_row_groups):
        groups.append(group)
        count += file.metadata.row_group(group).num_rows
        if count >= _READ or group == file.num_row_groups - 1:
            yield file.read_row_groups(groups, columns=columns).unify_dictionaries()
            groups, count = [], 0


def _rows_of_batches(video: NDArray[np.int32], *, num_videos: int) -> Iterator[NDArray[np.int32]]:
    """The captions of consecutive videos, about `_BATCH` at a time, each ascending."""
    of_video = np.zeros(num_videos, np.int64)
    parts = [slice(begin, begin + _READ) for begin in range(0, len(video), _READ)]
    for part in parts:
        of_video += np.bincount(video[part], minlength=num_videos)
    batch_of_video = ((np.cumsum(of_video) - of_video) // _BATCH).astype(np.uint16)  # which NumPy sorts by radix
    ends = np.cumsum(np.bincount(batch_of_video, weights=of_video)).astype(np.int64)
    begins = np.r_[0, ends[:-1]]
    order, filled = np.empty(len(video), np.int32), begins.copy()
    for part in parts:
        batch = batch_of_video[video[part]]
        rows, at = part.start + np.argsort(batch, kind="stable"), 0
        for number, count in enumerate(np.bincount(batch).tolist()):
            order[filled[number] : filled[number] + count] = rows[at : at + count]
            filled[number] += count
            at += count
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if end > begin:
            yield order[begin:end]
