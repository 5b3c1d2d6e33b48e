"""Parts of embeddings on disk, and the folder that they are joined to (clipmill.train.search.folder has its layout)."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import publish_atomically, publish_bytes, publish_checked_json
from clipmill.train.data.clip_reader import ClipReader
from clipmill.train.data.samples import Samples
from clipmill.train.search.folder import (
    CAPTION_SCHEMA,
    CAPTIONS,
    CLIP_SCHEMA,
    CLIPS,
    FAILURES,
    FORMAT,
    PARTS,
    RECORD,
    TEXT,
    VIDEO,
)

_ROWS_PER_GROUP = 1 << 16


@dataclass(frozen=True)
class EmbeddingPart:
    """A range of clips or captions that is embedded and published as one file."""

    kind: Literal["video", "text"]
    begin: int
    end: int

    def path(self, folder: Path) -> Path:
        """Its file once it is finished."""
        return folder / PARTS / f"{self.kind}-{self.begin:012d}.npz"


def num_captions(samples: Samples[ClipReader]) -> int:
    """Number of captions of the clips."""
    return 0 if samples.table.captions is None else samples.table.captions.num_entries


def publish_part(path: Path, rows: NDArray[np.float32], **more: NDArray[Any]) -> None:
    """Publish a finished part."""
    with publish_atomically(path) as temporary:
        np.savez(temporary, allow_pickle=False, rows=rows, **more)


def publish_folder(
    out: Path, parts: Sequence[EmbeddingPart], samples: Samples[ClipReader], *, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """Join the parts and publish the folder; embed.json comes last, and then the parts are removed.

    Returns:
        The content of embed.json.

    Raises:
        FailedWork: no clip could be decoded.
    """
    sample_N, failed, shape = _read_outcomes([part for part in parts if part.kind == "video"], out)
    if not len(sample_N):
        first = f"; the first: {failed[0]['detail']}" if failed else ""
        raise FailedWork(f"none of {count_noun(len(samples), 'clip')} could be decoded{first}")
    names = [VIDEO, CLIPS]
    _join(out, [part for part in parts if part.kind == "video"], out / VIDEO, shape=(len(sample_N), *shape))
    row_of_sample = np.full(len(samples), -1)
    row_of_sample[sample_N] = np.arange(len(sample_N))
    _write_table(out / CLIPS, _clip_tables(samples, sample_N), schema=CLIP_SCHEMA)
    if samples.table.captions is not None:
        names += [CAPTIONS]
        _write_table(out / CAPTIONS, _caption_tables(samples, row_of_sample), schema=CAPTION_SCHEMA)
    if texts := [part for part in parts if part.kind == "text"]:
        names += [TEXT]
        with np.load(texts[0].path(out)) as arrays:
            width = arrays["rows"].shape[1]
        _join(out, texts, out / TEXT, shape=(num_captions(samples), width))
    if failed:
        names += [FAILURES]
        publish_bytes(out / FAILURES, "".join(json.dumps(one) + "\n" for one in failed).encode())
    record = {
        "format": FORMAT,
        **plan,
        "num_clips": len(sample_N),
        "num_captions": num_captions(samples),
        "num_failed": len(failed),
        "shape": [len(sample_N), *shape],
        "files": {name: _facts(out / name) for name in names},
    }
    publish_checked_json(out / RECORD, record)
    shutil.rmtree(out / PARTS)
    return record


def _read_outcomes(
    parts: Sequence[EmbeddingPart], out: Path
) -> tuple[NDArray[np.int64], list[dict[str, Any]], tuple[int, ...]]:
    """The samples that have a row, in order; the failures; and the shape of a row."""
    sample_N: list[NDArray[np.int64]] = []
    failed: list[dict[str, Any]] = []
    shape: tuple[int, ...] = ()
    for part in parts:
        with np.load(part.path(out)) as arrays:
            sample_N.append(arrays["sample"])
            failed += json.loads(arrays["failed"].tobytes())
        if len(sample_N[-1]) and not shape:
            with np.load(part.path(out)) as arrays:
                shape = arrays["rows"].shape[1:]
    return np.concatenate(sample_N), failed, shape


def _join(out: Path, parts: Iterable[EmbeddingPart], path: Path, *, shape: tuple[int, ...]) -> None:
    """Write the rows of parts as one npy file."""
    with publish_atomically(path) as temporary, temporary.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(cast(BinaryIO, file), header)
        for part in parts:
            with np.load(part.path(out)) as arrays:
                file.write(np.ascontiguousarray(arrays["rows"], "<f4").data)


def _write_table(path: Path, tables: Iterable[pa.Table], *, schema: pa.Schema) -> None:
    with publish_atomically(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=_ROWS_PER_GROUP)


def _clip_tables(samples: Samples[ClipReader], sample_N: NDArray[np.int64]) -> Iterator[pa.Table]:
    paths = samples.reader.chunks.source_paths()
    for begin in range(0, len(sample_N), _ROWS_PER_GROUP):
        rows = sample_N[begin : begin + _ROWS_PER_GROUP]
        texts: Any = pa.nulls(len(rows), pa.string())
        captions: Any = pa.nulls(len(rows), pa.int64())
        if samples.table.captions is not None:
            captions = samples.captions.rows.choice.first(rows)
            texts = samples.captions.texts(captions)
        columns = [np.arange(begin, begin + len(rows)), *_places(samples, rows, paths=paths), texts, captions]
        yield pa.table(columns, schema=CLIP_SCHEMA)


def _caption_tables(samples: Samples[ClipReader], row_of_sample: NDArray[np.int64]) -> Iterator[pa.Table]:
    clip_M, paths = samples.captions.rows.choice.clip_of_entry, samples.reader.chunks.source_paths()
    for begin in range(0, len(clip_M), _ROWS_PER_GROUP):
        clips = clip_M[begin : begin + _ROWS_PER_GROUP]
        entries = np.arange(begin, begin + len(clips))
        rows = row_of_sample[clips]
        row = pa.array(rows, mask=rows < 0)
        places = _places(samples, clips, paths=paths)
        yield pa.table([entries, *places, samples.captions.texts(entries), row], schema=CAPTION_SCHEMA)


def _places(samples: Samples[ClipReader], rows: NDArray[np.int64], *, paths: pa.Array) -> list[Any]:
    """Keys, videos, files, and start and end in seconds of clips."""
    chunks, first = samples.reader.chunks, samples.table.first_part[rows]
    begin_us, end_us = samples.span_us(rows)
    video_row = pa.array(chunks.table.video_row[first])
    videos = chunks.video_ids.take(video_row).cast(pa.string())
    starts = chunks.table.start_ms[first].tolist()
    keys = [chunk_key(video, start) for video, start in zip(videos.to_pylist(), starts, strict=True)]
    return [keys, videos, paths.take(video_row), begin_us / 1e6, end_us / 1e6]


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size_bytes": path.stat().st_size, "sha256": file_digest(file, "sha256").hexdigest()}
