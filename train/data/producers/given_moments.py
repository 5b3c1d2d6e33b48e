"""Producer of clips at given moments (`read_clips`): each row shows frames of a video around a time.

A clip contains one frame per offset from the row's time. A frame is on screen until the next frame begins.
Times in tables are rounded, so a frame that begins up to NEAR_US after a moment counts as on screen at that moment. If
an offset points outside the video or the row's span, the first or last frame of the span is shown, as LeRobot pads an
episode. If the row's time lies outside the video or the span, the sample fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.keys import split_key
from clipmill.train.data.batch import Sample
from clipmill.train.data.chunks import ChunkSet, ClipReader
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.data_folder import ChunkSearch, rows_of
from clipmill.train.data.frame_sampling import US_PER_S, Moments
from clipmill.train.data.loader import LoaderSettings, SampleRequest
from clipmill.train.data.samples import Samples, SampleTable, Source, fingerprint_of

NEAR_US = 100  # tolerance of times, microseconds
_LATEST_S = 1e9  # maximum time in a table; longer than any video
_NUM_NAMED = 3  # maximum number of rows in a message


@dataclass(frozen=True)
class GivenRows:
    """Rows of a user's table, in order.

    Attributes:
        video_id: Video of each row, strings [N].
        time_us: Time in the video, microseconds, int64 [N].
        begin_us, end_us: Span to which frames are limited, microseconds, int64 [N]. By default the span begins at 0 and
            ends later than any video.
    """

    video_id: pa.ChunkedArray
    time_us: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]

    @classmethod
    def from_table(cls, table: pa.Table | Mapping[str, Any], *, view: str = "") -> "GivenRows":
        """Read `video_id` (or the `key` of any chunk of the video), `time_s`, and optionally `begin_s` and `end_s`.

        Args:
            view: Name of a camera. Columns for this camera, such as `video_id.top`, replace columns without a camera's
                name. Empty if there is only one camera.

        Raises:
            UserError: The value is not a table, a column is missing, or a value in a column is invalid.
        """
        try:
            columns = table if isinstance(table, pa.Table) else pa.table(dict(table))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UserError(f"table is {quote_value(table)}, which is not a table: {error}", hint=_COLUMNS) from error
        if view:
            by_name = dict(zip(columns.column_names, columns.columns, strict=True))
            view_columns = {
                name.removesuffix(f".{view}"): by_name[name] for name in by_name if name.endswith(f".{view}")
            }
            columns = pa.table(by_name | view_columns)
        names = columns.column_names
        if not {"video_id", "key"} & set(names) or "time_s" not in names:
            suffix = f" for the view {view}" if view else ""
            content = f"only the columns {', '.join(names)}" if names else "no columns"
            raise UserError(f"the table has {content}{suffix}", hint=_COLUMNS)
        if not len(columns):
            raise UserError("the table has no rows", hint="pass one row for each clip")
        time_us = _times_us(columns, "time_s")
        begin_us = _times_us(columns, "begin_s") if "begin_s" in names else np.zeros_like(time_us)
        latest_us = np.full_like(time_us, int(_LATEST_S * US_PER_S))
        end_us = _times_us(columns, "end_s") if "end_s" in names else latest_us
        if len(reversed_rows := np.flatnonzero(end_us <= begin_us)):
            raise UserError(
                f"end_s of row {reversed_rows[0]} of the table is not after begin_s ({len(reversed_rows):,} such rows)",
                hint="pass the start and the end of the span that limits the frames",
            )
        return cls(_video_ids(columns), time_us, begin_us, end_us)


_COLUMNS = "pass an Arrow table or a mapping with the columns video_id (or key) and time_s (seconds in the video)"


def _video_ids(columns: pa.Table) -> pa.ChunkedArray:
    name = "video_id" if "video_id" in columns.column_names else "key"
    try:
        texts = pc.cast(columns[name], pa.string())
        if name == "key":
            texts = pa.chunked_array([[split_key(str(key))[0] for key in texts.to_pylist()]], pa.string())
    except (pa.ArrowException, ValueError) as error:
        raise UserError(f"the column {name} of the table cannot be read: {error}", hint=_COLUMNS) from error
    return texts


def _times_us(columns: pa.Table, name: str) -> NDArray[np.int64]:
    try:
        times_s = columns[name].cast(pa.float64()).fill_null(np.nan).to_numpy()
    except pa.ArrowException as error:
        raise UserError(f"the column {name} of the table cannot be read: {error}", hint="pass seconds") from error
    times_s = np.where(times_s == np.inf, _LATEST_S, times_s) if name == "end_s" else times_s
    invalid_rows = np.flatnonzero(~(np.abs(times_s) <= _LATEST_S))
    if len(invalid_rows):
        first = invalid_rows[0]
        raise UserError(
            f"{name} of row {first} of the table is {times_s[first]} ({len(invalid_rows):,} such rows)",
            hint="pass seconds from the start of the video",
        )
    return np.rint(times_s * US_PER_S).astype(np.int64)


@dataclass(frozen=True)
class GivenMoments:
    """Moments that rows show, at offsets from their times, and annotations that add `is_padded` to samples.

    Attributes:
        rows: Rows. Their spans must lie within their videos.
        offsets_us: Offset of each frame, in microseconds.
    """

    rows: GivenRows
    offsets_us: Sequence[int]

    def shown_us(self, offset_us: int) -> NDArray[np.int64]:
        """Return the moment that each row shows for an offset, int64 [N]."""
        rows = self.rows
        return np.maximum(np.minimum(rows.time_us + offset_us, rows.end_us - 2 * NEAR_US), rows.begin_us) + NEAR_US

    def moments_of(self, row: int, rng: np.random.Generator | None) -> Moments:
        """Return the moments of a row; raise ValueError if the row's time is not in its span. `rng` is not used."""
        time_us, begin_us, end_us = self._times_of(row)
        if not begin_us - NEAR_US <= time_us < end_us:
            span = f"[{begin_us / US_PER_S:g}, {end_us / US_PER_S:g}) s"
            raise ValueError(f"time_s of row {row} is {time_us / US_PER_S:g}, outside its video or span: {span}")
        # Choose moments before the end, because a frame that begins at the end belongs to the next span.
        latest_us = end_us - 2 * NEAR_US
        return Moments(
            tuple(max(min(time_us + offset, latest_us), begin_us) + NEAR_US for offset in self.offsets_us), 1
        )

    def add(self, sample: Sample, request: SampleRequest) -> None:
        """Add the mask of padded frames to a sample."""
        time_us, begin_us, end_us = self._times_of(request.sample)
        sample["is_padded"] = [not begin_us <= time_us + offset + NEAR_US < end_us for offset in self.offsets_us]

    def _times_of(self, row: int) -> tuple[int, int, int]:
        rows = self.rows
        return int(rows.time_us[row]), int(rows.begin_us[row]), int(rows.end_us[row])


