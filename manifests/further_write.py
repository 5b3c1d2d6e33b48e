"""Writing captions of further sources into a manifest, and removing them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.caption_table import CaptionChange
from clipmill.manifests.dataset_write import previous_manifest
from clipmill.manifests.errors import UserError
from clipmill.manifests.further_sources import FurtherCaptions, of_sources, source_counts, source_name
from clipmill.manifests.merge import rows_of
from clipmill.manifests.previous import PreviousManifest, stable_ids
from clipmill.manifests.publication import NewManifest, publish_manifest
from clipmill.manifests.quoting import count_noun, quote_value
from clipmill.manifests.schema import REJECTED
from clipmill.manifests.store import manifest_dir, read_manifest

# In the column `dataset` of rejected rows; the rows of the last command are kept.
FURTHER = "further captions"


@dataclass(frozen=True)
class FurtherResult:
    """The result of a write.

    Attributes:
        num_captions: source -> number of its captions.
        num_added: source -> number of captions that were not in the manifest.
        num_removed: source -> number of its earlier captions that are not in the tables.
        num_stale: earlier version of a source -> number of its captions, which were replaced.
    """

    folder: Path
    num_captions: dict[str, int]
    num_added: dict[str, int]
    num_removed: dict[str, int]
    num_stale: dict[str, int]


def write_further_captions(
    data_dir: Path, captions: pa.Table, rejected: pa.Table, *, records: Mapping[str, Mapping[str, Any]]
) -> FurtherResult:
    """Add captions to videos in the manifest. They replace those of the same sources, and of their earlier versions.

    Captions that were in the manifest keep their IDs; all other captions of the manifest are unchanged.

    Args:
        captions: video_id, begin_s, end_s, text, source and likelihood (IDs are assigned here).
        rejected: schema.REJECTED.
        records: source -> {"kind", "models"} of each source in `captions`.

    Raises:
        UserError: there is no manifest, it is damaged, or a source has the name of other captions.
    """
    old = _sound_manifest(data_dir)
    before = _counts(old.captions_path)
    for source, record in records.items():
        _require_free(source, str(record["kind"]), before=before, further=old.further)
    _require_one_version(records)
    kinds = {source_name(source): record["kind"] for source, record in records.items()}
    replaced = {name for name, record in old.further.items() if kinds.get(source_name(name)) == record["kind"]}

    ids = _publish(data_dir, old, captions, rejected, records=records, replaced=replaced)
    is_new = ids >= old.next_caption_id
    num_captions, num_added = (_by_source(captions.filter(pa.array(mask))) for mask in (ids >= 0, is_new))
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
    """Remove the captions of further sources; return source -> number of its captions.

    All other captions of the manifest are unchanged. If the tables are added again, the captions get new IDs.

    Args:
        names: names of sources; one without the version of a model stands for each version.

    Raises:
        UserError: there is no manifest, it is damaged, or there is no such further source.
    """
    old = _sound_manifest(data_dir)
    removed: set[str] = set()
    for name in names:
        found = {name} if name in old.further else {source for source in old.further if source_name(source) == name}
        if not found:
            is_own = name in _counts(old.captions_path)
            what = "is the source of a dataset, whose captions are those of its tables" if is_own else "is not there"
            raise UserError(
                f"the source {quote_value(name)} {what}",
                hint=f"sources that can be removed: {', '.join(old.further) or 'none'}",
            )
        removed |= found
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
    """Put captions in the place of those of the sources `replaced`; return their IDs, int64[N]."""
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


def _require_free(source: str, kind: str, *, before: Mapping[str, int], further: Mapping[str, Any]) -> None:
    if source in further and further[source]["kind"] != kind:
        raise UserError(
            f"the source {source!r} has captions of another kind ({further[source]['kind']}, not {kind})",
            hint="give the new captions another name with --source",
        )
    if source in before and source not in further:
        raise UserError(
            f"the source {source!r} is that of {count_noun(before[source], 'caption')} of a dataset in the manifest",
            hint="give the new captions another name with --source",
        )


def _require_one_version(records: Mapping[str, Mapping[str, Any]]) -> None:
    found: dict[tuple[str, str], str] = {}
    for source, record in records.items():
        other = found.setdefault((source_name(source), str(record["kind"])), source)
        if other != source:
            raise UserError(
                f"the tables have captions of two versions of a model: {other} and {source}",
                hint="give the tables of the newer one, or another name with --source",
            )


def _counts(captions_path: Path | None) -> dict[str, int]:
    if captions_path is None:
        return {}
    with pq.ParquetFile(captions_path, read_dictionary=["source"], pre_buffer=False) as file:
        return source_counts(file)


def _by_source(captions: pa.Table) -> dict[str, int]:
    entries = pc.value_counts(captions["source"]).to_pylist()
    return dict(sorted((entry["values"], entry["counts"]) for entry in entries))
