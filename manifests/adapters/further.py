"""Read tables of captions for videos that are already in the manifest, for `prep manifest captions`.

A table identifies a video by its video_id, by its ID in the dataset, by its path, or by its file name. Except for the
video_id, these names are also valid in a table for `prep manifest folder`.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.adapters.annotations import LONGEST_S, Reason, convert_read_errors, file_kind, interval_fault
from clipmill.manifests.adapters.caption_tables import Batch, OpenTable, open_caption_table
from clipmill.manifests.adapters.reading import Reading, ReadingBuilder, escape_unencodable
from clipmill.manifests.adapters.video_files import AmbiguousName, VideoFile, VideoLookup
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.further_sources import source_fault
from clipmill.manifests.schema import CAPTIONS, OPTIONAL_CAPTIONS
from clipmill.manifests.storage.urls import Location, location_name, parse_location

TABLE = "table"  # value of `kind` in the record of a source whose table was not written by a model
# Function that takes row indices of videos, starts and ends in seconds (arrays of equal length), and returns a mask.
HasChunk = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
_LIKELIHOOD = OPTIONAL_CAPTIONS.field("likelihood")
_SCHEMA = pa.schema([field for field in CAPTIONS if field.name != "caption_id"]).append(_LIKELIHOOD)


@dataclass(frozen=True)
class FurtherReading:
    """Content of tables of captions.

    Attributes:
        reading: Captions with their likelihoods, and rejected rows. It contains no videos.
        records: Record of each source, by name: {"kind", "models": metadata of the models that wrote the captions}.
    """

    reading: Reading
    records: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Limits:
    """Limits for the times of captions.

    Attributes:
        ends_s: End of each video in seconds; +inf if it is unknown. Captions that begin later are rejected.
        has_chunk: Function that returns a mask of the spans that have a chunk; None if the chunks are unknown. A
            caption from a model belongs to a chunk, so it is rejected if its span has no chunk.
    """

    ends_s: np.ndarray
    has_chunk: HasChunk | None = None


def read_caption_tables(
    tables: Sequence[Path], *, videos: pa.Table, dataset: str, source: str | None = None, limits: Limits | None = None
) -> FurtherReading:
    """Read tables of captions for videos in the manifest.

    Args:
        tables: Paths of the tables.
        videos: Videos of the manifest (schema.VIDEOS).
        dataset: Value of the column `dataset` in rejected rows.
        source: Source of all captions, which overrides the column `source`.
        limits: Limits for the times of captions. Default: no limits.

    Raises:
        UserError: A table cannot be read or lacks a column, two tables have the same content, or tables from different
            models have the same source.
    """
    # Reject files with the same content, because their captions would be added twice. Only files of equal size are
    # hashed.
    paths_of_size: dict[int, list[Path]] = {}
    for path in tables:
        with convert_read_errors(path):
            status = path.stat()
        if file_kind(status.st_mode) is None:  # other kinds of files are rejected when they are opened
            paths_of_size.setdefault(status.st_size, []).append(path)
    for paths in paths_of_size.values():
        path_of_digest: dict[bytes, Path] = {}
        for path in paths if len(paths) > 1 else ():
            with convert_read_errors(path), path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
            if digest in path_of_digest:
                raise UserError(
                    f"{path_of_digest[digest]} and {path} have the same content: all captions would be added twice",
                    hint="pass each table only once",
                )
            path_of_digest[digest] = path
    reader = _Reader(_Videos(videos), dataset=dataset, limits=limits or Limits(np.full(len(videos), inf)))
    for path in tables:
        reader.add(open_caption_table(path, note=reader.note, source=source))
    return reader.result()


class _Videos:
    """Lookup of the manifest's videos by the names in caption tables."""

    def __init__(self, videos: pa.Table) -> None:
        self.ids: pa.Array = videos["video_id"].combine_chunks()
        self._videos = videos
        self._lookups: tuple[VideoLookup, ...] = ()
        self._row_of_path: dict[Location, int] = {}
        self._path_of_row: dict[int, str] = {}  # absolute paths in the tables, by row of the video
        self.moved_paths: dict[str, str] = {}  # path of the video in the manifest, by missing path in the tables

    def rows(self, names: pa.Array) -> np.ndarray:
        """Return the row of each video_id, int64[N]; -1 for unknown IDs."""
        rows = pc.index_in(names, value_set=self.ids).fill_null(-1)
        return np.asarray(rows.to_numpy(zero_copy_only=False), np.int64)

    def find_row(self, name: str) -> int:
        """Look up a video by a name other than its video_id, and return its row, or -1 if there is no such video.

        An absolute path that does not exist matches the video with the same file name.

        Raises:
            AmbiguousName: Several videos match.
            UserError: Different absolute paths match the same video, and at least one of them does not exist.
        """
        if not self._lookups:
            paths = [parse_location(path) for path in self._videos["path"].to_pylist()]
            self._row_of_path = {path: row for row, path in enumerate(paths)}
            # A source ID may or may not have the extension of the file.
            names = []
            for source_id, path in zip(self._videos["source_id"].to_pylist(), paths, strict=True):
                suffix = location_name(path).suffix
                names.append(source_id if PurePosixPath(source_id).suffix == suffix else f"{source_id}{suffix}")
            # The second lookup is by file name, because the ID in the dataset may differ from the file name.
            self._lookups = tuple(
                VideoLookup(list(map(VideoFile, paths, relative)))
                for relative in (names, [location_name(path).name for path in paths])
            )
        file = self._find(name)
        # A table from a different machine may contain absolute paths that do not exist here. `Path.exists` is not used,
        # because it raises an error if a name is too long.
        is_missing = PurePosixPath(name).is_absolute() and not os.path.exists(name)  # noqa: PTH110
        if file is None and is_missing and (file := self._find(PurePosixPath(name).name)) is not None:
            self.moved_paths[name] = str(file.path)
        if file is None:
            return -1
        row = self._row_of_path[file.path]
        if PurePosixPath(name).is_absolute():
            first_name = self._path_of_row.setdefault(row, name)
            if first_name != name and not self.moved_paths.keys().isdisjoint((name, first_name)):
                raise UserError(
                    f"{first_name} and {name} both have the file name of {file.path}, so it is unclear which of "
                    "them is this video",
                    hint="in the column video, use the video_id of this video, and remove the rows with the other path",
                )
        return row

    def _find(self, name: str) -> VideoFile | None:
        return next((file for lookup in self._lookups if (file := lookup.find(name)) is not None), None)


