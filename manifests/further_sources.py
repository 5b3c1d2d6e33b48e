"""Further sources of captions, which `prep manifest captions` adds to the videos of any dataset.

manifest.json contains a record of each further source: the kind of the table, the number of captions, and the metadata
of the models that wrote the captions. A dataset must not use the name of a further source. Therefore, the source of a
caption shows whether the caption comes from a dataset or from a further source.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.caption_table import (
    ROWS_PER_GROUP,
    Selection,
    captions_sha256,
    cast_to_schema,
    selected_batches,
)
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.manifests.previous import PreviousManifest, find_rows
from clipmill.manifests.schema import CAPTIONS, DATASET_DIGEST, OPTIONAL_CAPTIONS

# Characters that are allowed in the name of a source. In `--captions.sources`, `=`, `,` and wildcards are syntax.
SOURCE_CHARS = "letters, digits, '.', '-' and '_'"
_NAME = re.compile(r"[\w.-]+")
_VERSION = re.compile(r"(?P<name>.+)@[0-9a-f]{8}", re.DOTALL)


def source_name(source: str) -> str:
    """Return the name of a source without the model version: `narrator` for `narrator@1f2e3d4c`."""
    match = _VERSION.fullmatch(source)
    return match["name"] if match else source


def is_source_name(source: str) -> bool:
    """Return True if `source` is a valid source name without a model version."""
    return _NAME.fullmatch(source) is not None


def source_fault(source: str) -> str | None:
    """Return the reason why a source, with or without a model version, is invalid; None if it is valid."""
    if is_source_name(source_name(source)):
        return None
    return f"source is {quote_value(source)}, expected {SOURCE_CHARS}"


def select_sources(names: Iterable[str]) -> Selection:
    """Return a function that selects the captions whose source is in `names`."""
    values = pa.chunked_array([pa.array(list(names), pa.string())])
    return lambda table: find_rows(table["source"], values) >= 0


def source_counts(file: pq.ParquetFile) -> dict[str, int]:
    """Count the captions of each source in an open Parquet file. `source` may be dictionary-encoded."""
    counts: Counter[str] = Counter()
    for batch in file.iter_batches(columns=["source"], batch_size=ROWS_PER_GROUP):
        for entry in pc.value_counts(batch["source"]).to_pylist():
            counts[entry["values"]] += entry["counts"]
    return dict(sorted(counts.items()))


def reject_further_sources(captions: pa.Table, further_records: Mapping[str, Any], *, dataset: str) -> None:
    """Raise UserError if captions of a dataset use the name of a further source."""
    names = pc.unique(captions["source"]).to_pylist() if further_records else []
    for name in names:
        if name in further_records:
            raise UserError(
                f"dataset {dataset} has captions with the source {name!r}, but `prep manifest captions` has already "
                "added captions with this source",
                hint="rename the source in the annotations, or use a separate data folder (--data)",
            )


@dataclass(frozen=True)
class FurtherCaptions:
    """Captions of all further sources of a manifest.

    Attributes:
        captions: Columns of schema.CAPTIONS and the likelihood, ordered by caption ID until captions are appended.
        records: Record of each source, by name. The number of captions in a record is ignored.
    """

    captions: pa.Table
    records: dict[str, Any]

    @staticmethod
    def read(old: PreviousManifest) -> "FurtherCaptions":
        """Read the captions of all further sources from the previous manifest."""
        tables = [pa.table({name: [] for name in _SCHEMA.names}, schema=_SCHEMA)]
        if old.captions_path is not None and old.further_records:
            names = set(pq.read_schema(old.captions_path).names)
            columns = [name for name in _SCHEMA.names if name in names]
            for table in selected_batches(old.captions_path, select_sources(old.further_records), columns=columns):
                tables.append(cast_to_schema(table, _SCHEMA))
        return FurtherCaptions(pa.concat_tables(tables).unify_dictionaries(), dict(old.further_records))

    def __len__(self) -> int:
        return self.captions.num_rows

    def select_videos(self, video_ids: pa.ChunkedArray) -> "FurtherCaptions":
        """Return only the captions of the given videos."""
        if not len(self):
            return self
        return self._select_rows(find_rows(self.captions["video_id"], video_ids) >= 0)

    def drop_sources(self, sources: Iterable[str]) -> "FurtherCaptions":
        """Return the captions that do not belong to `sources`."""
        return self._select_rows(~select_sources(sources)(self.captions)) if len(self) else self

    def append_captions(self, captions: pa.Table, *, ids: np.ndarray, records: Mapping[str, Any]) -> "FurtherCaptions":
        """Return the captions together with new captions.

        Args:
            captions: New captions, without IDs.
            ids: IDs of the new captions, int64[N].
            records: Records of the sources of the new captions.
        """
        new_captions = cast_to_schema(captions.append_column("caption_id", pa.array(ids)), _SCHEMA)
        all_captions = pa.concat_tables([self.captions, new_captions]).unify_dictionaries()
        return FurtherCaptions(all_captions, {**self.records, **records})

    def nonempty_records(self) -> dict[str, Any]:
        """Return the records of all sources with captions for manifest.json, including the number of captions."""
        counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(self.captions["source"]).to_pylist()}
        return {
            name: {**record, "num_captions": counts[name]} for name, record in self.records.items() if name in counts
        }

    def select(self, table: pa.Table) -> np.ndarray:
        """Return a mask of the rows of `table` that are among these captions (at least one, ordered by ID)."""
        ids, table_ids = self.captions["caption_id"].to_numpy(), table["caption_id"].to_numpy()
        return np.asarray(ids[np.minimum(np.searchsorted(ids, table_ids), len(ids) - 1)] == table_ids)

    def add_to_videos(self, videos: pa.Table) -> pa.Table:
        """Include these captions in the number of captions and the digest of each video, and return the videos.

        Args:
            videos: Columns of schema.VIDEOS and schema.DATASET_DIGEST, which cover only captions from datasets.
        """
        if not len(self):
            return videos
        rows, counts = self._rows_and_counts(videos)
        is_present = rows >= 0
        captions = self.captions if is_present.all() else self.captions.filter(pa.array(is_present))
        digests = captions_sha256(
            captions.drop_columns(["caption_id"]),
            caption_ids=captions["caption_id"].to_numpy(),
            video_rows=rows[is_present],
            num_videos=videos.num_rows,
        )
        dataset_digests, joint_digests = videos["captions_sha256"].to_pylist(), []
        for digest, further_digest, count in zip(dataset_digests, digests, counts.tolist(), strict=True):
            joint_digests.append(hashlib.sha256(f"{digest} {further_digest}".encode()).hexdigest() if count else digest)
        own_digests = [
            digest if count else None for digest, count in zip(dataset_digests, counts.tolist(), strict=True)
        ]
        return _with_counts(videos, counts, digests=joint_digests, dataset_digests=own_digests)

    def subtract_from_videos(self, videos: pa.Table) -> pa.Table:
        """Undo `add_to_videos`: exclude these captions from the number of captions and the digest of each video."""
        if not len(self):
            return videos
        _, counts = self._rows_and_counts(videos)
        digests = pc.coalesce(videos[DATASET_DIGEST.name], videos["captions_sha256"]).to_pylist()
        return _with_counts(videos, -counts, digests=digests, dataset_digests=[None] * videos.num_rows)

    def _rows_and_counts(self, videos: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        rows = find_rows(self.captions["video_id"], videos["video_id"])
        return rows, np.bincount(rows[rows >= 0], minlength=videos.num_rows).astype(np.int32)

    def _select_rows(self, mask: np.ndarray) -> "FurtherCaptions":
        return FurtherCaptions(self.captions.filter(pa.array(mask)), self.records)


_SCHEMA = CAPTIONS.append(OPTIONAL_CAPTIONS.field("likelihood"))


def _with_counts(
    videos: pa.Table, counts: np.ndarray, *, digests: list[str], dataset_digests: list[str | None]
) -> pa.Table:
    columns = {name: videos[name] for name in videos.column_names}
    columns["num_captions"] = pa.array(videos["num_captions"].to_numpy() + counts)
    columns["captions_sha256"] = pa.array(digests, pa.string())
    columns[DATASET_DIGEST.name] = pa.array(dataset_digests, DATASET_DIGEST.type)
    return pa.table(columns, schema=videos.schema)
