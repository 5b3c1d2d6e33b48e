"""Writes of the manifest. A write replaces the rows of a dataset, or the captions of further sources.

Every write ends with `publish_manifest`, which publishes all tables at once.
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
    of_sources,
    require_own_sources,
    source_counts,
    source_name,
)
from clipmill.manifests.previous import (
    FURTHER_KEY,
    PreviousManifest,
    num_other_splits,
    read_previous,
    replace_dataset,
    rows_of,
    stable_ids,
    tables_fingerprint,
    video_table,
    without_taken_ids,
)
from clipmill.manifests.publish import publish_atomically, publish_checked_json
from clipmill.manifests.schema import MANIFEST_FILE, MANIFEST_FORMAT, OWN_DIGEST, REJECTED
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
    describe,
    manifest_dir,
    promote,
    read_manifest,
    require_numbers,
    staged_path,
)

FURTHER = "further captions"  # value of the column `dataset` of rejected rows; only rows of the last command are kept
_MAX_REMOVED = 1 / 3  # share of a dataset's videos; removing more is probably a mistake
_MAX_NAMED = 3


@dataclass(frozen=True)
class WriteResult:
    """A dataset's entry in the manifest after a write.

    Attributes:
        num_captions_lost: Captions without a video.
        num_rejected: Number of rejected files and rows by reason.
        num_files_rejected: Number of rejected files; the other rejections are rows of files.
        num_captions_removed: Captions of the dataset that left the manifest.
        num_videos_removed: Videos of the dataset that left the manifest.
        num_splits_changed: Videos of the dataset that had another split in the manifest.
        num_further_kept: Captions of further sources in the manifest.
        num_further_removed: Captions of further sources that were removed with their videos.
        splits: Number of videos and of captions of the dataset, by split.
    """

    folder: Path
    dataset: str
    num_videos: int
    num_captions: int
    num_captions_lost: int
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
    may_remove: bool = True,
) -> WriteResult:
    """Replace the rows of `dataset` in the manifest; other datasets are unchanged.

    Known videos keep their rows, and new videos are appended. Known captions keep their IDs. Captions of further
    sources are kept as long as their videos. A video whose ID belongs to another dataset is rejected with its captions.

    Args:
        videos: Columns video_id, source_id, path, split, one row per video (the other columns are computed here).
        captions: Columns video_id, begin_s, end_s, text, source, optional and label_ columns (IDs are
            assigned here).
        rejected: Table of schema.REJECTED.
        num_captions_lost: Number of captions that the adapter could not use, because they have no video.
        may_remove: Allow more than a third of the dataset's videos to leave the manifest.

    Raises:
        UserError: The previous manifest is damaged, captions have the source of other captions or other types of
            labels, or too many videos would leave the manifest.
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
    removed = own_ids.filter(pc.invert(pc.is_in(own_ids, value_set=videos["video_id"].combine_chunks())))
    if not may_remove and len(removed) > _MAX_REMOVED * len(own_ids):
        raise _removal_error(removed.to_pylist(), len(own_ids), dataset, num_further=len(all_further) - len(further))
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
        NewManifest(
            videos=all_videos,
            rejected=pa.concat_tables([other_rejected, rejected.select(REJECTED.names).cast(REJECTED)]),
            captions=CaptionChange(
                captions,
                ids,
                next_id,
                keep=keep if len(other_ids) or len(further) else None,
                keep_labels=len(other_ids) > 0,
            ),
            datasets={**old.datasets, dataset: entry},
            further=further.stored_records(),
        ),
    )
    # Number of videos, and number of captions, by split.
    coded = videos["split"].combine_chunks().dictionary_encode()
    codes, names = coded.indices.to_numpy(), coded.dictionary.to_pylist()
    of_captions = codes[video_rows]
    if "split" in captions.column_names:
        split = captions["split"].combine_chunks()
        names += sorted(set(pc.unique(split).drop_null().to_pylist()).difference(names))
        of_captions = np.where(
            split.is_valid(), pc.index_in(split, value_set=pa.array(names)).fill_null(-1), of_captions
        )
    counts = (np.bincount(part, minlength=len(names)).tolist() for part in (codes, of_captions))
    splits = dict(zip(names, zip(*counts, strict=True), strict=True))
    num_added = int((ids >= old.next_caption_id).sum())
    num_before = int(old.datasets.get(dataset, {}).get("num_captions", 0))
    num_kept = len(own_ids) - len(removed)
    return WriteResult(
        folder=folder,
        dataset=dataset,
        num_videos=videos.num_rows,
        num_captions=captions.num_rows,
        num_captions_lost=num_captions_lost,
        num_rejected=reasons,
        num_files_rejected=rejected["row"].null_count,
        num_videos_added=videos.num_rows - num_kept,
        num_videos_removed=len(removed),
        num_splits_changed=num_other_splits(old.videos, new),
        num_captions_added=num_added,
        num_captions_removed=max(0, num_before - (captions.num_rows - num_added)),
        num_further_kept=len(further),
        num_further_removed=len(all_further) - len(further),
        splits=dict(sorted(splits.items(), key=lambda entry: -entry[1][0])),
    )