class _Reader:
    def __init__(self, videos: _Videos, *, dataset: str, limits: Limits) -> None:
        self._videos, self._limits = videos, limits
        self._builder = ReadingBuilder(dataset)
        self._parts = [_SCHEMA.empty_table()]
        self._records: dict[str, dict[str, Any]] = {}
        self._num_used: dict[Path, int] = {}

    def note(self, text: str) -> None:
        self._builder.note(text)

    def add(self, table: OpenTable) -> None:
        self._num_used.setdefault(table.path, 0)
        for batch in table.batches:
            for fault in batch.faults:
                error, file = fault.error, str(table.path)
                self._builder.reject(error.reason, file=file, row=fault.row, source_id=fault.video, detail=error.detail)
            videos, rows = self._usable_rows(table, batch)
            if len(rows):
                columns = {
                    "video_id": pa.DictionaryArray.from_arrays(pa.array(videos, pa.int32()), self._videos.ids),
                    "begin_s": rows["begin_s"],
                    "end_s": rows["end_s"],
                    "text": pc.utf8_trim_whitespace(rows["text"]),
                    "source": rows["source"].combine_chunks().dictionary_encode(),
                    "likelihood": rows["likelihood"].cast(_LIKELIHOOD.type),
                }
                self._parts.append(pa.table(columns).cast(_SCHEMA))
                self._num_used[table.path] += len(rows)
                self._add_records(table, pc.unique(rows["source"]).to_pylist())

    def result(self) -> FurtherReading:
        if moved_paths := self._videos.moved_paths:
            first, path = next(iter(moved_paths.items()))
            paths = count_noun(len(moved_paths), "path")
            reason = "it does not exist" if len(moved_paths) == 1 else "they do not exist"
            self._builder.note(f"matched {paths} in the tables by file name, because {reason}: {first} is {path}")
        further_reading = replace(
            self._builder.build(),
            captions=pa.concat_tables(self._parts).unify_dictionaries(),
            num_rows_used={escape_unencodable(str(path)): count for path, count in self._num_used.items()},
            example_file=self._videos.ids[0].as_py() if len(self._videos.ids) else None,
        )
        return FurtherReading(further_reading, self._records)

    def _usable_rows(self, table: OpenTable, batch: Batch) -> tuple[np.ndarray, pa.Table]:
        """Reject unusable captions. Return the rows of the videos of usable captions, int64[N], and the captions."""
        rows = batch.rows.combine_chunks()
        begin_s, end_s = rows["begin_s"].to_numpy(), rows["end_s"].to_numpy()
        likelihood = rows["likelihood"].fill_null(0.0).to_numpy()
        is_usable = np.ones(len(rows), bool)

        def reject(is_wrong: np.ndarray, reason: Reason, detail: Callable[[int], str]) -> None:
            for index in np.flatnonzero(is_usable & is_wrong).tolist():
                name, number = rows["video"][index].as_py(), int(batch.row_indices[index])
                self._builder.reject(reason, file=str(table.path), row=number, source_id=name, detail=detail(index))
            np.logical_and(is_usable, ~is_wrong, out=is_usable)

        reject(_is_blank(rows["video"]), Reason.EMPTY_ID, lambda index: "the row does not identify a video")
        reject(_is_blank(rows["text"]), Reason.EMPTY_CAPTION, lambda index: "the text is empty")
        is_interval = (begin_s >= 0) & (begin_s <= LONGEST_S) & (end_s > begin_s)
        is_interval &= (end_s <= LONGEST_S) | np.isposinf(end_s)
        reject(~is_interval, Reason.BAD_TIME, lambda index: str(interval_fault(begin_s[index], end_s[index])))
        reject(
            ~(np.isfinite(likelihood) & (likelihood <= 0)),
            Reason.BAD_LIKELIHOOD,
            lambda index: f"likelihood is {likelihood[index]}, expected the logarithm of a probability, 0 or less",
        )
        sources = rows["source"].combine_chunks()
        faulty_sources = [name for name in pc.unique(sources).to_pylist() if name and source_fault(name)]
        reject(
            pc.is_in(sources, value_set=pa.array(faulty_sources, pa.string())).to_numpy(zero_copy_only=False),
            Reason.BAD_SOURCE,
            lambda index: f"{source_fault(sources[index].as_py())}: use --source NAME",
        )

        videos = np.where(is_usable, self._videos.rows(rows["video"].combine_chunks()), -1)
        self._find_by_name(table, batch, videos, np.flatnonzero(is_usable & (videos < 0)))
        is_usable &= videos >= 0
        ends_s = np.where(is_usable, self._limits.ends_s[videos] if len(self._limits.ends_s) else inf, inf)
        reject(
            begin_s >= ends_s,
            Reason.BAD_TIME,
            lambda index: f"begins at {begin_s[index]} s, after the end of the video at {ends_s[index]} s",
        )
        if table.model is not None and self._limits.has_chunk is not None:
            usable_rows = np.flatnonzero(is_usable)
            lacks_chunk = np.zeros(len(rows), bool)
            spans = (videos[usable_rows], begin_s[usable_rows], end_s[usable_rows])
            lacks_chunk[usable_rows] = ~self._limits.has_chunk(*spans)
            reject(
                lacks_chunk,
                Reason.MISSING_CHUNK,
                lambda index: f"the video has no chunk between {begin_s[index]} s and {end_s[index]} s",
            )
        usable_rows = np.flatnonzero(is_usable)
        return videos[usable_rows], rows.take(pa.array(usable_rows))

    def _find_by_name(self, table: OpenTable, batch: Batch, videos: np.ndarray, indices: np.ndarray) -> None:
        """Look up the videos of some captions by names other than the video_id.

        Args:
            videos: Row of each caption's video, int64[N]. The results are written to this array.
            indices: Indices of the captions whose videos are looked up.
        """
        video_of_name: dict[str, int | AmbiguousName] = {}
        for index in indices.tolist():
            name = batch.rows["video"][index].as_py()
            if name not in video_of_name:
                try:
                    video_of_name[name] = self._videos.find_row(name)
                except AmbiguousName as error:
                    video_of_name[name] = error
            video = video_of_name[name]
            if isinstance(video, AmbiguousName):
                number = int(batch.row_indices[index])
                self._builder.reject(
                    Reason.AMBIGUOUS_VIDEO, file=str(table.path), row=number, source_id=name, detail=str(video)
                )
            elif video < 0:
                self._builder.count_lost_captions(name, file=table.path, detail="no such video in the manifest")
            else:
                videos[index] = video

    def _add_records(self, table: OpenTable, sources: list[str]) -> None:
        model = {name: value for name, value in (table.model or {}).items() if name != "kind"}
        kind = TABLE if table.model is None else str(table.model["kind"])
        for source in sources:
            record = self._records.setdefault(source, {"kind": kind, "models": [model] if model else []})
            models = record["models"]
            weights = [other_model.get("weights_sha256") for other_model in models]
            if record["kind"] != kind or (models and model.get("weights_sha256") not in weights):
                raise UserError(
                    f"{table.path} has captions with the source {source!r}, but an earlier table has captions from a "
                    "different model under this name",
                    hint="add the tables one after another, each with a different --source",
                )
            if model and model not in models:
                models.append(model)


def _is_blank(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(pc.equal(pc.utf8_trim_whitespace(column.fill_null("")), "").to_numpy())
