"""Writing a dataset into the tables of the manifest."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.caption_digest import captions_sha256
from clipmill.manifests.caption_table import CaptionChange
from clipmill.manifests.errors import UserError
from clipmill.manifests.further_sources import FurtherCaptions, require_own_sources
from clipmill.manifests.merge import num_other_splits, replace_dataset, rows_of, video_table, without_taken_ids
from clipmill.manifests.previous import PreviousManifest, read_previous, stable_ids
from clipmill.manifests.publication import NewManifest, publish_manifest
from clipmill.manifests.quoting import count_noun
from clipmill.manifests.schema import MANIFEST_FILE, REJECTED
from clipmill.manifests.store import manifest_dir, read_manifest
from clipmill.manifests.table_files import (
    DamagedManifest,
)

MANIFEST_FOLDER = "manifest"
_MAX_REMOVED = 1 / 3  # of the videos of a dataset; more look like a mistake
_MAX_NAMED = 3
_T = TypeVar("_T")
_CODED = ["video_id", "source"]


@dataclass(frozen=True)
class WriteResult:
    """A dataset's entry in the manifest after a write.

    Attributes:
        num_rejected: number of rejected files and rows by reason.
        num_files_rejected: how many of them are files; the others are rows of files.
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

    Known videos keep their rows, new ones are appended. Known captions keep their IDs. Captions of further sources stay
    as long as their videos. A video whose ID already belongs
    to another dataset is rejected together with its captions.

    Args:
        videos: video_id, source_id, path, split, one row per video (the other columns are computed here).
        captions: video_id, begin_s, end_s, text, source, and optionally likelihood and label_ columns (IDs are assigned
            here).
        rejected: schema.REJECTED.
        may_remove: whether more than a third of the dataset's videos may leave the manifest.

    Raises:
        UserError: the previous manifest is damaged, captions have the source or labels of others, or too many videos
            would leave the manifest.
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
        raise _too_many(removed.to_pylist(), len(own_ids), dataset, num_further=len(all_further) - len(further))
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
        splits=_splits(videos, video_rows),
    )


def _too_many(removed: list[str], num_before: int, dataset: str, *, num_further: int) -> UserError:
    more = f", and {len(removed) - _MAX_NAMED:,} more" if len(removed) > _MAX_NAMED else ""
    captions = f", and {count_noun(num_further, 'caption')} of added sources with them" if num_further else ""
    return UserError(
        f"{len(removed):,} of {num_before:,} videos of dataset {dataset} would be removed from the manifest{captions}: "
        f"{', '.join(removed[:_MAX_NAMED])}{more}",
        hint="check that the folder and the tables are the right ones; the manifest was not changed. If the videos are "
        "gone or renamed on purpose, add --yes; their chunks stay on disk until prep gc",
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
