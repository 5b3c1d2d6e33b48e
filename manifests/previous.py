"""Read the manifest before a write, and merge a dataset into it: videos keep their order, and captions keep their IDs.

Only a complete manifest is used. If files of the manifest are damaged, a write is allowed only if it restores exactly
the same tables, because different caption IDs would silently change the meaning of all shards that refer to captions.

A caption is identified by (video_id, begin_s, end_s, text, source). If several captions are equal, the n-th new one is
matched with the n-th old one. Captions are compared by 128-bit hashes: millions of captions are matched by sorting
integers, and the old texts need not stay in memory. The hash is multilinear with random weights (Carter & Wegman 1979,
two independent 64-bit lanes). Hashes are never stored.
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
from clipmill.manifests.caption_table import Selection, selected_batches
from clipmill.manifests.errors import UserError
from clipmill.manifests.schema import CAPTIONS, DATASET_DIGEST, REJECTED, VIDEOS
from clipmill.manifests.store import (
    CAPTIONS_FILE,
    FINGERPRINT_KEY,
    REJECTED_FILE,
    TABLE_FILES,
    VIDEOS_FILE,
    DamagedManifest,
    table_path,
)

FURTHER_KEY = "further_sources"  # key in manifest.json, which is missing if there are no further sources


@dataclass(frozen=True)
class PreviousManifest:
    """Content of the manifest before a write. The tables are empty if the manifest is missing or damaged.

    Attributes:
        videos: Table of schema.VIDEOS and schema.DATASET_DIGEST.
        rejected: Table of schema.REJECTED.
        captions_path: Path of the verified table of captions; None if the manifest is missing or damaged.
        next_caption_id: Lowest ID that has never been assigned to a caption.
        datasets: Record of each dataset, by name.
        further_records: Record of each further source of captions, by name (clipmill.manifests.further_sources).
        damage: Reason why an existing manifest cannot be read; otherwise, None.
        fingerprint: Fingerprint of a damaged manifest, if known.
    """

    videos: pa.Table = field(default_factory=VIDEOS.append(DATASET_DIGEST).empty_table)
    rejected: pa.Table = field(default_factory=REJECTED.empty_table)
    captions_path: Path | None = None
    next_caption_id: int = 0
    datasets: Mapping[str, Any] = field(default_factory=dict)
    further_records: Mapping[str, Any] = field(default_factory=dict)
    damage: DamagedManifest | None = None
    fingerprint: str | None = None

    def require_same(self, fingerprint: str) -> None:
        """Raise UserError if the manifest is damaged and a write with this fingerprint would not restore it."""
        if self.damage is None or fingerprint == self.fingerprint:
            return
        steps = f" ({', '.join(self.datasets)})" if self.datasets else ""
        if self.further_records:
            steps += f", then `prep manifest captions` for the added sources ({', '.join(self.further_records)}),"
        raise UserError(
            f"{self.damage}; this command cannot restore the manifest, because caption IDs would change",
            hint=f"restore {self.damage.path.parent} from a backup, or remove it and run `prep manifest` again "
            f"for each dataset{steps} in the same order",
        )


def read_previous(
    folder: Path, manifest: Mapping[str, Any] | None, *, damage: DamagedManifest | None = None
) -> PreviousManifest:
    """Read the tables of the manifest in `folder` before a write.

    Args:
        manifest: Content of manifest.json, or None if the file is missing or damaged.
        damage: Reason why manifest.json cannot be read.
    """
    if manifest is None:
        fingerprint = _common_fingerprint(folder)
        if damage is None and fingerprint is not None:
            damage = DamagedManifest(folder / "manifest.json", "the file is missing")
        return PreviousManifest(damage=damage, fingerprint=fingerprint)
    try:
        paths = {name: table_path(folder, name, manifest=manifest) for name in TABLE_FILES}
        videos = pq.read_table(paths[VIDEOS_FILE]).replace_schema_metadata()
        if DATASET_DIGEST.name not in videos.column_names:
            videos = videos.append_column(DATASET_DIGEST, pa.nulls(videos.num_rows, DATASET_DIGEST.type))
        return PreviousManifest(
            videos=videos,
            rejected=pq.read_table(paths[REJECTED_FILE]).replace_schema_metadata(),
            captions_path=paths[CAPTIONS_FILE],
            next_caption_id=manifest["next_caption_id"],
            datasets=manifest["datasets"],
            further_records=manifest.get(FURTHER_KEY, {}),
        )
    except (OSError, pa.ArrowException) as error:
        damage = DamagedManifest(folder / "*.parquet", str(error))
    except DamagedManifest as error:
        damage = error
    return PreviousManifest(
        next_caption_id=manifest.get("next_caption_id", 0),
        datasets=manifest.get("datasets", {}),
        further_records=manifest.get(FURTHER_KEY, {}),
        damage=damage,
        fingerprint=manifest["fingerprint"],
    )


def stable_ids(
    previous: PreviousManifest, captions: pa.Table, *, is_replaced: Selection | None
) -> tuple[np.ndarray, int, int]:
    """Assign IDs to new captions. A new caption that equals a replaced caption gets that caption's ID.

    Args:
        is_replaced: Function that selects the previous captions to replace. None replaces no captions.

    Returns:
        The IDs of `captions`, int64[N], the first ID that is still free, and the number of captions that equal an
        earlier caption in `captions`.
    """
    hashes = caption_hashes(captions)
    old_hashes, old_ids = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)]
    if previous.captions_path is not None and is_replaced is not None:
        for table in selected_batches(previous.captions_path, is_replaced, columns=CAPTIONS.names):
            old_hashes.append(caption_hashes(table))
            old_ids.append(table["caption_id"].to_numpy())
    ids, next_id = assign_ids(
        hashes,
        old_hashes=np.concatenate(old_hashes),
        old_ids=np.concatenate(old_ids),
        next_id=previous.next_caption_id if previous.damage is None else 0,
    )
    first_lane, part = hashes[:, 0], _part_numbers(hashes)
    num_distinct = sum(len(np.unique(first_lane[part == number])) for number in range(_NUM_PARTS))
    return ids, max(next_id, previous.next_caption_id), len(hashes) - num_distinct


def _common_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of all three tables, or None if the tables do not match or cannot be read."""
    fingerprints = set()
    for name in TABLE_FILES:
        try:
            fingerprints.add((pq.read_schema(folder / name).metadata or {}).get(FINGERPRINT_KEY))
        except (OSError, pa.ArrowException):
            return None
    fingerprint = fingerprints.pop() if len(fingerprints) == 1 else None
    return fingerprint.decode("ascii", "replace") if fingerprint is not None else None


