"""Tables of captions for videos that are in the manifest already: Parquet, CSV with a header, or JSON lines.

The columns are `video` (the video_id, or the name of the video as in a caption table of `folder`) and `text`, and
optionally `begin_s`, `end_s`, `source` and `likelihood`. Parquet files are read in batches; their schema metadata may
have the key `clipmill`: JSON {"kind": "pseudo-captions", "weights", "weights_sha256", "video_variant", "settings"},
the model that wrote the captions. Other columns are ignored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from manifests.adapters.annotation_file import open_annotations
from manifests.adapters.reading import ROWS_PER_CHUNK, Reading, ReadingBuilder, encodable, interval_fault
from manifests.adapters.reasons import Reason
from manifests.adapters.tables import Row, log_probability, read_csv, read_json_lines, seconds
from manifests.adapters.video_files import Ambiguous, VideoFile, VideoLookup
from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.quoting import quoted
from manifests.schema import CAPTIONS, LIKELIHOOD

PSEUDO_CAPTIONS = "pseudo-captions"  # kind of a table that a model wrote
TABLE = "table"  # kind of any other table
_METADATA_KEY = b"clipmill"
_REQUIRED = ("video", "text")
_COLUMNS = pa.schema(
    [
        pa.field("video", pa.string()),
        pa.field("begin_s", pa.float64()),
        pa.field("end_s", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("source", pa.string()),
        pa.field("likelihood", pa.float64()),
    ]
)


@dataclass(frozen=True)
class CaptionTables:
    """What was read from one or several tables.

    Attributes:
        reading: the captions, with likelihood, and rejected rows; it has no videos.
        records: source -> {"kind", "models": metadata of the models that wrote it}.
    """

    reading: Reading
    records: dict[str, dict[str, Any]]


class ManifestVideos:
    """Finds videos of the manifest by the names in caption tables."""

    def __init__(self, videos: pa.Table) -> None:
        """`videos`: schema.VIDEOS."""
        self.ids: pa.Array = videos["video_id"].combine_chunks()
        self._videos = videos
        self._lookup: VideoLookup | None = None
        self._row_of_path: dict[Path, int] = {}

    def rows(self, names: pa.Array) -> np.ndarray:
        """Return the row of each video_id, int64[N]; -1 if there is none."""
        rows: np.ndarray = pc.index_in(names, value_set=self.ids).fill_null(-1).to_numpy(zero_copy_only=False)
        return rows.astype(np.int64)

    def row_named(self, name: str) -> int:
        """Return the row of the video with another name: source id, path, or file name; -1 if there is none.

        Raises:
            Ambiguous: several videos match.
        """
        if self._lookup is None:
            paths = [Path(path) for path in self._videos["path"].to_pylist()]
            self._row_of_path = {path: row for row, path in enumerate(paths)}
            sources = self._videos["source_id"].to_pylist()
            self._lookup = VideoLookup(
                [VideoFile(path, _named(source, path)) for source, path in zip(sources, paths, strict=True)]
            )
        found = self._lookup.find(name)
        return -1 if found is None else self._row_of_path[found.path]


def read_caption_tables(
    tables: Sequence[Path], *, videos: pa.Table, dataset: str, source: str | None = None
) -> CaptionTables:
    """Read tables of captions for `videos` (schema.VIDEOS).

    Args:
        dataset: value of the column `dataset` of rejected rows.
        source: the source of all captions, in place of the column.

    Raises:
        UserError: a table cannot be read, or lacks a column.
    """
    reader = _Reader(ManifestVideos(videos), dataset=dataset, source=source)
    for table in tables:
        reader.add(table)
    return reader.result()


class _Reader:
    def __init__(self, videos: ManifestVideos, *, dataset: str, source: str | None) -> None:
        self._videos, self._source = videos, source
        self._builder = ReadingBuilder(dataset)
        self._parts: list[pa.Table] = []
        self._records: dict[str, dict[str, Any]] = {}
        self._num_used: dict[Path, int] = {}

    def add(self, path: Path) -> None:
        self._num_used.setdefault(path, 0)
        model, batches = _open(path, source=self._source, builder=self._builder)
        for rows, batch in batches:
            self._add_batch(path, rows, batch, model=model)

    def result(self) -> CaptionTables:
        rejected = self._builder.build()
        captions = pa.concat_tables([_table([], [], self._videos.ids), *self._parts]).unify_dictionaries()
        example = self._videos.ids[0].as_py() if len(self._videos.ids) else None
        reading = Reading(
            videos=rejected.videos,
            captions=captions,
            rejected=rejected.rejected,
            num_captions_lost=rejected.num_captions_lost,
            num_rows_used={str(path): count for path, count in self._num_used.items()},
            example_file=example,
        )
        return CaptionTables(reading, self._records)

    def _add_batch(self, path: Path, rows: np.ndarray, batch: pa.Table, *, model: dict[str, Any] | None) -> None:
        texts = pc.utf8_trim_whitespace(batch["text"])
        begin_s, end_s, likelihood = (
            batch[name].fill_null(default).to_numpy()
            for name, default in (("begin_s", 0.0), ("end_s", inf), ("likelihood", 0.0))
        )
        names = batch["video"].combine_chunks()
        faults = (
            (Reason.EMPTY_ID, _true(pc.equal(pc.utf8_trim_whitespace(names.fill_null("")), ""))),
            (Reason.EMPTY_CAPTION, _true(pc.equal(texts.fill_null(""), ""))),
            (Reason.BAD_TIME, ~(np.isfinite(begin_s) & (begin_s >= 0) & (end_s > begin_s))),
            (Reason.BAD_LIKELIHOOD, ~(np.isfinite(likelihood) & (likelihood <= 0))),
            (Reason.MALFORMED_ROW, _true(pc.equal(pc.utf8_trim_whitespace(batch["source"].fill_null("")), ""))),
        )
        is_usable = np.ones(batch.num_rows, bool)
        for reason, is_wrong in faults:
            for index in np.flatnonzero(is_usable & is_wrong).tolist():
                self._builder.reject(
                    reason,
                    file=str(path),
                    row=int(rows[index]),
                    source_id=names[index].as_py(),
                    detail=_detail(reason, batch.slice(index, 1).to_pylist()[0]),
                )
            is_usable &= ~is_wrong
        video_rows = self._find(path, rows, names, is_usable=is_usable)
        used = np.flatnonzero(video_rows >= 0)
        kept = batch.take(pa.array(used))
        part = _table(video_rows[used], kept, self._videos.ids, texts=texts.take(pa.array(used)))
        self._num_used[path] += len(used)
        if len(used):
            self._parts.append(part)
            self._add_records(path, pc.unique(part["source"]).to_pylist(), model=model)

    def _find(self, path: Path, rows: np.ndarray, names: pa.Array, *, is_usable: np.ndarray) -> np.ndarray:
        """Return the video of each usable row, int64[N]; -1 for all others, which are rejected."""
        video_rows = np.where(is_usable, self._videos.rows(names), -1)
        other = np.flatnonzero(is_usable & (video_rows < 0))
        found: dict[str, int] = {}
        ambiguous: dict[str, str] = {}
        for index in other.tolist():
            name = names[index].as_py()
            if name not in found:
                try:
                    found[name] = self._videos.row_named(name)
                except Ambiguous as error:
                    found[name], ambiguous[name] = -1, str(error)
            video_rows[index] = found[name]
            if name in ambiguous:
                self._builder.reject(
                    Reason.AMBIGUOUS_VIDEO, file=str(path), row=int(rows[index]), source_id=name, detail=ambiguous[name]
                )
            elif found[name] < 0:
                self._builder.lose_captions(name, file=path, why="no such video in the manifest")
        return video_rows

    def _add_records(self, path: Path, sources: list[str], *, model: dict[str, Any] | None) -> None:
        kind = TABLE if model is None else str(model["kind"])
        for source in sources:
            record = self._records.setdefault(source, {"kind": kind, "models": []})
            known = record["models"]
            if record["kind"] != kind or (
                model is not None and known and known[0].get("weights_sha256") != model.get("weights_sha256")
            ):
                raise UserError(
                    f"{path} has captions of the source {source!r}, but an earlier table has captions of another model "
                    "under this name",
                    hint="add the tables one after another, each with its own --source",
                )
            if model is not None and model not in known:
                known.append({name: value for name, value in model.items() if name != "kind"})


def _open(
    path: Path, *, source: str | None, builder: ReadingBuilder
) -> tuple[dict[str, Any] | None, Iterator[tuple[np.ndarray, pa.Table]]]:
    """Return the model that wrote a table, if known, and its rows in batches with their numbers."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with open_annotations(path, "rb"):
            pass
        return _open_parquet(path, source=source)
    if suffix == ".csv":
        return None, _typed(path, read_csv(path, required=_REQUIRED), source=source, builder=builder)
    if suffix in {".jsonl", ".ndjson"}:
        return None, _typed(path, read_json_lines(path), source=source, builder=builder)
    raise UserError(
        f"{path} is not a .parquet, .csv or .jsonl file", hint="give a table of captions in one of these formats"
    )