def open_given_moments(
    views: Sequence[GivenRows],
    chunks: ChunkSet,
    shape: ClipShape,
    loading: LoaderSettings,
    *,
    offsets_us: Sequence[int],
) -> Samples[ClipReader]:
    """Open clips at given moments. Sample i shows row i. Batches contain `time_s` and `is_padded`.

    Args:
        views: Rows for each camera; a single item if there is only one camera.
        chunks: Chunks of all videos.
        shape: Rules for cropping and resizing the frames.
        offsets_us: Offset of each frame from the time of the row, in microseconds. Offsets may be repeated.

    Raises:
        UserError: A row refers to an unknown video, or to a video without chunks.
    """
    first_view, *other_views = (
        {"chunks": chunks, "shape": shape, **_open_view(rows, chunks, offsets_us=offsets_us)} for rows in views
    )
    if other_views:
        from clipmill.train.data.views import ViewReader

        reader: ClipReader = ViewReader([ClipReader(**arguments) for arguments in other_views], **first_view)
    else:
        reader = ClipReader(**first_view)
    tables = [arguments["table"] for arguments in (first_view, *other_views)]
    ids = pc.unique(pa.chunked_array([chunk for rows in views for chunk in rows.video_id.chunks], pa.string()))
    facts = ("moments", chunks.variant_name, *offsets_us, *ids.to_pylist())
    parts = [array for rows in views for array in (rows_of(rows.video_id, ids), rows.time_us)]
    parts += [array for table in tables[1:] for array in (table.begin_us, table.end_us)]
    source = Source(
        split="",
        variant_name=chunks.variant_name,
        fingerprint=lambda: fingerprint_of(tables[0], facts, parts),
        empty_error=("the table has no rows", _COLUMNS),
    )
    return Samples(tables[0], reader, source, loading)


def _open_view(rows: GivenRows, chunks: ChunkSet, *, offsets_us: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a `ClipReader` for the rows of one camera."""
    video = rows_of(rows.video_id, chunks.video_ids)
    if (video < 0).any():
        raise UserError(
            f"{_describe_rows(video < 0, rows)} refer to videos that are not in the manifest",
            hint="use IDs from the column video_id of manifest/videos.parquet",
        )
    search = ChunkSearch(chunks.table)
    first_chunk, last_chunk = search.last_of(video - 1) + 1, search.last_of(video)
    if (last_chunk < first_chunk).any():
        raise UserError(
            f"{_describe_rows(last_chunk < first_chunk, rows)} refer to videos without chunks",
            hint="omit these rows, or run prep status to see why the chunks are missing",
        )
    rows = replace(
        rows, begin_us=np.maximum(rows.begin_us, 0), end_us=np.minimum(rows.end_us, search.end_us[last_chunk])
    )
    moments = GivenMoments(rows, offsets_us)
    first, last = (
        np.clip(search.last_started(video, moments.shown_us(offset) // 1000), first_chunk, last_chunk)
        for offset in (min(offsets_us), max(offsets_us))
    )
    table = SampleTable(
        first_part=first,
        last_part=last,
        begin_us=rows.begin_us,
        end_us=rows.end_us,
        remarks=(f"{count_noun(len(first), 'row')} of {count_noun(len(np.unique(video)), 'video')}",),
    )
    return {"table": table, "annotations": [moments], "moments": moments.moments_of}


def _describe_rows(is_invalid: NDArray[np.bool_], rows: GivenRows) -> str:
    """Return a phrase with the number of invalid rows, and with the first few of these rows and their videos."""
    invalid_rows = np.flatnonzero(is_invalid)
    videos = rows.video_id.take(pa.array(invalid_rows[:_NUM_NAMED])).to_pylist()
    names = ", ".join(f"row {row}: {video}" for row, video in zip(invalid_rows.tolist(), videos, strict=False))
    return f"{len(invalid_rows):,} of {count_noun(len(is_invalid), 'row')} ({names})"