def _removal_error(removed: list[str], num_before: int, dataset: str, *, num_further: int) -> UserError:
    """Return the error for a write that would remove too many videos."""
    more = f", and {len(removed) - _MAX_NAMED:,} more" if len(removed) > _MAX_NAMED else ""
    captions = f", and {count_noun(num_further, 'caption')} of added sources with them" if num_further else ""
    return UserError(
        f"{len(removed):,} of {num_before:,} videos of dataset {dataset} would be removed from the manifest{captions}: "
        f"{', '.join(removed[:_MAX_NAMED])}{more}",
        hint="check that the folder and the tables are the right ones; the manifest was not changed. If the videos are "
        "gone or renamed on purpose, add --yes; their chunks stay on disk until prep gc",
    )


def previous_manifest(data_dir: Path) -> PreviousManifest:
    """Return the state of a data folder's manifest before a write."""
    folder = manifest_dir(data_dir)
    if not (folder / MANIFEST_FILE).exists():
        return read_previous(folder, None)
    try:
        return read_previous(folder, read_manifest(data_dir))
    except DamagedManifest as damage:
        return read_previous(folder, None, damage=damage)


@dataclass(frozen=True)
class NewManifest:
    """A manifest that replaces the previous one.

    Attributes:
        videos: Table of schema.VIDEOS and schema.OWN_DIGEST.
        rejected: Table of schema.REJECTED.
        captions: Captions of the previous manifest that are kept, and captions that are added.
        datasets, further: Records of the datasets and of the further sources, by name.
    """

    videos: pa.Table
    rejected: pa.Table
    captions: CaptionChange
    datasets: Mapping[str, Any]
    further: Mapping[str, Any]


def publish_manifest(folder: Path, old: PreviousManifest, new: NewManifest) -> None:
    """Publish a manifest in `folder`.

    Raises:
        UserError: The previous manifest is damaged and this manifest is different, or labels have another type.
    """
    videos, rejected = new.videos, new.rejected
    if videos[OWN_DIGEST.name].null_count == videos.num_rows:
        videos = videos.drop_columns([OWN_DIGEST.name])
    fingerprint = tables_fingerprint(videos, rejected)
    old.require_same(fingerprint)
    require_numbers(folder / VIDEOS_FILE, num_rows=len(videos), videos=videos)
    metadata = {FINGERPRINT_KEY: fingerprint.encode()}
    staged = {name: staged_path(folder, name, fingerprint=fingerprint) for name in (*TABLE_FILES, *MAPPED_FILES)}
    write_caption_table(staged[CAPTIONS_FILE], new.captions, old_path=old.captions_path, metadata=metadata)
    with (
        pq.ParquetFile(staged[CAPTIONS_FILE], read_dictionary=["video_id", "source"], pre_buffer=False) as file,
        publish_atomically(staged[SPANS_FILE]) as spans,
        publish_atomically(staged[TEXTS_FILE]) as texts,
    ):
        require_numbers(folder / CAPTIONS_FILE, num_rows=file.metadata.num_rows)
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
            **({FURTHER_KEY: new.further} if new.further else {}),
            "tables": {name: describe(path) for name, path in staged.items()},
        },
    )
    promote(folder, fingerprint=fingerprint)
    number = rejected.schema.get_field_index("row")
    counted_from_1 = rejected.set_column(number, "entry", pc.add(rejected["row"], 1))
    with publish_atomically(folder / REJECTED_LIST) as temporary:
        csv.write_csv(counted_from_1, temporary)


@dataclass(frozen=True)
class FurtherResult:
    """The result of a write of further captions.

    Attributes:
        folder: Folder of the manifest.
        num_captions: Source -> number of captions.
        num_added: Source -> number of captions that were not in the manifest.
        num_removed: Source -> number of earlier captions that are not in the tables.
        num_stale: Earlier version of a source -> number of captions that were replaced.
    """

    folder: Path
    num_captions: dict[str, int]
    num_added: dict[str, int]
    num_removed: dict[str, int]
    num_stale: dict[str, int]


