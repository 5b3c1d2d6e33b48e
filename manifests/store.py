"""Reading and writing the manifest of a data folder; manifests.schema defines its tables.

A write replaces one data set and keeps the others. The captions, the rejected rows and the videos are published
first, each marked with the fingerprint of the whole; manifest.json comes last and names the fingerprint that
counts. A reader that meets another mark says so: a killed write is never read as a manifest.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from manifests.caption_digest import captions_sha256
from manifests.caption_identity import assign_ids, caption_hashes
from manifests.caption_table import ROWS_PER_GROUP, write_caption_table
from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.merge import fingerprint, in_old_places, rows_of, video_table, without_taken_ids
from manifests.publish import publish_json, published
from manifests.schema import CAPTIONS, MANIFEST_FORMAT, REJECTED, VIDEOS

MANIFEST_FOLDER = "manifest"
VIDEOS_FILE = "videos.parquet"
CAPTIONS_FILE = "captions.parquet"
REJECTED_FILE = "rejected.parquet"
MANIFEST_FILE = "manifest.json"
FINGERPRINT_KEY = b"clipmill_manifest"
_CODED = ["video_id", "source"]


@dataclass(frozen=True)
class Written:
    """What a data set's part of the manifest holds after a write.

    Attributes:
        num_rejected: rejected rows by reason.
        num_videos_removed: videos of the data set that the manifest held before and holds no more.
    """

    folder: Path
    dataset: str
    num_videos: int
    num_captions: int
    num_captions_lost: int
    num_rejected: dict[str, int]
    num_videos_added: int
    num_videos_removed: int
    num_captions_added: int


def manifest_dir(data_dir: Path) -> Path:
    """Folder of the manifest in a data folder."""
    return data_dir / MANIFEST_FOLDER


def read_videos(data_dir: Path) -> pa.Table:
    """The videos, schema.VIDEOS.

    Raises:
        UserError: there is no manifest, or a write of it was interrupted.
    """
    return _read(data_dir, VIDEOS_FILE, VIDEOS)


def read_captions(data_dir: Path) -> pa.Table:
    """The captions, schema.CAPTIONS plus label_ columns; each dictionary is one for all chunks.

    Raises:
        UserError: as `read_videos`.
    """
    return _read(data_dir, CAPTIONS_FILE, CAPTIONS, coded=_CODED)


def open_captions(data_dir: Path) -> pq.ParquetFile:
    """The captions as an open file, to be read a row group at a time and then closed.

    It stays the table that it is while another manifest takes its place.

    Raises:
        UserError: as `read_videos`.
    """
    manifest = read_manifest(data_dir)
    path = manifest_dir(data_dir) / CAPTIONS_FILE
    try:
        file = pq.ParquetFile(path, pre_buffer=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read {path}: {error}", hint="run `prep manifest` again") from error
    try:
        _require_parts(path, file.schema_arrow, manifest=manifest, schema=CAPTIONS)
    except UserError:
        file.close()
        raise
    return file


def read_rejected(data_dir: Path) -> pa.Table:
    """The rows that could not be used, schema.REJECTED.

    Raises:
        UserError: as `read_videos`.
    """
    return _read(data_dir, REJECTED_FILE, REJECTED)


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """The content of manifest.json.

    Raises:
        UserError: there is no manifest, or it is of another format.
    """
    path = manifest_dir(data_dir) / MANIFEST_FILE
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(
            f"no manifest in {data_dir}",
            hint=f"make one: prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", hint="remove it and run `prep manifest` again") from error
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise UserError(
            f"{path} has format {found}, this program reads {MANIFEST_FORMAT}", hint="use the clipmill that made it"
        )
    return content


def write_manifest(
    data_dir: Path,
    dataset: str,
    videos: pa.Table,
    captions: pa.Table,
    rejected: pa.Table | None = None,
    *,
    num_captions_lost: int = 0,
) -> Written:
    """Makes `dataset` in the manifest be exactly these rows; other data sets stay as they are.

    Videos that were there keep their place, new ones come last. A caption that was there keeps its id. A video
    whose id another data set has already is rejected, with its captions.

    Args:
        videos: video_id, source_id, path, split, one row a video (other columns are set here).
        captions: video_id, begin_s, end_s, text, source and label_ columns (ids are given here).
        rejected: schema.REJECTED.
    """
    folder = manifest_dir(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    old = _read_old(data_dir)
    is_other = pc.not_equal(old.videos["dataset"], dataset)
    other_ids, own_ids = (old.videos.filter(mask)["video_id"] for mask in (is_other, pc.invert(is_other)))
    rejected = REJECTED.empty_table() if rejected is None else rejected
    num_given = captions.num_rows
    videos, captions, rejected = without_taken_ids(dataset, videos, captions, rejected, taken_ids=other_ids)
    num_captions_lost += num_given - captions.num_rows

    video_rows = rows_of(captions["video_id"], videos["video_id"])
    if (video_rows < 0).any():
        raise ValueError("captions of a video that is not among the videos")
    ids, next_id = _stable_ids(folder, captions, own_ids=own_ids, next_id=old.next_caption_id)
    new = video_table(
        dataset,
        videos,
        num_captions=np.bincount(video_rows, minlength=videos.num_rows),
        digests=captions_sha256(captions, caption_ids=ids, video_rows=video_rows, num_videos=videos.num_rows),
    )
    all_videos = in_old_places(old.videos, new, dataset=dataset)
    other_rejected = old.rejected.filter(pc.not_equal(old.rejected["dataset"], dataset))
    all_rejected = pa.concat_tables([other_rejected, rejected.select(REJECTED.names).cast(REJECTED)])

    mark = fingerprint(all_videos, all_rejected)
    metadata = {FINGERPRINT_KEY: mark.encode()}
    write_caption_table(
        folder / CAPTIONS_FILE,
        captions=captions,
        ids=ids,
        kept_video_ids=other_ids.combine_chunks(),
        metadata=metadata,
    )
    for name, table in ((REJECTED_FILE, all_rejected), (VIDEOS_FILE, all_videos)):
        with published(folder / name) as temporary:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd")
    reasons = {entry["values"]: entry["counts"] for entry in pc.value_counts(rejected["reason"]).to_pylist()}
    entry = {
        "num_videos": videos.num_rows,
        "num_captions": captions.num_rows,
        "num_captions_lost": num_captions_lost,
        "num_rejected": reasons,
    }
    publish_json(
        folder / MANIFEST_FILE,
        {
            "format": MANIFEST_FORMAT,
            "fingerprint": mark,
            "next_caption_id": next_id,
            "datasets": {**old.datasets, dataset: entry},
        },
    )
    num_kept = pc.sum(pc.is_in(own_ids, value_set=videos["video_id"].combine_chunks())).as_py() or 0
    return Written(
        folder=folder,
        dataset=dataset,
        num_videos=videos.num_rows,
        num_captions=captions.num_rows,
        num_captions_lost=num_captions_lost,
        num_rejected=reasons,
        num_videos_added=videos.num_rows - num_kept,
        num_videos_removed=len(own_ids) - num_kept,
        num_captions_added=int((ids >= old.next_caption_id).sum()),
    )


@dataclass(frozen=True)
class _Old:
    """The manifest before a write; an interrupted write's tables are as good a past as any."""

    videos: pa.Table
    rejected: pa.Table
    next_caption_id: int
    datasets: dict[str, Any]


