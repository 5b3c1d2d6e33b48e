"""The manifest before a write: order of videos, other datasets and caption IDs; merging a dataset with it.

Only a complete manifest is used. If its files are damaged, a write may only restore exactly the same tables: other
caption IDs would silently change the meaning of every shard that refers to captions.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.adapters.annotations import Reason
from clipmill.manifests.caption_identity import assign_ids, caption_hashes
from clipmill.manifests.caption_table import Selection, kept_batches
from clipmill.manifests.errors import UserError
from clipmill.manifests.schema import CAPTIONS, OWN_DIGEST, REJECTED, VIDEOS
from clipmill.manifests.store import (
    CAPTIONS_FILE,
    FINGERPRINT_KEY,
    REJECTED_FILE,
    TABLE_FILES,
    VIDEOS_FILE,
    DamagedManifest,
    table_path,
)

FURTHER_KEY = "further_sources"  # key of manifest.json; missing if there are none


@dataclass(frozen=True)
class PreviousManifest:
    """The state before a write.

    Attributes:
        videos: Table of schema.VIDEOS and schema.OWN_DIGEST.
        captions_path: Valid caption table, or None if there is none.
        further: Name -> record of each further source of captions (clipmill.manifests.further_sources).
        damage: Reason why the tables of an existing manifest cannot be read; all other fields are then empty.
        fingerprint: Fingerprint of the damaged manifest, if known.
    """

    videos: pa.Table = field(default_factory=VIDEOS.append(OWN_DIGEST).empty_table)
    rejected: pa.Table = field(default_factory=REJECTED.empty_table)
    captions_path: Path | None = None
    next_caption_id: int = 0
    datasets: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    damage: DamagedManifest | None = None
    fingerprint: str | None = None

    def require_same(self, fingerprint: str) -> None:
        """Raise UserError if the manifest is damaged and a write with this fingerprint would not restore it."""
        if self.damage is None or fingerprint == self.fingerprint:
            return
        others = f" ({', '.join(self.datasets)})" if self.datasets else ""
        if self.further:
            others += f", then `prep manifest captions` for the added sources ({', '.join(self.further)}),"
        raise UserError(
            f"{self.damage}; this command cannot restore the manifest: caption IDs would change",
            hint=f"restore {self.damage.path.parent} from a backup, or remove it and run `prep manifest` again "
            f"for each dataset{others} in the same order",
        )


def read_previous(
    folder: Path, manifest: Mapping[str, Any] | None, *, damage: DamagedManifest | None = None
) -> PreviousManifest:
    """Read the state before a write to the manifest in `folder`.

    Args:
        manifest: Content of manifest.json, or None if it is missing or damaged.
        damage: Reason why it cannot be read.
    """
    if manifest is None:
        fingerprint = _common_fingerprint(folder)
        if damage is None and fingerprint is not None:
            damage = DamagedManifest(folder / "manifest.json", "the file is missing")
        return PreviousManifest(damage=damage, fingerprint=fingerprint)
    try:
        paths = {name: table_path(folder, name, manifest=manifest) for name in TABLE_FILES}
        videos = pq.read_table(paths[VIDEOS_FILE]).replace_schema_metadata()
        if OWN_DIGEST.name not in videos.column_names:
            videos = videos.append_column(OWN_DIGEST, pa.nulls(videos.num_rows, OWN_DIGEST.type))
        return PreviousManifest(
            videos=videos,
            rejected=pq.read_table(paths[REJECTED_FILE]).replace_schema_metadata(),
            captions_path=paths[CAPTIONS_FILE],
            next_caption_id=manifest["next_caption_id"],
            datasets=manifest["datasets"],
            further=manifest.get(FURTHER_KEY, {}),
        )
    except (OSError, pa.ArrowException) as error:
        damage = DamagedManifest(folder / "*.parquet", str(error))
    except DamagedManifest as error:
        damage = error
    return PreviousManifest(
        next_caption_id=manifest.get("next_caption_id", 0),
        datasets=manifest.get("datasets", {}),
        further=manifest.get(FURTHER_KEY, {}),
        damage=damage,
        fingerprint=manifest["fingerprint"],
    )


def stable_ids(
    previous: PreviousManifest, captions: pa.Table, *, is_replaced: Selection | None
) -> tuple[np.ndarray, int]:
    """Return IDs int64[N] for `captions`, and the next free ID. A caption that equals a replaced caption gets its ID.

    Args:
        is_replaced: Function that selects the captions to be replaced; None if there are none.
    """
    hashes = caption_hashes(captions)
    old_hashes, old_ids = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)]
    if previous.captions_path is not None and is_replaced is not None:
        for table in kept_batches(previous.captions_path, is_replaced, columns=CAPTIONS.names):
            old_hashes.append(caption_hashes(table))
            old_ids.append(table["caption_id"].to_numpy())
    ids, next_id = assign_ids(
        hashes,
        old_hashes=np.concatenate(old_hashes),
        old_ids=np.concatenate(old_ids),
        next_id=previous.next_caption_id if previous.damage is None else 0,
    )
    return ids, max(next_id, previous.next_caption_id)


def _common_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of all three tables, or None if they are not from the same write."""
    fingerprints = set()
    for name in TABLE_FILES:
        try:
            fingerprints.add((pq.read_schema(folder / name).metadata or {}).get(FINGERPRINT_KEY))
        except (OSError, pa.ArrowException):
            return None
    fingerprint = fingerprints.pop() if len(fingerprints) == 1 else None
    return fingerprint.decode("ascii", "replace") if fingerprint is not None else None


