"""Clips that show the same moment from several cameras (`--views`), and the captions that define the moments.

If a caption has a group and a view, its span is the recording of the event `group` by the camera `view`. A group may
have several spans per view, such as the parts of an episode: the first spans of all views form a moment, the second
spans form the next moment, and so on. The times of a clip's frames are sampled from the first view's span, up to the
length of the shortest span of all views. All views show the frames at the same offsets from the starts of their spans;
frame rates of cameras may differ. It is an error if a group lacks a view. If a view has no usable chunks for a
moment, the moment is omitted and counted.

Shape suffixes: V views, N rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.divided_videos import select_split
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.data.batch import Sample
from clipmill.train.data.caption_rows import UsableCaptions, usable_captions
from clipmill.train.data.captions import Annotations
from clipmill.train.data.chunks import ChunkSet, ClipQuery, ClipReader
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.data_folder import rows_of
from clipmill.train.data.frame_sampling import Moments, moments_of
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.samples import SampleTable

_NUM_NAMED = 3  # maximum number of groups in a message
_HINT = "set the columns `group` and `view` of the table of captions (docs/python.md)"


@dataclass(frozen=True)
class _View:
    """Distinct spans of one view: M spans of G groups, in the order of groups and times.

    Attributes:
        usable: Spans that can be shown, by their indices in [0, M).
        counts: Number of spans of each group, int64 [G].
        span_index: Index of the span of each caption of the view.
    """

    usable: UsableCaptions
    counts: NDArray[np.int64]
    span_index: NDArray[np.int64]


def open_groups(query: ClipQuery, chunks: ChunkSet, table: pa.Table | None) -> "GroupedCaptions":
    """Return the captions of a split that have a group and a view.

    Args:
        table: Captions of an evaluation protocol; None for the captions of the manifest.

    Raises:
        UserError: See `GroupedCaptions`.
    """
    captions = read_captions(query.data_dir) if table is None else table
    return GroupedCaptions(query.views, chunks, select_split(captions, query.data_dir, query.split))


class GroupedCaptions:
    """Moments of a split that all views can show, with the captions of the first view.

    Args:
        views: Names of the views.
        captions: Captions of the split.

    Attributes:
        captions: Captions of the first view for moments that all other views can show.
        remark: Remark on omitted moments; empty if no moment is omitted.

    Raises:
        UserError: The captions lack a view, or the views of a group have different numbers of spans.
    """

    def __init__(self, views: Sequence[str], chunks: ChunkSet, captions: pa.Table) -> None:
        self._views, self._chunks = views, chunks
        if not {"group", "view"} <= set(captions.column_names):
            raise UserError(f"the captions have no groups, and thus no views {', '.join(views)}", hint=_HINT)
        captions = captions.filter(captions["group"].is_valid())
        names = sorted(set(pc.unique(captions["view"]).to_pylist()) - {None})
        if missing_views := [view for view in views if view not in names]:
            raise UserError(
                f"the captions have no view {', '.join(missing_views)}",
                hint=f"use views of this split: {', '.join(names)}" if names else _HINT,
                flags=("--views",),
            )
        first_captions = captions.filter(pc.equal(captions["view"], views[0]))
        self._groups = pc.unique(first_captions["group"])
        first_view, *other_views = (self._open_view(view, captions) for view in views)
        counts, self._spans = first_view.counts, [view.usable for view in (first_view, *other_views)]
        for name, view in zip(views[1:], other_views, strict=True):
            if (is_missing := view.counts == 0).any():
                raise self._groups_error(f"have no view {name}", is_missing)
            if (differs := view.counts != counts).any():
                raise self._groups_error(f"have different numbers of spans of views {name} and {views[0]}", differs)
        is_shown = np.ones(int(counts.sum()), bool)
        for spans in self._spans[1:]:  # unusable spans of the first view are reported with all other unusable captions
            is_shown &= np.isin(np.arange(len(is_shown)), spans.caption)
        num_hidden = int((~is_shown).sum())
        self.remark = f"{count_noun(num_hidden, 'moment')} with a view that has no usable chunks" if num_hidden else ""
        moment = first_view.span_index
        self._moment_of = dict(zip(first_captions["caption_id"].to_pylist(), moment.tolist(), strict=True))
        self.captions: pa.Table = first_captions.filter(pa.array(is_shown[moment]))

    def _open_view(self, view: str, captions: pa.Table) -> "_View":
        """Return the spans of a view."""
        rows = captions.filter(pc.equal(captions["view"], view))
        group = rows_of(rows["group"], self._groups)
        rows, group = rows.filter(pa.array(group >= 0)), group[group >= 0]
        video = rows_of(rows["video_id"], self._chunks.video_ids)
        columns = (group, *(rows[name].to_numpy() for name in ("begin_s", "end_s")), video)
        spans, span_index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        times = {"video_row": spans[:, 3].astype(np.int64), "begin_s": spans[:, 1], "end_s": spans[:, 2]}
        usable = usable_captions(
            **times,
            is_of_split=self._chunks.are_entirely_in_split(**times),
            chunks=self._chunks.table,
            selected_chunks=self._chunks.selection.chunks,
        )
        counts = np.bincount(spans[:, 0].astype(np.int64), minlength=len(self._groups))
        return _View(usable, counts, span_index.reshape(-1))

    def _groups_error(self, problem: str, is_invalid: NDArray[np.bool_]) -> UserError:
        groups = np.flatnonzero(is_invalid)
        names = ", ".join(map(str, self._groups.take(pa.array(groups[:_NUM_NAMED])).to_pylist()))
        suffix = ", ..." if len(groups) > _NUM_NAMED else ""
        return UserError(
            f"{len(groups):,} of {count_noun(len(is_invalid), 'group')} {problem}: {names}{suffix}", hint=_HINT
        )

    @property
    def facts(self) -> tuple[str, ...]:
        """Values for the fingerprint of the samples: the names of the views, and a hash of their spans."""
        digest = hashlib.sha256()
        for spans in self._spans:
            for name in ("caption", "begin_us", "end_us", "first_chunk", "last_chunk"):
                digest.update(getattr(spans, name).tobytes())
        return *self._views, digest.hexdigest()

    def reader(
        self, table: SampleTable, shape: ClipShape, *, annotations: Sequence[Annotations], repeats: int = 1
    ) -> "ViewReader":
        """Return the reader for the rows of a table that was made from `captions`.

        Raises:
            UserError: `shape` has several temporal or spatial views.
        """
        if len(shape.views) > 1:
            raise UserError(
                f"{shape.views.num_clips} clips x {shape.views.num_crops} crops of {len(self._views)} cameras are not "
                "supported",
                hint="use one clip and one crop if samples have several cameras (--views)",
                flags=("--clips", "--crops"),
            )
        ids = table.caption_id
        if table.captions is not None:
            entries = table.captions.choice.first_entries(np.arange(len(table)))
            ids = table.captions.caption_id[table.captions.captions_at(entries)]
        assert ids is not None
        moment_N = np.array([self._moment_of[caption] for caption in ids.tolist()], np.int64)
        tables = [_table_of(spans, moment_N) for spans in self._spans]
        common = _CommonMoments(tables, self._chunks, shape)
        reader_arguments: list[dict[str, Any]] = [
            {
                "chunks": self._chunks,
                "table": view_table,
                "shape": shape,
                "repeats": repeats,
                "moments": partial(common.moments_of_view, view),
            }
            for view, view_table in enumerate(tables)
        ]
        first_view, *other_views = reader_arguments
        return ViewReader(
            [ClipReader(**arguments) for arguments in other_views],
            remark=self.remark,
            annotations=annotations,
            **first_view,
        )


def _table_of(usable: UsableCaptions, moment_N: NDArray[np.int64]) -> SampleTable:
    """Return a table with the spans of one view for these moments. The view must be able to show all of them."""
    index = np.searchsorted(usable.caption, moment_N)
    return SampleTable(
        first_part=usable.first_chunk[index],
        last_part=usable.last_chunk[index],
        begin_us=usable.begin_us[index],
        end_us=usable.end_us[index],
    )


class _CommonMoments:
    """Sampling of moments that all views of a row show, at the same offsets from the starts of their spans."""

    def __init__(self, tables: Sequence[SampleTable], chunks: ChunkSet, shape: ClipShape) -> None:
        self._chunks, self._sampling, self._first_chunk = chunks, shape.sampling, tables[0].first_part
        begin_us, end_us = ([getattr(table, name) for table in tables] for name in ("begin_us", "end_us"))
        self._begin_us_VN = np.stack(begin_us)
        self._length_us = (np.stack(end_us) - self._begin_us_VN).min(axis=0)

    def moments_of_view(self, view: int, row: int, rng: np.random.Generator | None) -> Moments:
        """Return the moments of a row in the video of a view."""
        times, begin_us = self._chunks.table.times(int(self._first_chunk[row])), int(self._begin_us_VN[0, row])
        end_us = begin_us + int(self._length_us[row])
        # Sample with the frame rate of the first view, because some rules count frames, and all views need the same
        # moments.
        moments = moments_of(begin_us, end_us, self._sampling, fps_num=times.fps_num, fps_den=times.fps_den, rng=rng)
        shift = (int(self._begin_us_VN[view, row]) - begin_us) * moments.denominator
        return Moments(tuple(numerator + shift for numerator in moments.numerators), moments.denominator)


class ViewReader(ClipReader):
    """Reader of clips with several views: `video` [V, T, ...], `time_s` [V, T], `colour` [V].

    This reader reads the first view, which also provides all other entries, and contains a reader for each other view.

    Args:
        other_readers: Readers of the other views, with the same rows.
        remark: Remark for the log.
        arguments: Keyword arguments of `ClipReader` for the first view.
    """

    def __init__(self, other_readers: Sequence[ClipReader], *, remark: str = "", **arguments: Any) -> None:
        super().__init__(**arguments)
        self._other_readers, self._remark, self._arguments = other_readers, remark, arguments

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the clips of a group of requests from all views."""
        return _join(super().load(requests), *(reader.load(requests) for reader in self._other_readers))

    def read(self, requests: Sequence[SampleRequest]) -> Any:
        """Read the bytes for the clips of a group of requests from all views, so that `load_read` can decode them."""
        return [super().read(requests), *(reader.read(requests) for reader in self._other_readers)]

    def load_read(self, clips: Any) -> list[Sample | FailedSample]:
        """Decode and crop the clips that `read` returned."""
        other_views = zip(self._other_readers, clips[1:], strict=True)
        return _join(super().load_read(clips[0]), *(reader.load_read(other) for reader, other in other_views))

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return the first view's frames, as the model sees them in an evaluation, RGB [H, W, 3]."""
        return ClipReader(**self._arguments).shown_frames(sample, num_frames=num_frames)

    def deviations(self) -> list[str]:
        """Return remarks on deviations from the settings, the number of views, and omitted moments."""
        return [*super().deviations(), f"{1 + len(self._other_readers)} views of each moment", self._remark]


def _join(*views: Sequence[Any]) -> list[Sample | FailedSample]:
    """Return one sample with all views for each clip, or the failure of the first view that failed."""
    outcomes: list[Sample | FailedSample] = []
    for samples in zip(*views, strict=True):
        failure = next((sample for sample in samples if isinstance(sample, FailedSample)), None)
        if failure is None:
            for name in ("time_s", "is_padded", "colour") if "is_padded" in samples[0] else ("time_s", "colour"):
                samples[0][name] = [sample[name] for sample in samples]
            samples[0]["video"] = np.stack([sample["video"] for sample in samples])
        outcomes.append(failure or samples[0])
    return outcomes
