"""Write the manifest: replace the rows of one dataset, or captions that `prep manifest captions` adds.

Every write ends with `publish_manifest`, which publishes all tables together.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from clipmill.manifests.caption_spans import write_caption_spans
from clipmill.manifests.caption_table import CaptionChange, captions_sha256, write_caption_table
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.further_sources import (
    FurtherCaptions,
    reject_further_sources,
    select_sources,
    source_counts,
    source_name,
)
from clipmill.manifests.previous import (
    FURTHER_KEY,
    PreviousManifest,
    count_changed_splits,
    find_rows,
    read_previous,
    reject_taken_ids,
    replace_dataset,
    stable_ids,
    tables_fingerprint,
    video_table,
)
from clipmill.manifests.publish import publish_atomically, publish_checked_json
from clipmill.manifests.schema import DATASET_DIGEST, MANIFEST_FILE, MANIFEST_FORMAT, REJECTED
from clipmill.manifests.store import (
    CAPTIONS_FILE,
    FINGERPRINT_KEY,
    MAPPED_FILES,
    REJECTED_FILE,
    REJECTED_LIST,
    SPANS_FILE,
    TABLE_FILES,
    TEXTS_FILE,
    VIDEOS_FILE,
    DamagedManifest,
    check_table_size,
    file_entry,
    manifest_dir,
    promote,
    read_manifest,
    staged_path,
)

# Value of the column `dataset` for rows that `prep manifest captions` rejects. Its next run replaces them.
FURTHER = "further captions"
_MAX_REMOVED_FRACTION = 1 / 3  # fraction of a dataset's videos; removing more is probably a mistake
_MAX_LISTED = 3  # maximum number of videos listed in a message


@dataclass(frozen=True)
class WriteResult:
    """Result of writing a dataset to the manifest. Videos and captions of other datasets are not counted.

    Attributes:
        folder: Folder of the manifest.
        num_captions_lost: Number of captions that were lost because their videos are missing or rejected.
        num_captions_repeated: Number of captions that equal an earlier caption: video, times, source and text.
        num_rejected: Number of rejected files and rows, by reason.
        num_files_rejected: Number of rejected files, not counting individually rejected rows.
        num_splits_changed: Number of videos whose split differs from their split in the previous manifest.
        num_further_kept: Number of captions from further sources in the manifest.
        num_further_removed: Number of captions from further sources that were removed with their videos.
        splits: Number of videos and number of captions of the dataset, by split.
    """

    folder: Path
    dataset: str
    num_videos: int
    num_captions: int
    num_captions_lost: int
    num_captions_repeated: int
    num_rejected: dict[str, int]
    num_files_rejected: int
    num_videos_added: int
    num_videos_removed: int
    num_splits_changed: int
    num_captions_added: int
    num_captions_removed: int
    num_further_kept: int
    num_further_removed: int
    splits: dict[str, tuple[int, int]]


def write_manifest(
    data_dir: Path,
    dataset: str,
    videos: pa.Table,
    captions: pa.Table,
    rejected: pa.Table | None = None,
    *,
    num_captions_lost: int = 0,
    allows_removal: bool = True,
) -> WriteResult:
    """Replace the rows of one dataset in the manifest. Other datasets do not change.

    Videos that are already in the manifest keep their order, and new videos are appended. Captions that are already in
    the manifest keep their IDs. Captions from further sources are removed only together with their videos. A video is
    rejected with its captions if a different dataset has a video with the same ID.

    Args:
        videos: Columns video_id, source_id, path, split, one row per video. The other columns are computed here.
        captions: Columns video_id, begin_s, end_s, text, source, and any optional and label_ columns. IDs are assigned
            here.
        rejected: Table of schema.REJECTED.
        num_captions_lost: Number of captions that the adapter could not use, because their videos are missing.
        allows_removal: True to allow the removal of more than a third of the dataset's videos.

    Raises:
        UserError: The previous manifest is damaged, captions use the name of a further source, labels have a different
            type than in the manifest, a table would be too large, or too many videos would be removed.
        ValueError: A caption refers to a video that is not in `videos`.
    """
    folder = manifest_dir(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    old = previous_manifest(data_dir)
    reject_further_sources(captions, old.further_records, dataset=dataset)
    is_other = pc.not_equal(old.videos["dataset"], dataset)
    other_ids, dataset_ids = (old.videos.filter(mask)["video_id"] for mask in (is_other, pc.invert(is_other)))
    rejected = REJECTED.empty_table() if rejected is None else rejected
    num_input_captions = captions.num_rows
    videos, captions, rejected = reject_taken_ids(dataset, videos, captions, rejected, taken_ids=other_ids)
    num_captions_lost += num_input_captions - captions.num_rows

    video_rows = find_rows(captions["video_id"], videos["video_id"])
    if (video_rows < 0).any():
        raise ValueError("captions refer to a video that is not in the table of videos")
    ids, next_id, num_repeated = stable_ids(
        old,
        captions,
        is_replaced=(lambda table: find_rows(table["video_id"], dataset_ids) >= 0) if len(dataset_ids) else None,
    )
    new_videos = video_table(
        dataset,
        videos,
        num_captions=np.bincount(video_rows, minlength=videos.num_rows),
        digests=captions_sha256(captions, caption_ids=ids, video_rows=video_rows, num_videos=videos.num_rows),
    )
    further_captions = FurtherCaptions.read(old)
    kept_ids = pa.chunked_array([*other_ids.chunks, *new_videos["video_id"].chunks], pa.string())
    kept_captions = further_captions.select_videos(kept_ids)
    removed_ids = dataset_ids.filter(pc.invert(pc.is_in(dataset_ids, value_set=videos["video_id"].combine_chunks())))
    if not allows_removal and len(removed_ids) > _MAX_REMOVED_FRACTION * len(dataset_ids):
        raise _removal_error(
            removed_ids.to_pylist(), len(dataset_ids), dataset, num_further=len(further_captions) - len(kept_captions)
        )
    all_videos = replace_dataset(old.videos, kept_captions.add_to_videos(new_videos), dataset=dataset)
    other_rejected = old.rejected.filter(pc.not_equal(old.rejected["dataset"], dataset))
    reasons = {entry["values"]: entry["counts"] for entry in pc.value_counts(rejected["reason"]).to_pylist()}
    entry = {
        "num_videos": videos.num_rows,
        "num_captions": captions.num_rows,
        "num_captions_lost": num_captions_lost,
        "num_rejected": reasons,
    }

    def keep(table: pa.Table) -> np.ndarray:
        is_kept = find_rows(table["video_id"], other_ids) >= 0
        return is_kept | kept_captions.select(table) if len(kept_captions) else is_kept

    publish_manifest(
        folder,
        old,
        NewManifest(
            videos=all_videos,
            rejected=pa.concat_tables([other_rejected, rejected.select(REJECTED.names).cast(REJECTED)]),
            captions=CaptionChange(
                captions,
                ids,
                next_id,
                keep=keep if len(other_ids) or len(kept_captions) else None,
                keep_labels=len(other_ids) > 0,
            ),
            datasets={**old.datasets, dataset: entry},
            further_records=kept_captions.nonempty_records(),
        ),
    )
    # Count the videos and the captions by split.
    split_array = videos["split"].combine_chunks().dictionary_encode()
    codes, names = split_array.indices.to_numpy(), split_array.dictionary.to_pylist()
    caption_codes = codes[video_rows]
    if "split" in captions.column_names:
        split = captions["split"].combine_chunks()
        names += sorted(set(pc.unique(split).drop_null().to_pylist()).difference(names))
        caption_codes = np.where(
            split.is_valid(), pc.index_in(split, value_set=pa.array(names)).fill_null(-1), caption_codes
        )
    counts = (np.bincount(part, minlength=len(names)).tolist() for part in (codes, caption_codes))
    splits = dict(zip(names, zip(*counts, strict=True), strict=True))
    num_added = int((ids >= old.next_caption_id).sum())
    num_previous = int(old.datasets.get(dataset, {}).get("num_captions", 0))
    num_kept = len(dataset_ids) - len(removed_ids)
    return WriteResult(
        folder=folder,
        dataset=dataset,
        num_videos=videos.num_rows,
        num_captions=captions.num_rows,
        num_captions_lost=num_captions_lost,
        num_captions_repeated=num_repeated,
        num_rejected=reasons,
        num_files_rejected=rejected["row"].null_count,
        num_videos_added=videos.num_rows - num_kept,
        num_videos_removed=len(removed_ids),
        num_splits_changed=count_changed_splits(old.videos, new_videos),
        num_captions_added=num_added,
        num_captions_removed=max(0, num_previous - (captions.num_rows - num_added)),
        num_further_kept=len(kept_captions),
        num_further_removed=len(further_captions) - len(kept_captions),
        splits=dict(sorted(splits.items(), key=lambda entry: -entry[1][0])),
    )


def _removal_error(removed_ids: list[str], num_previous: int, dataset: str, *, num_further: int) -> UserError:
    """Return the error for a write that would remove too many videos."""
    ids = ", ".join(removed_ids[:_MAX_LISTED])
    more = f", and {len(removed_ids) - _MAX_LISTED:,} more" if len(removed_ids) > _MAX_LISTED else ""
    captions = f", and with them {count_noun(num_further, 'caption')} from added sources" if num_further else ""
    return UserError(
        f"{len(removed_ids):,} of {num_previous:,} videos of dataset {dataset} would be removed from the manifest "
        f"({ids}{more}){captions}",
        hint="check that the folder and the tables are correct; the manifest was not changed. If the videos were "
        "removed or renamed on purpose, add --yes; their chunks stay on disk until you run `prep gc`",
    )


def previous_manifest(data_dir: Path) -> PreviousManifest:
    """Read the manifest of a data folder before a write. The manifest may be missing or damaged."""
    folder = manifest_dir(data_dir)
    if not (folder / MANIFEST_FILE).exists():
        return read_previous(folder, None)
    try:
        return read_previous(folder, read_manifest(data_dir))
    except DamagedManifest as damage:
        return read_previous(folder, None, damage=damage)


@dataclass(frozen=True)
class NewManifest:
    """Content of a manifest that replaces the previous manifest.

    Attributes:
        videos: Table of schema.VIDEOS and schema.DATASET_DIGEST.
        rejected: Table of schema.REJECTED.
        captions: Difference from the captions of the previous manifest.
        datasets, further_records: Records of the datasets and of the further sources, by name.
    """

    videos: pa.Table
    rejected: pa.Table
    captions: CaptionChange
    datasets: Mapping[str, Any]
    further_records: Mapping[str, Any]


def publish_manifest(folder: Path, old: PreviousManifest, new: NewManifest) -> None:
    """Publish a manifest in `folder`.

    Raises:
        UserError: The previous manifest is damaged and `new` would not restore it, labels have a different type than in
            the previous manifest, or a table is too large.
    """
    videos, rejected = new.videos, new.rejected
    if videos[DATASET_DIGEST.name].null_count == videos.num_rows:
        videos = videos.drop_columns([DATASET_DIGEST.name])
    fingerprint = tables_fingerprint(videos, rejected)
    old.require_same(fingerprint)
    check_table_size(folder / VIDEOS_FILE, num_rows=len(videos), videos=videos)
    metadata = {FINGERPRINT_KEY: fingerprint.encode()}
    staged = {name: staged_path(folder, name, fingerprint=fingerprint) for name in (*TABLE_FILES, *MAPPED_FILES)}
    write_caption_table(staged[CAPTIONS_FILE], new.captions, old_path=old.captions_path, metadata=metadata)
    with (
        pq.ParquetFile(staged[CAPTIONS_FILE], read_dictionary=["video_id", "source"], pre_buffer=False) as file,
        publish_atomically(staged[SPANS_FILE]) as spans,
        publish_atomically(staged[TEXTS_FILE]) as texts,
    ):
        check_table_size(folder / CAPTIONS_FILE, num_rows=file.metadata.num_rows)
        video_ids = videos["video_id"].combine_chunks()
        write_caption_spans(file, video_ids, spans=spans, texts=texts, metadata=metadata, scratch_folder=folder)
    for name, table in ((REJECTED_FILE, rejected), (VIDEOS_FILE, videos)):
        with publish_atomically(staged[name]) as temporary:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd")
    publish_checked_json(
        folder / MANIFEST_FILE,
        {
            "format": MANIFEST_FORMAT,
            "fingerprint": fingerprint,
            "next_caption_id": new.captions.next_id,
            "datasets": new.datasets,
            **({FURTHER_KEY: new.further_records} if new.further_records else {}),
            "tables": {name: file_entry(path) for name, path in staged.items()},
        },
    )
    promote(folder, fingerprint=fingerprint)
    row_column = rejected.schema.get_field_index("row")
    readable_rows = rejected.set_column(row_column, "entry", pc.add(rejected["row"], 1))
    with publish_atomically(folder / REJECTED_LIST) as temporary:
        csv.write_csv(readable_rows, temporary)


@dataclass(frozen=True)
class FurtherResult:
    """Result of adding captions from further sources.

    Attributes:
        folder: Folder of the manifest.
        num_captions: Number of captions in the new tables, by source.
        num_added: Number of captions that were not in the manifest before, by source.
        num_removed: Number of previous captions that are not in the new tables, by source.
        num_stale: Number of replaced captions from earlier versions of a model, by source including the version.
    """

    folder: Path
    num_captions: dict[str, int]
    num_added: dict[str, int]
    num_removed: dict[str, int]
    num_stale: dict[str, int]


def write_further_captions(
    data_dir: Path, captions: pa.Table, rejected: pa.Table, *, records: Mapping[str, Mapping[str, Any]]
) -> FurtherResult:
    """Add captions from further sources to videos in the manifest.

    The new captions replace all captions of the same sources, and of earlier versions of these sources. Captions that
    are already in the manifest keep their IDs. Captions of other sources do not change.

    Args:
        captions: Columns video_id, begin_s, end_s, text, source and likelihood. IDs are assigned here.
        rejected: Table of schema.REJECTED.
        records: Record {"kind", "models"} of each source in `captions`, by source name.

    Raises:
        UserError: The manifest is missing or damaged, the name of a source is already in use, or two sources are
            versions of one model.
    """
    old = _require_manifest(data_dir)
    old_counts, further_records = _counts(old.captions_path), old.further_records
    for source, record in records.items():
        kind, old_record = str(record["kind"]), further_records.get(source)
        if old_record is not None and old_record["kind"] != kind:
            raise UserError(
                f"the source {source!r} has captions of a different kind ({old_record['kind']}, not {kind})",
                hint="set a different name for the new captions with --source",
            )
        if source in old_counts and old_record is None:
            raise UserError(
                f"a dataset in the manifest has {count_noun(old_counts[source], 'caption')} with the source {source!r}",
                hint="set a different name for the new captions with --source",
            )
    versions: dict[tuple[str, str], str] = {}
    for source, record in records.items():
        version = versions.setdefault((source_name(source), str(record["kind"])), source)
        if version != source:
            raise UserError(
                f"the tables contain captions from two versions of a model: {version} and {source}",
                hint="pass only the tables of the newer version, or set a different name with --source",
            )
    kinds = {source_name(source): record["kind"] for source, record in records.items()}
    replaced_sources = {
        name for name, record in further_records.items() if kinds.get(source_name(name)) == record["kind"]
    }

    ids = _publish(data_dir, old, captions, rejected, records=records, replaced_sources=replaced_sources)
    is_new = ids >= old.next_caption_id
    counts = (pc.value_counts(captions["source"].filter(pa.array(mask))).to_pylist() for mask in (ids >= 0, is_new))
    num_captions, num_added = (
        dict(sorted((entry["values"], entry["counts"]) for entry in entries)) for entries in counts
    )
    return FurtherResult(
        folder=manifest_dir(data_dir),
        num_captions=num_captions,
        num_added={name: num_added.get(name, 0) for name in num_captions},
        num_removed={
            name: old_counts.get(name, 0) - (count - num_added.get(name, 0)) for name, count in num_captions.items()
        },
        num_stale={name: old_counts[name] for name in sorted(replaced_sources) if name not in records},
    )


def remove_further_sources(data_dir: Path, names: Collection[str]) -> dict[str, int]:
    """Remove the captions of further sources, and return the number of removed captions by source.

    Captions of other sources do not change. If the same tables are added again later, their captions get new IDs.

    Args:
        names: Names of sources. A name without a model version selects all versions.

    Raises:
        UserError: The manifest is missing or damaged, or a name does not refer to a further source.
    """
    old = _require_manifest(data_dir)
    further_records = old.further_records
    removed_sources: set[str] = set()
    for name in names:
        sources = {name} if name in further_records else {key for key in further_records if source_name(key) == name}
        if not sources:
            is_in_dataset = name in _counts(old.captions_path)
            reason = "belongs to a dataset, so it cannot be removed" if is_in_dataset else "does not exist"
            raise UserError(
                f"the source {quote_value(name)} {reason}",
                hint=f"use one of the sources that can be removed: {', '.join(further_records)}"
                if further_records
                else "no source in this manifest can be removed",
            )
        removed_sources |= sources
    counts = {name: int(further_records[name]["num_captions"]) for name in sorted(removed_sources)}
    no_captions = FurtherCaptions.read(old).captions.slice(0, 0).drop_columns(["caption_id"])
    _publish(data_dir, old, no_captions, REJECTED.empty_table(), records={}, replaced_sources=removed_sources)
    return counts


def _require_manifest(data_dir: Path) -> PreviousManifest:
    old = previous_manifest(data_dir)
    if old.damage is not None:
        raise old.damage
    read_manifest(data_dir)
    return old


def _publish(
    data_dir: Path,
    old: PreviousManifest,
    captions: pa.Table,
    rejected: pa.Table,
    *,
    records: Mapping[str, Mapping[str, Any]],
    replaced_sources: Collection[str],
) -> np.ndarray:
    """Replace the captions of `replaced_sources`, and return the IDs of the new captions, int64[N]."""
    is_replaced = select_sources(replaced_sources)
    ids, next_id, _ = stable_ids(old, captions, is_replaced=is_replaced if replaced_sources else None)
    old_captions = FurtherCaptions.read(old)
    new_captions = old_captions.drop_sources(replaced_sources).append_captions(captions, ids=ids, records=records)
    if (find_rows(captions["video_id"], old.videos["video_id"]) < 0).any():
        raise ValueError("captions refer to a video that is not in the manifest")
    other_rejected = old.rejected.filter(pc.not_equal(old.rejected["dataset"], FURTHER))
    publish_manifest(
        manifest_dir(data_dir),
        old,
        NewManifest(
            videos=new_captions.add_to_videos(old_captions.subtract_from_videos(old.videos)),
            rejected=pa.concat_tables([other_rejected, rejected.cast(REJECTED)]),
            captions=CaptionChange(captions, ids, next_id, keep=lambda table: ~is_replaced(table), keep_labels=True),
            datasets=old.datasets,
            further_records=new_captions.nonempty_records(),
        ),
    )
    return ids


def _counts(captions_path: Path | None) -> dict[str, int]:
    if captions_path is None:
        return {}
    with pq.ParquetFile(captions_path, read_dictionary=["source"], pre_buffer=False) as file:
        return source_counts(file)
