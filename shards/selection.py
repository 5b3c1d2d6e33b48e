"""Select the chunks and captions of a data folder with a `--where` expression.

Labels are the columns `label_NAME` of the captions in the manifest. They are compared as strings. If the expression
compares a label with numbers or conditions (true or false), the values of the label are converted first. A label is
valid for the time span of its caption.

A caption with labels is selected by its own labels. A caption without labels is selected by the labels of the labelled
captions that cover its time span, because the manifest stores labels only once for captions with the same times and
labels. A chunk is selected by the labels of the labelled captions that it overlaps.
"""

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.store import open_captions, read_videos
from clipmill.shards.chunk_table import Moments, read_chunk_rows
from clipmill.shards.columns import SCORES, how_to_repair
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.scores import open_scores, require_current_chunks
from clipmill.shards.where import Kind, Where, label_names

_VIDEO_FIELDS = ("dataset", "split", "num_captions")
_CHUNK_FIELDS = ("duration_s", "width", "height")
_TIME_FIELDS = ("num_frames", "fps_num", "fps_den")
_SPAN_FIELDS = ("begin_s", "end_s")  # columns of captions; a chunk also has a begin_s
_CAPTION_FIELDS = ("text", "source", "likelihood")


def selected_chunks(
    where: Where, data_dir: Path, *, video_ids: pa.Array, video_row: NDArray[np.integer], start_ms: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return True for each chunk that `where` selects, bool [chunks].

    Args:
        where: Conditions on chunks and videos.
        video_ids: Distinct IDs of videos.
        video_row: Index of each chunk's video in `video_ids`, [chunks].
        start_ms: Start of each chunk in its video in ms, [chunks].

    Raises:
        UserError: `where` uses a column, such as `scores`, that is missing, damaged or lacks some of the chunks; or it
            uses a label that is missing, or that has a value of the wrong kind.
    """
    fields = where.columns | ({"duration_s"} if where.labels else set())
    columns = _video_columns(fields, data_dir, video_ids=video_ids, video_row=video_row)
    columns["start_ms"] = pa.array(start_ms)
    if chunk_names := fields.intersection(_CHUNK_FIELDS):
        chunks = _read_rows(Variant.open(data_dir).require_complete(), [*_TIME_FIELDS, "width", "height"])
        num_frames, fps_num, fps_den = (chunks[name].to_numpy() for name in _TIME_FIELDS)
        duration_s = num_frames.astype(np.int64) * fps_den / fps_num
        chunks = chunks.append_column("duration_s", pa.array(duration_s))
        rows = find_chunks(chunks, video_ids=video_ids, video_row=video_row, start_ms=start_ms)
        if num_missing := int((rows < 0).sum()):
            raise UserError(
                f"--where uses {', '.join(sorted(chunk_names))} of chunks, but {count_noun(num_missing, 'chunk')} of "
                f"{len(rows):,} are not in the current variant of video",
                hint=f"run prep status --data {shlex.quote(str(data_dir))}, which shows the next command",
                flags=("--where",),
            )
        columns |= {name: _take_rows(chunks[name], rows) for name in chunk_names}
    for column, names in where.stored_in.items():
        table, failed_keys = stored_rows(data_dir, column, names)
        rows = find_chunks(table, video_ids=video_ids, video_row=video_row, start_ms=start_ms)
        missing_rows = np.flatnonzero(rows < 0)
        if failed_keys:  # the values of a failed chunk are unknown, which is not an error
            keys = [chunk_key(video_ids[int(video_row[row])].as_py(), int(start_ms[row])) for row in missing_rows]
            missing_rows = missing_rows[[key not in failed_keys for key in keys]]
        if len(missing_rows):
            raise UserError(
                f"--where uses {column}, which {count_noun(len(missing_rows), 'chunk')} of {len(rows):,} lack",
                hint=f"run prep status --data {shlex.quote(str(data_dir))} for the command that adds these values; "
                f"or leave {column} out of --where",
                flags=("--where",),
            )
        columns |= {name: _take_rows(table[name], rows) for name in names}
    if not where.labels:
        return where.mask(pa.table(columns))

    begin_s, label_rows = start_ms / 1000, read_label_rows(data_dir, where.labels)
    spans = Spans(video_row, begin_s, begin_s + np.asarray(columns["duration_s"]))
    part, caption = match_labels(label_rows, spans, video_ids=video_ids, must_cover=False)
    return _mask_parts(where, columns, label_rows, part=part, caption=caption)


def _mask_parts(
    where: Where,
    columns: Mapping[str, pa.Array | pa.ChunkedArray],
    label_rows: pa.Table,
    *,
    part: NDArray[np.int64],
    caption: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return True for each part of a video that satisfies `where` with the labels of a matching caption, bool [parts].

    Args:
        columns: Fields of each part, except labels.
        label_rows: Captions with labels, converted by `label_values`.
        part: Index of the part in each pair of a part and a caption, int64 [pairs]. Every part is in at least one pair.
        caption: Row of the caption in `label_rows`, int64 [pairs]; -1 if no caption matches the part.
    """
    parts = pa.table(dict(columns))
    pairs = parts.take(pa.array(part))
    rows = pa.array(caption, mask=caption < 0)
    for name in sorted(where.labels):
        pairs = pairs.append_column(name, label_rows[name].take(rows))
    return np.bincount(part[where.mask(pairs)], minlength=len(parts)) > 0


def stored_rows(data_dir: Path, column: str, names: Collection[str]) -> tuple[pa.Table, frozenset[str]]:
    """Read fields of a column with one sample per chunk.

    Returns:
        Table with `video_id` (dictionary-encoded), `start_ms` and the fields `names`.
        Keys of the chunks that failed. For `scores` the set is empty, because failed chunks have rows of nulls.

    Raises:
        UserError: The column cannot be read, or was made from a different variant of `video`.
    """
    if column == SCORES:
        return open_scores(data_dir, columns={"video_id", "start_ms", *names}).table, frozenset()
    variant = Variant.open(data_dir, column=column).require_complete()
    require_current_chunks(variant, data_dir)
    failures = (failure for commit in variant.commits.values() for failure in commit.failures)
    return _read_rows(variant, sorted(names)), frozenset(failure.key for failure in failures if failure.key)


def selected_captions(
    where: Where,
    data_dir: Path,
    captions: pa.Table | pa.RecordBatch,
    *,
    rows: NDArray[np.integer],
    video_ids: pa.Array,
    video_row: NDArray[np.integer],
    label_rows: pa.Table | None,
) -> NDArray[np.bool_]:
    """Return True for each caption that `where` selects, bool [rows].

    Args:
        where: Conditions on captions and their videos.
        captions: Captions of the manifest. Without a column `likelihood`, all likelihoods are unknown.
        rows: Rows of the captions to select from.
        video_ids: Distinct IDs of videos.
        video_row: Index of each caption's video in `video_ids`, [rows].
        label_rows: Captions with the labels that `where` uses (`labelled_captions`); None if it uses no labels.

    Raises:
        UserError: A label has a value of the wrong kind, or a condition cannot be evaluated.
    """
    columns = _video_columns(where.columns, data_dir, video_ids=video_ids, video_row=video_row)
    for name in where.columns.intersection(_CAPTION_FIELDS):
        has_column = name in captions.schema.names
        columns[name] = captions[name].take(pa.array(rows)) if has_column else pa.nulls(len(rows), pa.float32())
    if label_rows is None:
        return where.mask(pa.table(columns))

    values = label_values(captions.take(pa.array(rows)), where.labels)
    is_labelled = has_labels(values, where.labels)  # a caption with labels is paired only with itself
    spans = Spans(np.where(is_labelled, -1, video_row), values["begin_s"].to_numpy(), values["end_s"].to_numpy())
    part, caption = match_labels(label_rows, spans, video_ids=video_ids, must_cover=True)
    caption = np.where(is_labelled[part], len(label_rows) + part, caption)
    names = sorted(where.labels)
    all_labels = pa.concat_tables([label_rows.select(names), values.select(names)])
    return _mask_parts(where, columns, all_labels, part=part, caption=caption)


def labelled_captions(where: Where | None, data_dir: Path) -> pa.Table | None:
    """Read the captions with a label that `where` uses; return None if it uses no label.

    Raises:
        UserError: See `read_label_rows`.
    """
    return read_label_rows(data_dir, where.labels) if where is not None and where.labels else None


def caption_columns(where: Where | None, schema: pa.Schema) -> list[str]:
    """Return the caption columns of the manifest that `selected_captions` needs."""
    if where is None:
        return []
    fields = where.columns | ({"begin_s", "end_s"} if where.labels else set())
    return [
        name for name in schema.names if name in fields and name in (*_CAPTION_FIELDS, *_SPAN_FIELDS, *where.labels)
    ]


def empty_selection_error(where: Where, *, what: str) -> UserError:
    """Return the error for an expression that selects nothing.

    Args:
        what: Description of the data that the expression selects from.
    """
    return UserError(
        f"--where '{where.text}' selects none of {what}",
        hint="use a weaker condition or a larger --share, or leave these data out",
        flags=("--where",),
    )


def _video_columns(
    fields: Collection[str], data_dir: Path, *, video_ids: pa.Array, video_row: NDArray[np.integer]
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Return the fields of videos that are among `fields`, with one value for each element of `video_row`."""
    codes = pa.array(video_row, pa.int32())
    columns: dict[str, pa.Array | pa.ChunkedArray] = {"video_id": pa.DictionaryArray.from_arrays(codes, video_ids)}
    if names := [name for name in _VIDEO_FIELDS if name in fields]:
        videos = read_videos(data_dir)
        rows = pc.index_in(video_ids, value_set=videos["video_id"].combine_chunks())
        for name in names:
            values = videos[name].take(rows).combine_chunks()
            is_text = pa.types.is_string(values.type)
            columns[name] = pa.DictionaryArray.from_arrays(codes, values) if is_text else values.take(codes)
    return columns


def _read_rows(variant: Variant, names: Collection[str]) -> pa.Table:
    """Read `video_id` (dictionary-encoded), `start_ms` and the fields `names` of the chunks of a variant."""
    try:
        rows = read_chunk_rows(variant, columns=["video_id", "start_ms", *names])
    except (Damaged, OSError) as error:
        hint = how_to_repair("the table or the shard")
        raise UserError(str(error), hint=hint) from error
    entries, codes = rows.dictionary_codes("video_id")
    video_column = pa.DictionaryArray.from_arrays(pa.array(codes), entries)
    return rows.table.set_column(0, "video_id", video_column)


def find_chunks(
    table: pa.Table, *, video_ids: pa.Array, video_row: NDArray[np.integer], start_ms: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the row of each chunk in a table, int64 [chunks]; -1 if the chunk is missing.

    Args:
        table: Table with `video_id` (dictionary-encoded) and `start_ms`.
        video_ids: Distinct IDs of videos.
        video_row: Index of each chunk's video in `video_ids`, [chunks].
        start_ms: Start of each chunk in its video in ms, [chunks].
    """
    if not len(table):
        return np.full(len(video_row), -1)
    video_column = table["video_id"].chunk(0)
    row_of_code = (
        pc.fill_null(pc.index_in(video_column.dictionary, value_set=video_ids), -1).to_numpy().astype(np.int64)
    )
    table_row, table_ms = row_of_code[video_column.indices.to_numpy()], table["start_ms"].to_numpy()
    moments = Moments.build(table_row, table_ms)
    keys = moments.numbers(table_row, table_ms)
    is_sorted = bool((keys[1:] > keys[:-1]).all())
    order = None if is_sorted else np.argsort(keys, kind="stable")
    chunk_keys = moments.numbers(video_row, start_ms)
    positions = np.minimum(np.searchsorted(keys, chunk_keys, sorter=order), len(keys) - 1)
    rows = positions if order is None else order[positions]
    return np.where(keys[rows] == chunk_keys, rows, -1)


def _take_rows(column: pa.ChunkedArray, rows: NDArray[np.int64]) -> pa.Array | pa.ChunkedArray:
    # Usually, all chunks are requested in order, so no copy is needed.
    is_complete = len(rows) == len(column) and bool((np.diff(rows) == 1).all())
    return column if is_complete else column.take(pa.array(rows, mask=rows < 0))


_SPAN = ("begin_s", "end_s")


class Spans(NamedTuple):
    """Parts of videos: the row of each part's video, and its start and end in seconds, [N] each."""

    video_row: NDArray[np.integer]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def read_label_rows(data_dir: Path, kinds: Mapping[str, Kind] | None = None) -> pa.Table:
    """Read the captions that have at least one of the given labels.

    Args:
        kinds: Kind to which the values of each label are converted, by name of the label; None for all labels that are
            not lists, as strings.

    Returns:
        Table with `video_id`, `begin_s`, `end_s` and the labels.

    Raises:
        UserError: The captions lack a label; a caption can have several values of a label; or a value cannot be
            converted.
    """
    with open_captions(data_dir) as file:
        available_names = label_names(file.schema_arrow)
        if unknown := sorted(set(kinds or ()).difference(available_names)):
            problem = "can have several values of" if unknown[0] in file.schema_arrow.names else "have no column"
            raise UserError(
                f"--where uses {unknown[0]}, but the captions of {data_dir} {problem} {unknown[0]}",
                hint=f"use one of the labels {', '.join(available_names)}"
                if available_names
                else "add labels to the captions",
                flags=("--where",),
            )
        labels: dict[str, Kind] = (
            dict.fromkeys(available_names, "text") if kinds is None else dict(sorted(kinds.items()))
        )
        tables = []
        for group in range(file.num_row_groups):
            table = label_values(file.read_row_group(group, columns=["video_id", *_SPAN, *labels]), labels)
            tables.append(table.filter(pa.array(has_labels(table, labels))))
    if not tables:  # a manifest without captions has no row groups
        times = [(name, pa.float64()) for name in _SPAN]
        label_types = [(name, _TYPES[kind]) for name, kind in labels.items()]
        return pa.schema([("video_id", pa.string()), *times, *label_types]).empty_table()
    return pa.concat_tables(tables)


_TYPES = {"text": pa.string(), "number": pa.float64(), "condition": pa.bool_()}
_KIND_NAMES = {"number": "a number", "condition": "true or false"}


def label_values(captions: pa.Table, kinds: Mapping[str, Kind]) -> pa.Table:
    """Convert the labels in a table of captions to the given kinds. Missing labels become null.

    Raises:
        UserError: A value of a label cannot be converted.
    """
    for name, kind in sorted(kinds.items()):
        if name not in captions.column_names:
            captions = captions.append_column(name, pa.nulls(len(captions), _TYPES[kind]))
            continue
        texts = captions[name].cast(pa.string())
        try:
            values = texts.cast(_TYPES[kind])
        except pa.ArrowInvalid:
            example = next(text for text in pc.unique(texts).drop_null().to_pylist() if not _is_of_kind(text, kind))
            raise UserError(
                f"--where expects {name} to be {_KIND_NAMES[kind]}, but it has the value {quote_value(example)}",
                hint=f"compare it with strings, such as {name} = {quote_value(example)}",
                flags=("--where",),
            ) from None
        captions = captions.set_column(captions.column_names.index(name), name, values)
    return captions


def _is_of_kind(text: str, kind: Kind) -> bool:
    try:
        pa.array([text]).cast(_TYPES[kind])
    except pa.ArrowInvalid:
        return False
    return True


def has_labels(captions: pa.Table, names: Collection[str]) -> NDArray[np.bool_]:
    """Return True for each caption that has at least one of the labels `names`, bool [captions]."""
    has_label = np.zeros(len(captions), bool)
    for name in names:
        has_label |= captions[name].is_valid().to_numpy()
    return has_label


def match_labels(
    label_rows: pa.Table, spans: Spans, *, video_ids: pa.Array, must_cover: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair parts of videos with the labelled captions that overlap them.

    Args:
        label_rows: Captions with labels, from `read_label_rows`.
        spans: Parts of videos.
        video_ids: IDs of the videos of `spans`.
        must_cover: True to pair a part only with captions that cover all of it.

    Returns:
        Index of the part in each pair, int64 [pairs]. A part without a matching caption is in exactly one pair.
        Row of the caption in `label_rows`, int64 [pairs]; -1 if no caption matches the part.
    """
    video_of_caption = pc.fill_null(pc.index_in(label_rows["video_id"].cast(pa.string()), value_set=video_ids), -1)
    begins_s, ends_s = (label_rows[name].to_numpy() for name in _SPAN)
    caption_order, caption_of_video = _order_by_video(video_of_caption.to_numpy(), len(video_ids))
    part_order, part_of_video = _order_by_video(np.asarray(spans.video_row), len(video_ids))
    part, caption = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for video in np.flatnonzero((np.diff(caption_of_video) > 0) & (np.diff(part_of_video) > 0)):
        parts = part_order[part_of_video[video] : part_of_video[video + 1]]
        captions = caption_order[caption_of_video[video] : caption_of_video[video + 1]]
        begin_s, end_s = spans.begin_s[parts][:, None], spans.end_s[parts][:, None]
        if must_cover:
            is_match = (begins_s[captions] <= begin_s) & (ends_s[captions] >= end_s)
        else:
            is_match = (begins_s[captions] < end_s) & (ends_s[captions] > begin_s)
        rows, columns = np.nonzero(is_match)
        part.append(parts[rows])
        caption.append(captions[columns])
    matched_parts = np.concatenate(part)
    other_parts = np.setdiff1d(np.arange(len(spans.video_row)), matched_parts)
    return np.concatenate([matched_parts, other_parts]), np.concatenate([*caption, np.full(len(other_parts), -1)])


def _order_by_video(video_row: NDArray[np.integer], num_videos: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort rows by video. Rows without a video (-1) come first, before the first position of any video.

    Returns:
        Indices that sort the rows, int64 [rows].
        Position of each video's first row in this order, and the end of the last video, int64 [num_videos + 1].
    """
    order = np.argsort(video_row, kind="stable")
    return order, np.searchsorted(video_row[order], np.arange(num_videos + 1))
