"""Publishing all tables of a manifest at once: the end of every write."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from clipmill.manifests.caption_spans import write_caption_spans
from clipmill.manifests.caption_table import CaptionChange, write_caption_table
from clipmill.manifests.checked_json import publish_checked_json
from clipmill.manifests.merge import tables_fingerprint
from clipmill.manifests.previous import FURTHER_KEY, PreviousManifest
from clipmill.manifests.publish import publish_atomically
from clipmill.manifests.schema import MANIFEST_FILE, MANIFEST_FORMAT, OWN_DIGEST
from clipmill.manifests.table_files import (
    CAPTIONS_FILE,
    FINGERPRINT_KEY,
    MAPPED_FILES,
    REJECTED_FILE,
    REJECTED_LIST,
    SPANS_FILE,
    TABLE_FILES,
    TEXTS_FILE,
    VIDEOS_FILE,
    describe,
    promote,
    require_numbers,
    staged_path,
)


@dataclass(frozen=True)
class NewManifest:
    """A manifest that takes the place of the previous one.

    Attributes:
        videos: schema.VIDEOS and schema.OWN_DIGEST.
        rejected: schema.REJECTED.
        captions: those of the previous manifest that stay, and those that are added.
        datasets, further: the records of the datasets and of the further sources, by name.
    """

    videos: pa.Table
    rejected: pa.Table
    captions: CaptionChange
    datasets: Mapping[str, Any]
    further: Mapping[str, Any]


def publish_manifest(folder: Path, old: PreviousManifest, new: NewManifest) -> None:
    """Publish a manifest in `folder`.

    Raises:
        UserError: the previous manifest is damaged and this is another one, or labels have another type.
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