def without_taken_ids(
    dataset: str, videos: pa.Table, captions: pa.Table, rejected: pa.Table, *, taken_ids: pa.ChunkedArray
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Remove the videos whose IDs are in `taken_ids`; they become rejected rows.

    Return (videos, captions, rejected).
    """
    is_taken = pc.is_in(videos["video_id"], value_set=taken_ids.combine_chunks())
    if not pc.any(is_taken).as_py():
        return videos, captions, rejected
    refused, videos = videos.filter(is_taken), videos.filter(pc.invert(is_taken))
    owner = rows_of(captions["video_id"], refused["video_id"])
    num_lost = np.bincount(owner[owner >= 0], minlength=refused.num_rows)
    rows = pa.table(
        {
            "dataset": [dataset] * refused.num_rows,
            "file": refused["path"],
            "row": pa.nulls(refused.num_rows, pa.int64()),
            "source_id": refused["source_id"],
            "reason": [Reason.DUPLICATE_ID.value] * refused.num_rows,
            "detail": [f"another dataset has a video with the same ID; captions lost: {count}" for count in num_lost],
        },
        schema=REJECTED,
    )
    return videos, captions.filter(pa.array(owner < 0)), pa.concat_tables([rejected, rows])


def rows_of(column: pa.ChunkedArray, values: pa.ChunkedArray) -> np.ndarray:
    """Return the row in `values` for each element of a dictionary-encoded column, int32[N]; -1 if it is missing."""
    column = column.unify_dictionaries()
    if column.num_chunks == 0:
        return np.empty(0, np.int32)
    row_of_code = pc.index_in(column.chunk(0).dictionary, value_set=values.combine_chunks())
    row_of_code = row_of_code.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.concatenate([row_of_code[chunk.indices.to_numpy(zero_copy_only=False)] for chunk in column.chunks])


def video_table(dataset: str, videos: pa.Table, *, num_captions: np.ndarray, digests: list[str]) -> pa.Table:
    """Build the rows of one dataset: schema.VIDEOS and schema.OWN_DIGEST."""
    columns = {name: videos[name] for name in ("video_id", "source_id", "path", "split")}
    columns["dataset"] = pa.array([dataset] * videos.num_rows, pa.string())
    columns["num_captions"] = pa.array(num_captions.astype(np.int32))
    columns["captions_sha256"] = pa.array(digests, pa.string())
    columns[OWN_DIGEST.name] = pa.nulls(videos.num_rows, OWN_DIGEST.type)
    return pa.table(columns, schema=VIDEOS.append(OWN_DIGEST))


def num_other_splits(old: pa.Table, new: pa.Table) -> int:
    """Return the number of videos that are in both tables, with different splits."""
    rows = pc.index_in(new["video_id"].combine_chunks(), value_set=old["video_id"].combine_chunks())
    is_known = pc.is_valid(rows)
    before = old["split"].combine_chunks().take(rows.filter(is_known))
    return pc.sum(pc.not_equal(before, new["split"].combine_chunks().filter(is_known))).as_py() or 0


def replace_dataset(old: pa.Table, new: pa.Table, *, dataset: str) -> pa.Table:
    """Replace the videos of `dataset` in `old` with `new`: known videos keep their rows, others are appended."""
    position = pc.index_in(new["video_id"], value_set=old["video_id"].combine_chunks()).to_numpy(zero_copy_only=False)
    position = np.where(np.isnan(position.astype(float)), old.num_rows + np.arange(new.num_rows), position)
    is_other = pc.not_equal(old["dataset"], dataset)
    other_position = np.flatnonzero(is_other.to_numpy(zero_copy_only=False))
    order = np.argsort(np.concatenate([other_position, position]), kind="stable")
    return pa.concat_tables([old.filter(is_other), new]).take(pa.array(order)).combine_chunks()


def tables_fingerprint(*tables: pa.Table) -> str:
    """Hash tables of strings and integers. The result identifies the files of one write."""
    sha256 = hashlib.sha256()
    for table in tables:
        for batch in table.to_batches(max_chunksize=65_536):
            for column in batch.columns:
                sha256.update(repr(column.to_pylist()).encode())
    return sha256.hexdigest()