def _read_old(data_dir: Path) -> _Old:
    folder = manifest_dir(data_dir)
    tables = {}
    for name, schema in ((VIDEOS_FILE, VIDEOS), (REJECTED_FILE, REJECTED)):
        path = folder / name
        tables[name] = pq.read_table(path).replace_schema_metadata() if path.exists() else schema.empty_table()
    manifest = read_manifest(data_dir) if (folder / MANIFEST_FILE).exists() else {}
    next_id = manifest.get("next_caption_id", 0)
    if (folder / CAPTIONS_FILE).exists():
        with pq.ParquetFile(folder / CAPTIONS_FILE) as file:
            if file.num_row_groups:
                ids = file.read_row_group(file.num_row_groups - 1, columns=["caption_id"])["caption_id"]
                next_id = max(next_id, ids[-1].as_py() + 1)
    return _Old(tables[VIDEOS_FILE], tables[REJECTED_FILE], next_id, manifest.get("datasets", {}))


def _read(data_dir: Path, name: str, schema: pa.Schema, *, coded: list[str] | None = None) -> pa.Table:
    manifest = read_manifest(data_dir)
    path = manifest_dir(data_dir) / name
    try:
        with pq.ParquetFile(path, read_dictionary=coded) as file:
            table = file.read()  # one chunk a row group, where `read_table` gives many
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read {path}: {error}", hint="run `prep manifest` again") from error
    _require_parts(path, table.schema, manifest=manifest, schema=schema)
    return table.replace_schema_metadata().unify_dictionaries()


def _require_parts(path: Path, found: pa.Schema, *, manifest: dict[str, Any], schema: pa.Schema) -> None:
    """Raises UserError unless a table is of this manifest and has the columns of `schema`."""
    mark = (found.metadata or {}).get(FINGERPRINT_KEY, b"").decode()
    if mark != manifest["fingerprint"]:
        raise UserError(
            f"{path} is not of the manifest that {MANIFEST_FILE} speaks of: a `prep manifest` was interrupted",
            hint="run the same `prep manifest` command again",
        )
    missing = [field.name for field in schema if field.name not in found.names]
    if missing:
        raise UserError(f"{path} lacks the column {missing[0]}", hint="run `prep manifest` again")


def _stable_ids(folder: Path, captions: pa.Table, *, own_ids: pa.ChunkedArray, next_id: int) -> tuple[np.ndarray, int]:
    hashes = caption_hashes(captions)
    path = folder / CAPTIONS_FILE
    old_hashes, old_ids = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)]
    if path.exists() and len(own_ids):
        columns = ["caption_id", "video_id", "begin_s", "end_s", "text", "source"]
        with pq.ParquetFile(path, read_dictionary=_CODED, pre_buffer=False) as file:
            for batch in file.iter_batches(columns=columns, batch_size=ROWS_PER_GROUP):
                table = pa.Table.from_batches([batch])
                is_own = rows_of(table["video_id"], own_ids) >= 0
                old_hashes.append(caption_hashes(table)[is_own])
                old_ids.append(table["caption_id"].to_numpy()[is_own])
    return assign_ids(hashes, old_hashes=np.concatenate(old_hashes), old_ids=np.concatenate(old_ids), next_id=next_id)
