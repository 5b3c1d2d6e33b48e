"""Reading and writing the manifest of a data folder; clipmill.manifests.schema defines its tables.

A write replaces one dataset and keeps the others. The result depends only on the given rows and the last complete
manifest: remains of an interrupted write are never read. Publishing manifest.json makes the new tables valid
(clipmill.manifests.table_files); each table carries the fingerprint of the whole manifest.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.caption_digest import captions_sha256
from clipmill.manifests.checked_json import read_checked_json
from clipmill.manifests.errors import UserError
from clipmill.manifests.further_sources import FurtherCaptions, require_own_sources
from clipmill.manifests.merge import num_other_splits, replace_dataset, rows_of, video_table, without_taken_ids
from clipmill.manifests.previous import PreviousManifest, read_previous, stable_ids
from clipmill.manifests.publication import MANIFEST_FILE, publish_manifest
from clipmill.manifests.schema import CAPTIONS, MANIFEST_FORMAT, REJECTED, VIDEOS
from clipmill.manifests.table_files import (
    CAPTIONS_FILE,
    FINGERPRINT_KEY,
    REJECTED_FILE,
    REPAIR_HINT,
    VIDEOS_FILE,
    DamagedManifest,
    require_numbers,
    table_path,
)

MANIFEST_FOLDER = "manifest"
_T = TypeVar("_T")
_CODED = ["video_id", "source"]


@dataclass(frozen=True)
class WriteResult:
    """A dataset's entry in the manifest after a write.

    Attributes:
        num_rejected: number of rejected rows by reason.
        num_captions_removed: captions of the dataset that were in the manifest before and no longer are.
        num_videos_removed: videos of the dataset that were in the manifest before and no longer are.
        num_splits_changed: videos of the dataset that were in the manifest before in another split.
        num_further_kept: captions of further sources in the manifest.
        num_further_removed: captions of further sources that were removed with their videos.
        splits: number of videos and of captions of the dataset, by split.
    """

    folder: Path
    dataset: str
    num_videos: int
    num_captions: int
    num_captions_lost: int
    num_rejected: dict[str, int]
    num_videos_added: int
    num_videos_removed: int
    num_splits_changed: int
    num_captions_added: int
    num_captions_removed: int
    num_further_kept: int
    num_further_removed: int
    splits: dict[str, tuple[int, int]]


def manifest_dir(data_dir: Path) -> Path:
    """Return the manifest folder of a data folder."""
    return data_dir / MANIFEST_FOLDER


def read_videos(data_dir: Path, *, columns: Sequence[str] = VIDEOS.names) -> pa.Table:
    """Read the videos: columns of schema.VIDEOS.

    Raises:
        UserError: there is no manifest, a write of it was interrupted, or it has too many videos.
    """
    videos = _read(data_dir, VIDEOS_FILE, VIDEOS, columns=columns)
    require_numbers(manifest_dir(data_dir) / VIDEOS_FILE, num_rows=len(videos), videos=videos)
    return videos


def read_captions(data_dir: Path) -> pa.Table:
    """Read the captions: schema.CAPTIONS, schema.LIKELIHOOD if any caption has one, and label_ columns.

    Dictionaries are unified across chunks.

    Raises:
        UserError: see `read_videos`.
    """
    return _read(data_dir, CAPTIONS_FILE, CAPTIONS, coded=_CODED)


def open_captions(data_dir: Path, *, coded: Sequence[str] = ()) -> pq.ParquetFile:
    """Open the captions for reading by row group. The caller closes the file.

    The open table stays unchanged if a new manifest is written meanwhile.

    Args:
        coded: columns to read as dictionaries.

    Raises:
        UserError: see `read_videos`.
    """
    return _read_consistently(data_dir, lambda manifest: _open(data_dir, CAPTIONS_FILE, CAPTIONS, manifest, coded))


def open_videos(data_dir: Path) -> pq.ParquetFile:
    """Open the videos, like `open_captions`."""
    return _read_consistently(data_dir, lambda manifest: _open(data_dir, VIDEOS_FILE, VIDEOS, manifest))


def captions_path(data_dir: Path) -> Path:
    """Return the path of the captions after verifying the checksum. It stays valid until a manifest is written.

    Raises:
        UserError: see `read_videos`.
    """
    return _read_consistently(
        data_dir, lambda manifest: table_path(manifest_dir(data_dir), CAPTIONS_FILE, manifest=manifest)
    )


def read_rejected(data_dir: Path) -> pa.Table:
    """Read the rejected rows, schema.REJECTED.

    Raises:
        UserError: see `read_videos`.
    """
    return _read(data_dir, REJECTED_FILE, REJECTED)


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """Read the content of manifest.json.

    Raises:
        UserError: there is no manifest, or it uses another format.
    """
    path = manifest_dir(data_dir) / MANIFEST_FILE
    try:
        content = read_checked_json(path)
    except FileNotFoundError as error:
        raise UserError(
            f"no manifest in {data_dir}",
            hint=f"create one: prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}", hint="check its permissions") from error
    except ValueError as error:
        raise DamagedManifest(path, str(error)) from error
    if "format" not in content:
        raise DamagedManifest(path, "not a manifest")
    if content["format"] != MANIFEST_FORMAT:
        raise UserError(
            f"{path} has format {content['format']}, but this version of clipmill reads format {MANIFEST_FORMAT}",
            hint="use the version of clipmill that wrote it",
        )
    if not isinstance(content.get("fingerprint"), str):
        raise DamagedManifest(path, "the fingerprint is missing")
    return content


def num_captions_of(data_dir: Path) -> int:
    """Return the number of captions in the manifest according to its entries, without those of further sources."""
    return sum(int(entry.get("num_captions", 0)) for entry in read_manifest(data_dir).get("datasets", {}).values())


def known_files(data_dir: Path, dataset: str) -> dict[str, str]:
    """Return source_id -> file name, without folders, of the videos of `dataset`; empty if no manifest can be read."""
    try:
        videos = read_videos(data_dir)
    except UserError:
        return {}  # missing or damaged, which the write handles
    videos = videos.filter(pc.equal(videos["dataset"], dataset))
    names = (path.rpartition("/")[2] for path in videos["path"].to_pylist())
    return dict(zip(videos["source_id"].to_pylist(), names, strict=True))


def write_manifest(
    data_dir: Path,
    dataset: str,
    videos: pa.Table,
    captions: pa.Table,
    rejected: pa.Table | None = None,
    *,
    num_captions_lost: int = 0,
) -> WriteResult:
    """Replace the rows of `dataset` in the manifest; other datasets are unchanged.

    Known videos keep their rows, new ones are appended. Known captions keep their IDs. Captions of further sources stay
    as long as their videos. A video whose ID already belongs
    to another dataset is rejected together with its captions.

    Args:
        videos: video_id, source_id, path, split, one row per video (the other columns are computed here).
        captions: video_id, begin_s, end_s, text, source, and optionally likelihood and label_ columns (IDs are assigned
            here).
        rejected: schema.REJECTED.

    Raises:
        UserError: the previous manifest is damaged, or captions have the source or labels of others.
    """
    folder = manifest_dir(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    old = previous_manifest(data_dir)
    require_own_sources(captions, old.further, dataset=dataset)
    is_other = pc.not_equal(old.videos["dataset"], dataset)
    other_ids, own_ids = (old.videos.filter(mask)["video_id"] for mask in (is_other, pc.invert(is_other)))
    rejected = REJECTED.empty_table() if rejected is None else rejected
    num_given = captions.num_rows
    videos, captions, rejected = without_taken_ids(dataset, videos, captions, rejected, taken_ids=other_ids)
    num_captions_lost += num_given - captions.num_rows

    video_rows = rows_of(captions["video_id"], videos["video_id"])
    if (video_rows < 0).any():
        raise ValueError("captions refer to a video that is not in the table of videos")
    ids, next_id = stable_ids(
        old, captions, is_replaced=(lambda table: rows_of(table["video_id"], own_ids) >= 0) if len(own_ids) else None
    )
    new = video_table(
        dataset,
        videos,
        num_captions=np.bincount(video_rows, minlength=videos.num_rows),
        digests=captions_sha256(captions, caption_ids=ids, video_rows=video_rows, num_videos=videos.num_rows),
    )
    all_further = FurtherCaptions.read(old)
    further = all_further.of_videos(pa.chunked_array([*other_ids.chunks, *new["video_id"].chunks], pa.string()))
    all_videos = replace_dataset(old.videos, further.added_to(new), dataset=dataset)
    other_rejected = old.rejected.filter(pc.not_equal(old.rejected["dataset"], dataset))
    reasons = {entry["values"]: entry["counts"] for entry in pc.value_counts(rejected["reason"]).to_pylist()}
    entry = {
        "num_videos": videos.num_rows,
        "num_captions": captions.num_rows,
        "num_captions_lost": num_captions_lost,
        "num_rejected": reasons,
    }

    def keep(table: pa.Table) -> np.ndarray:
        is_kept = rows_of(table["video_id"], other_ids) >= 0
        return is_kept | further.select(table) if len(further) else is_kept

    publish_manifest(
        folder,
        old,
        videos=all_videos,
        rejected=pa.concat_tables([other_rejected, rejected.select(REJECTED.names).cast(REJECTED)]),
        captions=captions,
        ids=ids,
        next_id=next_id,
        keep=keep if len(other_ids) or len(further) else None,
        keep_labels=len(other_ids) > 0,
        datasets={**old.datasets, dataset: entry},
        further=further.stored_records(),
    )
    num_added = int((ids >= old.next_caption_id).sum())
    num_before = int(old.datasets.get(dataset, {}).get("num_captions", 0))
    num_kept = pc.sum(pc.is_in(own_ids, value_set=videos["video_id"].combine_chunks())).as_py() or 0
    return WriteResult(
        folder=folder,
        dataset=dataset,
        num_videos=videos.num_rows,
        num_captions=captions.num_rows,
        num_captions_lost=num_captions_lost,
        num_rejected=reasons,
        num_videos_added=videos.num_rows - num_kept,
        num_videos_removed=len(own_ids) - num_kept,
        num_splits_changed=num_other_splits(old.videos, new),
        num_captions_added=num_added,
        num_captions_removed=max(0, num_before - (captions.num_rows - num_added)),
        num_further_kept=len(further),
        num_further_removed=len(all_further) - len(further),
        splits=_splits(videos, video_rows),
    )


def _splits(videos: pa.Table, video_rows: np.ndarray) -> dict[str, tuple[int, int]]:
    """Return the number of videos and of captions by split; `video_rows` int64[N]: the video of each caption."""
    coded = videos["split"].combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy()
    names = coded.dictionary.to_pylist()
    num_videos, num_captions = (np.bincount(found, minlength=len(names)) for found in (codes, codes[video_rows]))
    counts = zip(names, zip(num_videos.tolist(), num_captions.tolist(), strict=True), strict=True)
    return dict(sorted(counts, key=lambda entry: -entry[1][0]))


def previous_manifest(data_dir: Path) -> PreviousManifest:
    """Return the state that a write to a data folder starts from."""
    folder = manifest_dir(data_dir)
    if not (folder / MANIFEST_FILE).exists():
        return read_previous(folder, None)
    try:
        return read_previous(folder, read_manifest(data_dir))
    except DamagedManifest as damage:
        return read_previous(folder, None, damage=damage)


def _read(
    data_dir: Path,
    name: str,
    schema: pa.Schema,
    *,
    coded: Sequence[str] = (),
    columns: Sequence[str] | None = None,
) -> pa.Table:
    def read(manifest: dict[str, Any]) -> pa.Table:
        with _open(data_dir, name, schema, manifest, coded) as file:
            table = file.read(columns=columns)  # one chunk per row group, while `read_table` returns many
        return table if columns is None else table.select(columns)

    return _read_consistently(data_dir, read).replace_schema_metadata().unify_dictionaries()


def _open(
    data_dir: Path, name: str, schema: pa.Schema, manifest: Mapping[str, Any], coded: Sequence[str] = ()
) -> pq.ParquetFile:
    path = table_path(manifest_dir(data_dir), name, manifest=manifest)
    file = pq.ParquetFile(path, read_dictionary=list(coded))
    try:
        found = file.schema_arrow
        if (found.metadata or {}).get(FINGERPRINT_KEY, b"").decode("ascii", "replace") != manifest["fingerprint"]:
            raise DamagedManifest(path, f"it does not belong to {MANIFEST_FILE}: a write was interrupted")
        missing = [field.name for field in schema if field.name not in found.names]
        if missing:
            raise DamagedManifest(path, f"column {missing[0]} is missing")
        require_numbers(path, num_rows=file.metadata.num_rows)
    except UserError:
        file.close()
        raise
    return file


def _read_consistently(data_dir: Path, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Return `read(content of manifest.json)`, retried in case another manifest was published meanwhile."""
    for is_last in (False, False, True):
        manifest = read_manifest(data_dir)
        try:
            return read(manifest)
        except (UserError, OSError, pa.ArrowException) as error:
            if not is_last:
                continue
            if isinstance(error, UserError):
                raise
            raise UserError(f"the manifest in {data_dir} cannot be read: {error}", hint=REPAIR_HINT) from error
    raise AssertionError("the last attempt returns or raises")
