"""Collect the output of an adapter: videos, captions and rejected rows.

`ReadingBuilder` collects rows without creating a Python object for each row. `AnnotatedVideos` looks up the videos that
occur in annotations. `read_with_local_tables` downloads annotation files at URLs to a temporary folder while an adapter
reads them.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.adapters.annotations import Reason, file_kind, interval_fault
from clipmill.manifests.adapters.video_files import (
    AmbiguousName,
    NearestName,
    Scan,
    VideoFile,
    VideoLookup,
    compose_unicode,
    scan_bucket,
    scan_videos,
)
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.keys import safe_video_id
from clipmill.manifests.schema import CAPTIONS, OPTIONAL_CAPTIONS, REJECTED, VIDEOS
from clipmill.manifests.storage.objects import open_objects
from clipmill.manifests.storage.urls import Location, location_name, mask_secrets, split_url

ROWS_PER_CHUNK = 65_536
_NO_COLUMNS = pa.schema([])


class RowBuffer:
    """Buffer for rows of one schema, which are converted to Arrow in batches of ROWS_PER_CHUNK rows.

    Args:
        optional: Optional columns, which take memory only for rows with a value. A column without values is omitted.
    """

    def __init__(self, schema: pa.Schema, *, optional: pa.Schema = _NO_COLUMNS) -> None:
        self.schema = schema
        self.chunks: list[pa.RecordBatch] = []
        self._optional = optional
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._values: dict[str, dict[int, Any]] = {}  # values of optional columns, by name and row

    def append(self, optional: Mapping[str, Any] | None = None, **values: Any) -> None:
        for name, value in (optional or {}).items():
            if value is not None:
                self._values.setdefault(name, {})[len(self._columns[self.schema.names[0]])] = value
        for name, column in self._columns.items():
            column.append(values[name])
        if len(column) >= ROWS_PER_CHUNK:
            self._close()

    def table(self) -> pa.Table:
        self._close()
        tables = [self.schema.empty_table(), *(pa.Table.from_batches([chunk]) for chunk in self.chunks)]
        return pa.concat_tables(tables, promote_options="default")

    def _close(self) -> None:
        arrays = [pa.array(self._columns[field.name], field.type) for field in self.schema]
        if num_rows := len(arrays[0]):
            used_fields = [field for field in self._optional if field.name in self._values]
            for field in used_fields:
                values = self._values[field.name]
                arrays.append(pa.array(map(values.get, range(num_rows)), field.type, size=num_rows))
            self.chunks.append(pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*self.schema, *used_fields])))
            self._columns = {name: [] for name in self.schema.names}
            self._values = {}


COMPLETE_VIDEO = (0.0, inf)
_VIDEO_FIELDS = pa.schema([VIDEOS.field(name) for name in ("video_id", "source_id", "path", "split", "dataset")])


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a caption.

    Attributes:
        file: Annotation file.
        source: Source of the caption in the manifest.
        row: 0-based index of the row or entry in the file, or None.
        field: Name of the field with the text, for rejected rows.
    """

    file: Location
    source: str
    row: int | None
    field: str = "text"


@dataclass(frozen=True)
class Reading:
    """Content of one dataset, as read by an adapter.

    Attributes:
        videos: Table of schema.VIDEOS without the columns that depend on captions (num_captions, captions_sha256).
        captions: Table of schema.CAPTIONS without caption_id, with label_ columns and the columns of
            schema.OPTIONAL_CAPTIONS that have values. The dictionary of video_id is videos.video_id.
        rejected: Table of schema.REJECTED.
        num_captions_lost: Number of captions whose videos are unavailable.
        num_rows_used: Number of rows that were used, for example for a caption or a video, by annotation file.
        example_file: Path of one of the video files, relative to the folder of the dataset.
        notes: Notes for the user.
    """

    videos: pa.Table
    captions: pa.Table
    rejected: pa.Table
    num_captions_lost: int
    num_rows_used: dict[str, int]
    example_file: str | None
    notes: tuple[str, ...] = ()