def reject_taken_ids(
    dataset: str, videos: pa.Table, captions: pa.Table, rejected: pa.Table, *, taken_ids: pa.ChunkedArray
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Move the videos whose IDs belong to other datasets to the rejected rows, and drop the captions of these videos.

    Args:
        taken_ids: IDs of the videos of other datasets.

    Returns:
        The remaining videos, the remaining captions, and all rejected rows.
    """
    is_taken = pc.is_in(videos["video_id"], value_set=taken_ids.combine_chunks())
    if not pc.any(is_taken).as_py():
        return videos, captions, rejected
    removed_videos, videos = videos.filter(is_taken), videos.filter(pc.invert(is_taken))
    owner = find_rows(captions["video_id"], removed_videos["video_id"])
    num_lost = np.bincount(owner[owner >= 0], minlength=removed_videos.num_rows)
    rows = pa.table(
        {
            "dataset": [dataset] * removed_videos.num_rows,
            "file": removed_videos["path"],
            "row": pa.nulls(removed_videos.num_rows, pa.int64()),
            "source_id": removed_videos["source_id"],
            "reason": [Reason.DUPLICATE_ID.value] * removed_videos.num_rows,
            "detail": [f"another dataset has a video with the same ID; captions lost: {count}" for count in num_lost],
        },
        schema=REJECTED,
    )
    return videos, captions.filter(pa.array(owner < 0)), pa.concat_tables([rejected, rows])


def find_rows(column: pa.ChunkedArray, values: pa.ChunkedArray) -> np.ndarray:
    """Find each element of a dictionary-encoded column in `values`; return row indices int32[N], -1 if missing."""
    column = column.unify_dictionaries()
    if column.num_chunks == 0:
        return np.empty(0, np.int32)
    row_of_code = pc.index_in(column.chunk(0).dictionary, value_set=values.combine_chunks())
    row_of_code = row_of_code.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.concatenate([row_of_code[chunk.indices.to_numpy(zero_copy_only=False)] for chunk in column.chunks])


def video_table(dataset: str, videos: pa.Table, *, num_captions: np.ndarray, digests: list[str]) -> pa.Table:
    """Build the table of one dataset's videos, with the columns of schema.VIDEOS and schema.DATASET_DIGEST."""
    columns = {name: videos[name] for name in ("video_id", "source_id", "path", "split")}
    columns["dataset"] = pa.array([dataset] * videos.num_rows, pa.string())
    columns["num_captions"] = pa.array(num_captions.astype(np.int32))
    columns["captions_sha256"] = pa.array(digests, pa.string())
    columns[DATASET_DIGEST.name] = pa.nulls(videos.num_rows, DATASET_DIGEST.type)
    return pa.table(columns, schema=VIDEOS.append(DATASET_DIGEST))


def count_changed_splits(old_videos: pa.Table, new_videos: pa.Table) -> int:
    """Count the videos that are in both tables, but in different splits."""
    rows = pc.index_in(new_videos["video_id"].combine_chunks(), value_set=old_videos["video_id"].combine_chunks())
    is_known = pc.is_valid(rows)
    old_splits = old_videos["split"].combine_chunks().take(rows.filter(is_known))
    return pc.sum(pc.not_equal(old_splits, new_videos["split"].combine_chunks().filter(is_known))).as_py() or 0


def replace_dataset(old_videos: pa.Table, new_videos: pa.Table, *, dataset: str) -> pa.Table:
    """Replace the videos of `dataset`. Videos in both tables keep their order, and other new videos are appended."""
    old_ids = old_videos["video_id"].combine_chunks()
    position = pc.index_in(new_videos["video_id"], value_set=old_ids).to_numpy(zero_copy_only=False)
    appended = old_videos.num_rows + np.arange(new_videos.num_rows)
    position = np.where(np.isnan(position.astype(float)), appended, position)
    is_other = pc.not_equal(old_videos["dataset"], dataset)
    other_position = np.flatnonzero(is_other.to_numpy(zero_copy_only=False))
    order = np.argsort(np.concatenate([other_position, position]), kind="stable")
    return pa.concat_tables([old_videos.filter(is_other), new_videos]).take(pa.array(order)).combine_chunks()


def tables_fingerprint(*tables: pa.Table) -> str:
    """Return a fingerprint that identifies a write: the SHA-256 of tables of strings and integers, in hexadecimal."""
    sha256 = hashlib.sha256()
    for table in tables:
        for batch in table.to_batches(max_chunksize=65_536):
            for column in batch.columns:
                sha256.update(repr(column.to_pylist()).encode())
    return sha256.hexdigest()


_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_NUM_LANES = 2
_LANE_STEPS = (_GOLDEN_RATIO, np.uint64(0xD1B54A32D192ED03))
_ROWS_PER_BATCH = 32_768
_NUM_PARTS = 16  # a power of two


def caption_hashes(captions: pa.Table) -> np.ndarray:
    """Return hashes of captions, uint64[N, 2].

    Args:
        captions: Columns video_id and source (both dictionary-encoded), begin_s, end_s and text.
    """
    captions = captions.select(["video_id", "source", "begin_s", "end_s", "text"]).unify_dictionaries()
    hashes = np.empty((captions.num_rows, _NUM_LANES), np.uint64)
    value_hashes: dict[str, np.ndarray] = {}
    begin = 0
    for batch in captions.to_batches(max_chunksize=_ROWS_PER_BATCH):
        part = _hash_strings(batch["text"])
        for name in ("video_id", "source"):
            if name not in value_hashes:
                value_hashes[name] = _hash_strings(batch[name].dictionary)
            _mix(part, value_hashes[name][batch[name].indices.to_numpy()])
        for name in ("begin_s", "end_s"):
            # The sum converts -0.0 to 0.0.
            _mix(part, (batch[name].to_numpy() + 0.0).view(np.uint64)[:, None])
        hashes[begin : begin + len(part)] = part
        begin += len(part)
    return hashes


def assign_ids(
    hashes: np.ndarray, *, old_hashes: np.ndarray, old_ids: np.ndarray, next_id: int
) -> tuple[np.ndarray, int]:
    """Assign an ID to each caption: the ID of the old caption with the same hash, otherwise the next free ID.

    Args:
        hashes: Hashes of the captions, uint64[N, 2].
        old_hashes: Hashes of the old captions, uint64[M, 2].
        old_ids: IDs of the old captions, int64[M].
        next_id: First free ID. New captions get consecutive IDs in the order of their rows.

    Returns:
        The IDs, int64[N], and the first ID that is still free.
    """
    ids = np.full(len(hashes), -1, np.int64)
    if len(old_ids):
        # Captions are matched in parts by hash value, so that sorting needs only a fraction of the memory.
        part, old_part = _part_numbers(hashes), _part_numbers(old_hashes)
        for number in range(_NUM_PARTS):
            rows, old_rows = np.flatnonzero(part == number), np.flatnonzero(old_part == number)
            matches, old_matches = _match(hashes[rows], old_hashes[old_rows])
            ids[rows[matches]] = old_ids[old_rows[old_matches]]
    new_rows = np.flatnonzero(ids < 0)
    ids[new_rows] = np.arange(next_id, next_id + len(new_rows))
    return ids, next_id + len(new_rows)


def _part_numbers(hashes: np.ndarray) -> np.ndarray:
    return (hashes[:, 0] >> np.uint64(64 - _NUM_PARTS.bit_length() + 1)).astype(np.uint8)


def _match(hashes: np.ndarray, old_hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of matching captions in `hashes` and in `old_hashes`."""
    if not len(old_hashes):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys, old_keys = _rank_keys(hashes), _rank_keys(old_hashes)
    order, old_order = np.argsort(keys), np.argsort(old_keys)
    keys, old_keys = keys[order], old_keys[old_order]
    position = np.minimum(np.searchsorted(old_keys, keys), len(old_keys) - 1)
    rows, old_rows = order, old_order[position]
    is_equal = (old_keys[position] == keys) & (old_hashes[old_rows, 1] == hashes[rows, 1])
    return rows[is_equal], old_rows[is_equal]


def _rank_keys(hashes: np.ndarray) -> np.ndarray:
    """Return keys uint64[N] that distinguish equal captions.

    A key is the first lane of the hash, plus the number of equal captions in earlier rows times a constant.
    """
    keys = hashes[:, 0].copy()
    order = np.argsort(keys)
    sorted_keys = keys[order]
    repeats = sorted_keys[1:] == sorted_keys[:-1]
    is_repeated = np.zeros(len(keys), bool)
    is_repeated[order[1:][repeats]] = is_repeated[order[:-1][repeats]] = True
    rows = np.flatnonzero(is_repeated)
    if not len(rows):
        return keys
    groups = np.lexsort((hashes[rows, 1], hashes[rows, 0]))
    grouped_hashes = hashes[rows[groups]]
    begins_group = np.ones(len(rows), bool)
    begins_group[1:] = (grouped_hashes[1:] != grouped_hashes[:-1]).any(axis=1)
    position = np.arange(len(rows))
    rank = position - np.maximum.accumulate(np.where(begins_group, position, 0))
    keys[rows[groups]] += rank.astype(np.uint64) * _GOLDEN_RATIO
    return keys


def _mix(hashes: np.ndarray, values: np.ndarray) -> None:
    """Mix values, uint64[N, 1 or 2], into hashes, uint64[N, 2], in place with the finalizer of SplitMix64."""
    hashes ^= values
    for lane in range(_NUM_LANES):
        column = hashes[:, lane]
        column += _LANE_STEPS[lane]
        column ^= column >> np.uint64(30)
        column *= np.uint64(0xBF58476D1CE4E5B9)
        column ^= column >> np.uint64(27)
        column *= np.uint64(0x94D049BB133111EB)
        column ^= column >> np.uint64(31)


def _hash_strings(strings: pa.Array) -> np.ndarray:
    """Return hashes of strings, uint64[N, 2]."""
    _, offset_buffer, data_buffer = strings.buffers()
    hashes = np.zeros((len(strings), _NUM_LANES), np.uint64)
    if data_buffer is None or offset_buffer is None:
        return hashes
    offsets = np.frombuffer(offset_buffer, np.int32)[strings.offset : strings.offset + len(strings) + 1]
    lengths = np.diff(offsets)
    nonempty = np.flatnonzero(lengths)
    if not len(nonempty):
        return hashes
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    starts = (offsets[:-1] - offsets[0])[nonempty]
    position = np.arange(len(data)) - np.repeat(starts, lengths[nonempty])
    # The added 1 makes zero bytes count: strings that differ only in trailing zero bytes have different hashes.
    symbols = data.astype(np.uint64) + np.uint64(1)
    for lane in range(_NUM_LANES):
        weights = np.random.PCG64(lane).random_raw(int(lengths.max()))
        hashes[nonempty, lane] = np.add.reduceat(weights[position] * symbols, starts)
    return hashes


_WHITESPACE = r"[\s\p{Z}]+"


def is_unlikely(captions: pa.Table, *, min_likelihood: float) -> np.ndarray:
    """Return bool[N], True for captions whose likelihood is known and below `min_likelihood`."""
    # The bound is float32 like the column, so that a caption with exactly this likelihood is not below the bound.
    unlikely = pc.less(captions["likelihood"], pa.scalar(min_likelihood, pa.float32()))
    return np.asarray(unlikely.fill_null(False).to_numpy())


def is_duplicate(captions: pa.Table) -> np.ndarray:
    """Return bool[N], True for captions that repeat another caption with the same span and source.

    The comparison ignores case and the kind and amount of whitespace. Of several equal captions, the first caption with
    the highest likelihood is not a duplicate.
    """
    if not captions.num_rows:
        return np.zeros(0, bool)
    texts = pc.replace_substring_regex(captions["text"], _WHITESPACE, " ")
    texts = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
    hashes = caption_hashes(captions.set_column(captions.column_names.index("text"), "text", texts))
    likelihood = captions["likelihood"].fill_null(-np.inf).to_numpy()
    order = np.lexsort((-likelihood, hashes[:, 1], hashes[:, 0]))
    repeats = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    duplicates = np.zeros(captions.num_rows, bool)
    duplicates[order[1:][repeats]] = True
    return duplicates