def _open_parquet(
    path: Path, *, source: str | None
) -> tuple[dict[str, Any] | None, Iterator[tuple[np.ndarray, pa.Table]]]:
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error
    required = _REQUIRED if source is not None else (*_REQUIRED, "source")
    missing = [name for name in required if name not in schema.names]
    if missing:
        hint = "give --source NAME" if missing == ["source"] else f"required columns: {', '.join(required)}"
        columns = ", ".join(schema.names) or "none"
        raise UserError(f"{path} has no column {', '.join(missing)} (its columns: {columns})", hint=hint)
    for field in _COLUMNS:
        if field.name in schema.names and not _fits(schema.field(field.name).type, field.type):
            raise UserError(
                f"column {field.name} of {path} has type {schema.field(field.name).type}, expected {field.type}",
                hint="write the table again with this type",
            )
    return _model(path, schema.metadata), _parquet_batches(path, schema, source=source)


def _parquet_batches(path: Path, schema: pa.Schema, *, source: str | None) -> Iterator[tuple[np.ndarray, pa.Table]]:
    begin = 0
    names = [name for name in _COLUMNS.names if name in schema.names and not (name == "source" and source is not None)]
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_CHUNK, columns=names):
                table = pa.Table.from_batches([batch])
                columns = [
                    table[field.name].cast(field.type)
                    if field.name in names
                    else pa.repeat(pa.scalar(source if field.name == "source" else None, field.type), len(table))
                    for field in _COLUMNS
                ]
                table = pa.table(columns, schema=_COLUMNS)
                table.validate(full=True)  # strings that are not UTF-8
                yield np.arange(begin, begin + len(table)), table
                begin += len(table)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def _typed(
    path: Path, rows: Iterator[Row], *, source: str | None, builder: ReadingBuilder
) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Convert rows of text to batches; rows with a cell of another type are rejected."""
    numbers: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS.names}
    for row in rows:
        values, reason, detail = _cells(row, source=source)
        if reason is not None:
            name = row.values.get("video")
            builder.reject(
                reason, file=str(path), row=row.number, source_id=name if isinstance(name, str) else None, detail=detail
            )
            continue
        numbers.append(row.number)
        for name, column in columns.items():
            column.append(values[name])
        if len(numbers) == ROWS_PER_CHUNK:
            yield np.array(numbers), pa.table(columns, schema=_COLUMNS)
            numbers, columns = [], {name: [] for name in _COLUMNS.names}
    yield np.array(numbers, np.int64), pa.table(columns, schema=_COLUMNS)


def _cells(row: Row, *, source: str | None) -> tuple[dict[str, Any], Reason | None, str]:
    """Return the values of a row, or why it has none."""
    if row.fault is not None:
        return {}, Reason.MALFORMED_ROW, row.fault
    given = {**row.values, **({} if source is None else {"source": source})}
    values = {name: given.get(name) for name in _COLUMNS.names}
    for name in ("video", "text", "source"):
        value = values[name]
        if value is not None and not (isinstance(value, str) and encodable(value)):
            return {}, Reason.MALFORMED_ROW, f"{name} is {quoted(value)}, expected a string"
    try:
        values["begin_s"], values["end_s"] = (
            seconds(values["begin_s"], default=0.0),
            seconds(values["end_s"], default=inf),
        )
    except ValueError as error:
        return {}, Reason.BAD_TIME, str(error)
    try:
        values["likelihood"] = log_probability(values["likelihood"])
    except ValueError as error:
        return {}, Reason.BAD_LIKELIHOOD, f"likelihood is {error}"
    return values, None, ""


def _model(path: Path, metadata: dict[bytes, bytes] | None) -> dict[str, Any] | None:
    """Return the metadata of the model that wrote a Parquet file; None if the file has none."""
    content = (metadata or {}).get(_METADATA_KEY)
    if content is None:
        return None
    try:
        model = parse_json(content)
    except ValueError as error:
        raise UserError(
            f"the metadata {_METADATA_KEY.decode()} of {path} is not JSON: {error}", hint="write the table again"
        ) from error
    if not isinstance(model, dict) or model.get("kind") != PSEUDO_CAPTIONS:
        raise UserError(
            f"the metadata {_METADATA_KEY.decode()} of {path} is not that of {PSEUDO_CAPTIONS}: {quoted(model)}",
            hint="give a table of captions",
        )
    return model


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    found = found.value_type if pa.types.is_dictionary(found) else found
    if pa.types.is_null(found):
        return True
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found))
    return bool(pa.types.is_floating(found) or pa.types.is_integer(found))


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as Parquet: {error}", hint="write the table again, or copy it again")


def _named(source_id: str, path: Path) -> str:
    """Return the file name relative to the folder of a dataset whose source IDs are relative paths."""
    suffix = path.suffix
    return source_id if PurePosixPath(source_id).suffix == suffix else f"{source_id}{suffix}"


def _true(mask: pa.ChunkedArray | pa.Array) -> np.ndarray:
    return mask.to_numpy(zero_copy_only=False) if isinstance(mask, pa.Array) else mask.to_numpy()


def _detail(reason: Reason, row: dict[str, Any]) -> str:
    match reason:
        case Reason.EMPTY_ID:
            return "the row names no video"
        case Reason.EMPTY_CAPTION:
            return "the text is empty"
        case Reason.BAD_LIKELIHOOD:
            return f"likelihood is {row['likelihood']}, expected the logarithm of a probability, 0 or less"
        case Reason.BAD_TIME:
            begin_s = 0.0 if row["begin_s"] is None else row["begin_s"]
            return interval_fault(begin_s, inf if row["end_s"] is None else row["end_s"]) or "the times are not numbers"
    return "the row has no source: give --source NAME"


def _table(video_rows: Any, batch: Any, ids: pa.Array, *, texts: Any = None) -> pa.Table:
    schema = pa.schema([field for field in CAPTIONS if field.name != "caption_id"]).append(LIKELIHOOD)
    if not len(video_rows):
        return schema.empty_table()
    coded = pa.DictionaryArray.from_arrays(pa.array(video_rows, pa.int32()), ids)
    columns = {
        "video_id": coded,
        "begin_s": batch["begin_s"].fill_null(0.0),
        "end_s": batch["end_s"].fill_null(inf),
        "text": texts,
        "source": batch["source"].combine_chunks().dictionary_encode(),
        "likelihood": batch["likelihood"].cast(pa.float32()),
    }
    return pa.table(columns).cast(schema)