class ReadingBuilder:
    """Collector of the videos, captions and rejected rows of one dataset.

    Args:
        dataset: Name of the dataset in the manifest.
        labels: Types of the label columns, by name.
    """

    def __init__(self, dataset: str, *, labels: Mapping[str, pa.DataType] | None = None) -> None:
        self._dataset = dataset
        self._labels = dict(labels or {})
        self._video_ids: dict[str, int] = {}
        self._videos: dict[str, list[str]] = {name: [] for name in _VIDEO_FIELDS.names}
        self._sources: dict[str, int] = {}
        schema = pa.schema([("video", pa.int32()), ("begin_s", pa.float64()), ("end_s", pa.float64())])
        schema = schema.append(pa.field("text", pa.string())).append(pa.field("source", pa.int32()))
        for name, kind in self._labels.items():
            schema = schema.append(pa.field(name, kind))
        self._captions = RowBuffer(schema, optional=OPTIONAL_CAPTIONS)
        self._bulk_batches: list[pa.RecordBatch] = []
        self._num_bulk_rows = 0
        self._rejected = RowBuffer(REJECTED)
        # Number of lost captions and first row, by source ID, file, reason and detail.
        self._lost_captions: dict[tuple[str, str, Reason, str], tuple[int, int | None]] = {}
        self._num_rows_used: dict[Location, int] = {}
        self._example_file: str | None = None
        self._notes: list[str] = []

    def find_videos(self, directory: Location, *, skip: Location | None = None) -> list[VideoFile]:
        """Find the video files in a folder or a bucket. Entries that cannot be accessed become rejected rows.

        Args:
            skip: Folder to ignore.
        """
        return self.scan(directory, skip=skip).files

    def scan(
        self, directory: Location, *, skip: Location | None = None, companions: frozenset[str] = frozenset()
    ) -> Scan:
        """Find the video files as `find_videos` does, and also the files with the extensions `companions`."""
        if isinstance(directory, str):
            return self.use_scan(
                scan_bucket(directory, skip=skip if isinstance(skip, str) else None, companions=companions)
            )
        return self.use_scan(
            scan_videos(directory, skip=skip if isinstance(skip, Path) else None, companions=companions)
        )

    def use_scan(self, scan: Scan) -> Scan:
        """Add a rejected row for each entry of a scan that cannot be accessed, add notes, and return the scan."""
        for fault in scan.faults:
            self.reject(fault.reason, file=str(fault.path), detail=fault.detail)
        self._example_file = scan.files[0].relative if scan.files else None
        if scan.num_hidden:
            self.note(f"ignored {count_noun(scan.num_hidden, 'hidden video')} (names that begin with a dot)")
        if scan.outward_links:
            link, target = scan.outward_links[0]
            more = f", and {len(scan.outward_links) - 1:,} more" if len(scan.outward_links) > 1 else ""
            verb = "leads" if len(scan.outward_links) == 1 else "lead"
            links = f"{count_noun(len(scan.outward_links), 'symbolic link')} that {verb} out of the folder"
            self.note(f"followed {links}: {link} to {target}{more}")
        if (omitted := scan.describe_omitted()) is not None:
            self.note(omitted)
        return scan

    def begin_annotations(self, file: Location) -> None:
        """Register an annotation file, which must contain at least one usable row."""
        self._num_rows_used.setdefault(file, 0)

    def count_row(self, file: Location) -> None:
        """Count a row that was used without a caption of its own, such as a row that adds a video or a split."""
        self._num_rows_used[file] += 1

    def add_video(self, source_id: str, *, path: Location, split: str, size_bytes: int | None = None) -> int | None:
        """Add a video and return its index. If its file or ID is unusable, add a rejected row and return None."""
        is_usable = self.check_file(source_id, path, size_bytes=size_bytes)
        return self.add_checked_video(source_id, path=path, split=split) if is_usable else None

    def check_file(self, source_id: str, path: Location, *, size_bytes: int | None = None) -> bool:
        """Return True if a video file is usable; otherwise, add a rejected row. The file is not opened.

        Args:
            path: Path of a file, or URL of an object. A file must be a regular file, and must not be empty.
            size_bytes: Size of the object; None for a file.
        """
        reason, detail = _file_fault(path, size_bytes=size_bytes)
        if reason is not None:
            self.reject(reason, file=str(path), source_id=source_id, detail=detail)
        return reason is None

    def add_checked_video(self, source_id: str, *, path: Location, split: str) -> int | None:
        """Add a video whose file was checked, and return its index. If its ID is in use, reject it, and return None."""
        video_id = safe_video_id(source_id)
        if video_id in self._video_ids:
            detail = f"{self._videos['path'][self._video_ids[video_id]]} has the same ID"
            self.reject(Reason.DUPLICATE_ID, file=str(path), source_id=source_id, detail=detail)
            return None
        for name, value in zip(
            _VIDEO_FIELDS.names, (video_id, source_id, str(path), split, self._dataset), strict=True
        ):
            self._videos[name].append(value)
        self._video_ids[video_id] = len(self._video_ids)
        return self._video_ids[video_id]

    def source_ids(self) -> Sequence[str]:
        """Return the IDs of all added videos in their dataset, in the order of their indices."""
        return self._videos["source_id"]

    def source_id_of(self, video: int) -> str:
        """Return the ID of a video in its dataset."""
        return self._videos["source_id"][video]

    def split_of(self, video: int) -> str:
        """Return the split of a video."""
        return self._videos["split"][video]

    def set_split(self, video: int, split: str) -> None:
        """Change the split of a video."""
        self._videos["split"][video] = split

    def add_caption(
        self,
        video: int,
        text: object,
        origin: Origin,
        *,
        begin_s: float = 0.0,
        end_s: float = inf,
        likelihood: float | None = None,
        split: str | None = None,
        group: str | None = None,
        view: str | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> bool:
        """Add a caption and return True. If its text or times are unusable, add a rejected row and return False.

        Args:
            video: Index of the video.
            text: Text of the caption, which is not validated yet.
            likelihood, group, view: See schema.OPTIONAL_CAPTIONS.
            split: Split of the span; None for the split of the video.
            labels: Labels, by column name.
        """
        file, source = origin.file, origin.source
        reason, detail = _caption_fault(text, begin_s, end_s, field=origin.field)
        if reason is None and source not in self._sources and not is_encodable(source):
            reason, detail = Reason.MALFORMED_ROW, f"source is not valid Unicode: {quote_value(source)}"
        if reason is not None:
            source_id = self._videos["source_id"][video]
            self.reject(reason, file=str(file), row=origin.row, source_id=source_id, detail=detail)
            return False
        values = {name: (labels or {}).get(name) for name in self._labels}
        values |= {"source": self._sources.setdefault(source, len(self._sources))}
        optional = {"likelihood": likelihood, "split": split, "group": group, "view": view}
        self._captions.append(optional, video=video, begin_s=begin_s, end_s=end_s, text=str(text).strip(), **values)
        if file in self._num_rows_used:
            self._num_rows_used[file] += 1
        return True

    def add_captions(
        self, video: int, *, texts: pa.Array, source: str, file: Path, begin_s: np.ndarray, end_s: np.ndarray
    ) -> None:
        """Add many validated captions of one video.

        Args:
            texts: Texts, string[N].
            begin_s, end_s: Times in seconds, float64[N].
        """
        num_rows = len(texts)
        arrays = [
            pa.array(np.full(num_rows, video, np.int32)),
            pa.array(begin_s),
            pa.array(end_s),
            texts,
            pa.array(np.full(num_rows, self._sources.setdefault(source, len(self._sources)), np.int32)),
            *(pa.nulls(num_rows, kind) for kind in self._labels.values()),
        ]
        self._bulk_batches.append(pa.RecordBatch.from_arrays(arrays, schema=self._captions.schema))
        self._num_bulk_rows += num_rows
        self._num_rows_used[file] += num_rows
        if self._num_bulk_rows >= ROWS_PER_CHUNK:
            self._gather_bulk()

    def note(self, text: str) -> None:
        """Add a note for the user."""
        self._notes.append(escape_unencodable(text))

    def reject(
        self, reason: Reason, *, file: str, row: int | None = None, source_id: str | None = None, detail: str
    ) -> None:
        """Add a rejected row."""
        self._rejected.append(
            dataset=self._dataset,
            file=escape_unencodable(file),
            row=row,
            source_id=None if source_id is None else escape_unencodable(source_id),
            reason=reason.value,
            detail=escape_unencodable(detail),
        )

    def count_lost_captions(
        self,
        source_id: str,
        *,
        file: Location,
        num_captions: int = 1,
        reason: Reason = Reason.MISSING_FILE,
        detail: str = "no matching video file",
        row: int | None = None,
    ) -> None:
        """Count captions of an unavailable video. The video becomes one rejected row with the total count.

        Args:
            row: Index of a row in the file. The rejected row has the index from the first call.
        """
        key = (source_id, str(file), reason, detail)
        num_lost, first_row = self._lost_captions.get(key, (0, row))
        self._lost_captions[key] = (num_lost + num_captions, first_row)

    def build(self) -> Reading:
        """Return everything that has been added."""
        for (source_id, file, reason, detail), (num_lost, row) in self._lost_captions.items():
            self.reject(reason, file=file, row=row, source_id=source_id, detail=f"{detail}; captions lost: {num_lost}")
        self._gather_bulk()
        videos = pa.table(self._videos, schema=_VIDEO_FIELDS)
        rows = self._captions.table()
        sources = pa.array(list(self._sources), pa.string())
        columns = {
            "video_id": _dictionary_column(rows["video"], videos["video_id"].combine_chunks()),
            "begin_s": rows["begin_s"],
            "end_s": rows["end_s"],
            "text": rows["text"],
            "source": _dictionary_column(rows["source"], sources),
        }
        schema = pa.schema([CAPTIONS.field(name) for name in columns])
        for field in OPTIONAL_CAPTIONS:
            if field.name not in rows.column_names:
                continue
            values = rows[field.name]
            if field.name == "split":  # the split of a video may have been set after its first captions
                is_video_split = pc.equal(values, videos["split"].combine_chunks().take(rows["video"]))
                values = pc.if_else(pc.fill_null(is_video_split, True), None, values)
            if values.null_count < len(values):
                columns[field.name] = values
                schema = schema.append(field)
        for name, kind in self._labels.items():
            columns[name] = rows[name]
            schema = schema.append(pa.field(name, kind))
        captions = pa.table(columns, schema=schema)
        return Reading(
            videos=videos,
            captions=captions,
            rejected=self._rejected.table(),
            num_captions_lost=sum(num_lost for num_lost, _ in self._lost_captions.values()),
            num_rows_used={escape_unencodable(str(file)): count for file, count in self._num_rows_used.items()},
            example_file=self._example_file,
            notes=tuple(self._notes),
        )

    def _gather_bulk(self) -> None:
        if self._bulk_batches:
            self._captions.chunks.append(pa.concat_batches(self._bulk_batches))
            self._bulk_batches, self._num_bulk_rows = [], 0


def is_encodable(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8. (File names and JSON may contain lone surrogates.)"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape_unencodable(text: str) -> str:
    """Replace characters that cannot be encoded as UTF-8 with escapes."""
    return text if is_encodable(text) else text.encode("utf-8", "backslashreplace").decode()


def _file_fault(path: Location, *, size_bytes: int | None) -> tuple[Reason | None, str]:
    """Return the reason why a video file is unusable (None if it is usable), and a description. Do not open it."""
    if not is_encodable(str(path)):
        return Reason.BAD_NAME, "the path is not valid UTF-8"
    if isinstance(path, str):
        return (Reason.EMPTY_FILE, "the object is empty") if size_bytes == 0 else (None, "")
    try:
        status = path.stat()
    except OSError as error:
        link = "broken link: " if isinstance(error, FileNotFoundError) else ""
        return Reason.UNREADABLE, f"{link}{error.strerror or error}"
    if (kind := file_kind(status.st_mode)) is not None:
        return Reason.NOT_A_FILE, f"it is {kind}, not a file"
    return (Reason.EMPTY_FILE, "the file is empty") if status.st_size == 0 else (None, "")


def _caption_fault(text: object, begin_s: float, end_s: float, *, field: str) -> tuple[Reason | None, str]:
    if text is None:
        return Reason.MALFORMED_ROW, f"{field} is missing"
    if not isinstance(text, str):
        return Reason.MALFORMED_ROW, f"{field} is {quote_value(text)}, expected a string"
    if not is_encodable(text):
        return Reason.MALFORMED_ROW, f"{field} is not valid Unicode: {quote_value(text)}"
    if not text.strip():
        return Reason.EMPTY_CAPTION, "the text is empty"
    fault = interval_fault(begin_s, end_s)
    return (Reason.BAD_TIME, fault) if fault else (None, "")


def _dictionary_column(codes: pa.ChunkedArray, values: pa.Array) -> pa.ChunkedArray:
    kind = pa.dictionary(pa.int32(), pa.string())
    chunks: Sequence[pa.Array] = [pa.DictionaryArray.from_arrays(chunk, values) for chunk in codes.chunks]
    return pa.chunked_array(chunks, type=kind)


def begin_reading(
    dataset: str, directory: Location, *, skip: Location | None, labels: Mapping[str, pa.DataType] | None = None
) -> tuple[ReadingBuilder, "AnnotatedVideos"]:
    """Find the videos in a folder, and return a builder and a lookup for these videos.

    Args:
        dataset: Name of the dataset in the manifest.
        directory: Folder with the videos.
        skip: Subfolder to ignore.
        labels: Types of the label columns, by name.

    Raises:
        UserError: No videos are found.
    """
    builder = ReadingBuilder(dataset, labels=labels)
    files = builder.find_videos(directory, skip=skip)
    return builder, AnnotatedVideos(builder, VideoLookup(files), files)


@dataclass(frozen=True)
class _UnavailableVideo:
    reason: Reason
    detail: str


class AnnotatedVideos:
    """Lookup of videos by the IDs in annotations. A video is added to the builder when it is first looked up."""

    def __init__(self, builder: ReadingBuilder, lookup: VideoLookup, files: Sequence[VideoFile]) -> None:
        self._builder = builder
        self._lookup = lookup
        # Suggested names differ only in case: if P01_02 is missing, P01_01 is not what the user means.
        self._nearest = NearestName(files, max_compared=0)
        self._videos: dict[str, int | _UnavailableVideo] = {}

    def omit_videos(self, source_ids: Iterable[str], *, detail: str) -> None:
        """Omit videos and their captions. Call this method before any of these videos is looked up."""
        omission = _UnavailableVideo(Reason.LEFT_OUT, detail)
        self._videos |= {compose_unicode(source_id): omission for source_id in source_ids}

    def index_of(
        self,
        source_id: object,
        *,
        split: str,
        file: Path,
        row: int | None,
        num_captions: int = 1,
        file_names: Sequence[str] = (),
        is_span: bool = False,
    ) -> int | None:
        """Look up the video in a row of annotations.

        Args:
            source_id: ID of the video in the annotations.
            split: Split of the row.
            file, row: Annotation file, and index of the row, for rejected rows.
            num_captions: Number of captions in the row.
            file_names: File names to look up, in order of preference. By default, the ID is the file name.
            is_span: True if the row covers only a span of the video. The split of such a row may differ from the split
                of the video.

        Returns:
            The index of the video in the builder, or None if the row is unusable. The captions of an unavailable video
            are counted; any other unusable row is rejected.
        """
        if not isinstance(source_id, str) or not source_id.strip():
            self._builder.reject(Reason.EMPTY_ID, file=str(file), row=row, detail="the row does not identify a video")
            return None
        # Two Unicode forms of a name refer to the same video. The ID of the video has the form that occurs first.
        name = compose_unicode(source_id)
        if name not in self._videos:
            self._videos[name] = self._find(source_id, split=split, file_names=file_names or (source_id,))
        video = self._videos[name]
        if isinstance(video, _UnavailableVideo):
            self._builder.count_lost_captions(
                source_id, file=file, num_captions=num_captions, reason=video.reason, detail=video.detail
            )
            return None
        if not is_span and self._builder.split_of(video) != split:
            detail = f"split is {split}, but {self._builder.split_of(video)} in an earlier row"
            self._builder.reject(Reason.BAD_SPLIT, file=str(file), row=row, source_id=source_id, detail=detail)
            return None
        return video

    def _find(self, source_id: str, *, split: str, file_names: Sequence[str]) -> int | _UnavailableVideo:
        try:
            file = next((file for name in file_names if (file := self._lookup.find(name)) is not None), None)
        except AmbiguousName as error:
            return _UnavailableVideo(Reason.AMBIGUOUS_VIDEO, str(error))
        if file is None:
            nearest = next((path for name in file_names if (path := self._nearest.find(name)) is not None), None)
            detail = "no matching video file"
            return _UnavailableVideo(
                Reason.MISSING_FILE, detail if nearest is None else f"{detail} (similar name: {nearest})"
            )
        index = self._builder.add_video(source_id, path=file.path, split=split, size_bytes=file.size_bytes)
        return _UnavailableVideo(Reason.MISSING_FILE, "the video was rejected") if index is None else index


def read_with_local_tables(tables: Sequence[Location], read: Callable[[list[Path]], Reading]) -> Reading:
    """Call `read` with local paths of annotation files. Files at URLs are downloaded; the result contains the URLs.

    Raises:
        UserError: A file cannot be downloaded, or `read` raises this error.
    """
    if not any(isinstance(table, str) for table in tables):
        return read([Path(table) for table in tables])
    with tempfile.TemporaryDirectory(prefix="clipmill-tables-") as folder:
        paths, urls = [], {}
        for index, table in enumerate(tables):
            if isinstance(table, Path):
                paths.append(table)
                continue
            if not location_name(table).name or table.endswith("/"):
                raise UserError(f"{mask_secrets(table)} is a folder, not a table", hint="use the URL of a file")
            copy = Path(folder) / str(index) / location_name(table).name
            copy.parent.mkdir()
            root, key = split_url(table)
            try:
                open_objects(root).fetch(key, copy)
            except OSError as error:
                if isinstance(error, UserError) or error.filename == str(copy):
                    raise
                raise UserError(
                    f"cannot read {mask_secrets(table)}: {error.strerror or error}",
                    hint="check the URL of the annotation file",
                ) from error
            paths.append(copy)
            urls[str(copy)] = table
        try:
            reading = read(paths)
        except UserError as error:
            raise UserError(
                _restore_urls(str(error), urls),
                hint=None if error.hint is None else _restore_urls(error.hint, urls),
            ) from error
    rejected = reading.rejected
    for column in ("file", "detail"):
        texts = [_restore_urls(text, urls) for text in rejected[column].to_pylist()]
        index = rejected.schema.get_field_index(column)
        rejected = rejected.set_column(index, rejected.schema.field(column), pa.array(texts, pa.string()))
    return replace(
        reading,
        rejected=rejected,
        num_rows_used={_restore_urls(file, urls): count for file, count in reading.num_rows_used.items()},
        notes=tuple(_restore_urls(note, urls) for note in reading.notes),
    )


def _restore_urls(text: str, urls: dict[str, str]) -> str:
    for copy, url in urls.items():
        text = text.replace(copy, url)
    return text