def write_further_captions(
    data_dir: Path, captions: pa.Table, rejected: pa.Table, *, records: Mapping[str, Mapping[str, Any]]
) -> FurtherResult:
    """Add captions to videos in the manifest. They replace captions of the same sources and their earlier versions.

    Captions that were in the manifest keep their IDs; all other captions of the manifest are unchanged.

    Args:
        captions: Columns video_id, begin_s, end_s, text, source and likelihood (IDs are assigned here).
        rejected: Table of schema.REJECTED.
        records: Source -> {"kind", "models"} of each source in `captions`.

    Raises:
        UserError: There is no manifest, it is damaged, or a source has the name of other captions.
    """
    old = _sound_manifest(data_dir)
    before = _counts(old.captions_path)
    for source, record in records.items():
        kind = str(record["kind"])
        if source in old.further and old.further[source]["kind"] != kind:
            raise UserError(
                f"the source {source!r} has captions of another kind ({old.further[source]['kind']}, not {kind})",
                hint="give the new captions another name with --source",
            )
        if source in before and source not in old.further:
            raise UserError(
                f"a dataset in the manifest has {count_noun(before[source], 'caption')} with the source {source!r}",
                hint="give the new captions another name with --source",
            )
    versions: dict[tuple[str, str], str] = {}
    for source, record in records.items():
        other = versions.setdefault((source_name(source), str(record["kind"])), source)
        if other != source:
            raise UserError(
                f"the tables have captions of two versions of a model: {other} and {source}",
                hint="give the tables of the newer version, or another name with --source",
            )
    kinds = {source_name(source): record["kind"] for source, record in records.items()}
    replaced = {name for name, record in old.further.items() if kinds.get(source_name(name)) == record["kind"]}

    ids = _publish(data_dir, old, captions, rejected, records=records, replaced=replaced)
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
            name: before.get(name, 0) - (count - num_added.get(name, 0)) for name, count in num_captions.items()
        },
        num_stale={name: before[name] for name in sorted(replaced) if name not in records},
    )


def remove_further_sources(data_dir: Path, names: Collection[str]) -> dict[str, int]:
    """Remove the captions of further sources; return source -> number of removed captions.

    All other captions of the manifest are unchanged. If the tables are added again, the captions get new IDs.

    Args:
        names: Names of sources; a name without the version of a model stands for all versions.

    Raises:
        UserError: There is no manifest, it is damaged, or there is no such further source.
    """
    old = _sound_manifest(data_dir)
    removed: set[str] = set()
    for name in names:
        sources = {name} if name in old.further else {source for source in old.further if source_name(source) == name}
        if not sources:
            is_of_dataset = name in _counts(old.captions_path)
            reason = "belongs to a dataset, whose captions come from its tables" if is_of_dataset else "does not exist"
            raise UserError(
                f"the source {quote_value(name)} {reason}",
                hint=f"sources that can be removed: {', '.join(old.further) or 'none'}",
            )
        removed |= sources
    counts = {name: int(old.further[name]["num_captions"]) for name in sorted(removed)}
    nothing = FurtherCaptions.read(old).captions.slice(0, 0).drop_columns(["caption_id"])
    _publish(data_dir, old, nothing, REJECTED.empty_table(), records={}, replaced=removed)
    return counts


def _sound_manifest(data_dir: Path) -> PreviousManifest:
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
    replaced: Collection[str],
) -> np.ndarray:
    """Replace the captions of the sources `replaced` with new captions; return the new IDs, int64[N]."""
    is_replaced = of_sources(replaced)
    ids, next_id = stable_ids(old, captions, is_replaced=is_replaced if replaced else None)
    further = FurtherCaptions.read(old)
    changed = further.without(replaced).with_source(captions, ids=ids, records=records)
    if (rows_of(captions["video_id"], old.videos["video_id"]) < 0).any():
        raise ValueError("captions refer to a video that is not in the manifest")
    other_rejected = old.rejected.filter(pc.not_equal(old.rejected["dataset"], FURTHER))
    publish_manifest(
        manifest_dir(data_dir),
        old,
        NewManifest(
            videos=changed.added_to(further.removed_from(old.videos)),
            rejected=pa.concat_tables([other_rejected, rejected.cast(REJECTED)]),
            captions=CaptionChange(captions, ids, next_id, keep=lambda table: ~is_replaced(table), keep_labels=True),
            datasets=old.datasets,
            further=changed.stored_records(),
        ),
    )
    return ids


def _counts(captions_path: Path | None) -> dict[str, int]:
    if captions_path is None:
        return {}
    with pq.ParquetFile(captions_path, read_dictionary=["source"], pre_buffer=False) as file:
        return source_counts(file)
