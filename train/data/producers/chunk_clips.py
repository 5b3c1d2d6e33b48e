"""Clips without caption texts: complete chunks, segments of chunks, or the spans of labelled captions."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.divided_videos import is_in_splits
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import num_captions_of, read_captions, read_videos
from clipmill.train.data.batch import Sample
from clipmill.train.data.caption_rows import spans_at, usable_captions
from clipmill.train.data.chunks import ChunkSet, ClipQuery, ClipReader, query_clips
from clipmill.train.data.classes import ClassList, labelled_rows
from clipmill.train.data.data_folder import rows_of
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import SampleFailed
from clipmill.train.data.query import DataQuery
from clipmill.train.data.samples import Samples, SampleTable, Source, open_fingerprint, open_table

if TYPE_CHECKING:
    from clipmill.train.data.views import GroupedCaptions


def open_chunk_clips(
    query: ClipQuery, *, same_frames: bool = False, segment_us: int | None = None
) -> Samples[ClipReader]:
    """Open clips of complete chunks, or of segments of chunks. Parts of chunks that belong to other splits are omitted.

    Args:
        query: Query for the chunks. The `group` of its loading settings is the number of samples per clip in an epoch.
        same_frames: True to show the same moments, with different crops, in all samples of a clip.
        segment_us: Length, in microseconds, of the segments of each chunk; None for one clip per chunk.
            A remainder shorter than a quarter of this length is added to the last segment.

    Raises:
        UserError: The data do not exist, the split has no chunks, or the query has several views.
    """
    if query.views:
        raise UserError(
            f"--views is {','.join(query.views)}, but clips of complete chunks have only one view",
            hint="use a model that was trained without --views",
            flags=("--views",),
        )
    chunks, repeats = query.open_chunks(), query.loading.group
    depends_on = (*chunks.depends_on, *chunks.selection.depends_on, segment_us)
    table = open_table(
        "clips",
        lambda: _make_chunk_table(chunks, split=query.split, segment_us=segment_us),
        depends_on=depends_on,
        num_rows=chunks.num_rows,
    )

    def identify_chunks() -> list[NDArray[np.int64]]:
        rows = chunks.selection.rows
        ids = np.frombuffer("\n".join(chunks.video_ids.to_pylist()).encode(), np.uint8)
        names = ("video_row", "start_ms", "num_frames")
        return [ids, *(getattr(chunks.table, name)[rows].astype(np.int64) for name in names)]

    facts = (chunks.variant_name, repeats, same_frames, segment_us, chunks.selection.text)
    reader = ClipReader(chunks, table, query.shape, repeats=repeats, same_frames=repeats if same_frames else 1)
    source = Source(
        split=query.split,
        variant_name=chunks.variant_name,
        fingerprint=partial(
            open_fingerprint, table, facts, identify_chunks, depends_on=depends_on, num_rows=chunks.num_rows
        ),
        empty_error=query.empty_error(chunks),
    )
    return Samples(table, reader, source, query.loading, repeats=repeats)


def open_frames(query: DataQuery) -> Samples[ClipReader]:
    """Open the clips of chunks that a task needs; raise UserError as `open_chunk_clips` does."""
    return open_chunk_clips(query_clips(query), same_frames=query.same_frames)


def _make_chunk_table(chunks: ChunkSet, *, split: str, segment_us: int | None) -> SampleTable:
    parts = parts_of_split(chunks, chunks.selection.rows)
    spans, table = _spans(parts, segment_us=segment_us), chunks.table
    rows = parts.chunk if chunks.divided is None else np.unique(parts.chunk)
    chunks.require_same_manifest()
    num_chunks, num_videos = count_noun(len(rows), "chunk"), _count_distinct(table.video_row[rows])
    if segment_us is not None:
        num_chunks = f"{count_noun(len(spans['first_part']), 'segment')} of {num_chunks}"
    remarks = [f"{num_chunks} of {count_noun(num_videos, 'video')} of split {split!r}"]
    if num_without := len(chunks.video_ids) - _count_distinct(table.video_row):
        remarks.append(f"{count_noun(num_without, 'video')} without chunks")
    if num_single := int((table.num_frames[rows] == 1).sum()):
        remarks.append(f"{num_single:,} of a single frame, which is repeated")
    return SampleTable(**spans, remarks=(*remarks, *parts.remarks(), *chunks.selection.remarks()))


def _count_distinct(sorted_values: NDArray[np.integer]) -> int:
    return int(np.count_nonzero(sorted_values[1:] != sorted_values[:-1])) + bool(len(sorted_values))


@dataclass(frozen=True)
class ChunkParts:
    """Parts of chunks that belong to a split, in complete frames (clipmill.manifests.divided_videos).

    Attributes:
        chunk: Row of the chunk that contains each part, int64 [N], ascending.
        begin_us, end_us: Span of each part in the video, microseconds, int64 [N].
        num_trimmed: Number of chunks that are omitted partly or completely.
        lost_us: Total length of the omitted parts, in microseconds.
    """

    chunk: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    num_trimmed: int = 0
    lost_us: int = 0

    def remarks(self) -> list[str]:
        """Return a remark on the omitted parts; empty if nothing is omitted."""
        if not self.num_trimmed:
            return []
        omitted = f"{self.lost_us / US_PER_S:,.1f} s of {count_noun(self.num_trimmed, 'chunk')}"
        return [f"{omitted} left out, because they belong to other splits"]


def parts_of_split(chunk_set: ChunkSet, chunks: NDArray[np.int64]) -> ChunkParts:
    """Return the parts of chunks that belong to the split of `chunk_set`. `chunks` are rows of `chunk_set.table`."""
    table, divided = chunk_set.table, chunk_set.divided
    start_us, end_us = table.start_ms[chunks] * 1000, table.end_us_of(chunks)
    if divided is None:
        return ChunkParts(chunks, start_us, end_us)
    parts = divided.split_parts(chunk_set.split, video=table.video_row[chunks], begin_us=start_us, end_us=end_us)
    chunk, begin_us = chunks[parts.span], parts.begin_us.copy()
    for index in np.flatnonzero(begin_us > start_us[parts.span]).tolist():
        # If the frame on screen at the start of a part appeared earlier, it belongs to another split.
        at_us, last_us = int(begin_us[index]), int(parts.end_us[index])
        with suppress(SampleFailed):  # the error is reported when the chunk is read
            times = chunk_set.times(int(chunk[index]))
            frame = times.frame_at(at_us, 1)
            if times.frame_begin_us(frame) < at_us:
                is_last = frame >= times.frame_at(last_us - 1, 1)
                begin_us[index] = last_us if is_last else ceil(times.frame_begin_us(frame + 1))
    has_frames = begin_us < parts.end_us
    kept_us = np.bincount(parts.span, weights=(parts.end_us - parts.begin_us) * has_frames, minlength=len(chunks))
    lost_us = end_us - start_us - kept_us.astype(np.int64)
    return ChunkParts(
        chunk[has_frames],
        begin_us[has_frames],
        parts.end_us[has_frames],
        num_trimmed=int(np.count_nonzero(lost_us)),
        lost_us=int(lost_us.sum()),
    )


def _spans(parts: ChunkParts, *, segment_us: int | None) -> dict[str, Any]:
    chunks, begin_us, end_us = parts.chunk, parts.begin_us, parts.end_us
    if segment_us is not None:
        num_full, rest_us = np.divmod(end_us - begin_us, segment_us)
        counts = np.maximum(1, num_full + (4 * rest_us >= segment_us))
        chunk_of = np.repeat(np.arange(len(chunks)), counts)
        index = np.arange(len(chunk_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin_us, chunks = begin_us[chunk_of] + index * segment_us, chunks[chunk_of]
        end_us = np.where(index + 1 == counts[chunk_of], end_us[chunk_of], begin_us + segment_us)
    return {"begin_us": begin_us, "end_us": end_us, "first_part": chunks}


class Labels:
    """Annotations that add a class and a caption ID to samples (clipmill.train.data.captions.Annotations)."""

    def __init__(self, table: SampleTable) -> None:
        assert table.label is not None and table.caption_id is not None
        self._label_N, self._caption_id_N = table.label[:, 0], table.caption_id

    def add(self, sample: Sample, request: SampleRequest) -> None:
        """Add the class and the caption ID to a sample."""
        sample["caption_id"] = int(self._caption_id_N[request.sample])
        sample["label"] = int(self._label_N[request.sample])


def open_labelled_clips(query: ClipQuery, *, classes: Sequence[ClassList], repeats: int = 1) -> Samples[ClipReader]:
    """Open the labelled clips of a split. Each labelled caption is a clip, even if several captions have the same span.

    Args:
        classes: Class lists. The label of a clip is the index of its class in each list. Captions whose class is not in
            any of the lists are omitted and counted.
        repeats: Number of samples per clip in an epoch (repeated augmentation, Hoffer et al. 2020). It must divide the
            loader's group size.

    Raises:
        UserError: The data do not exist, or no clip is usable.
    """
    chunks, data_dir = query.open_chunks(has_captions=True), query.data_dir
    num_rows = chunks.num_rows + num_captions_of(data_dir)
    names = [class_list.as_json() for class_list in classes]
    groups: GroupedCaptions | None = None
    if query.views:
        from clipmill.train.data import views

        groups = views.open_groups(query, chunks, None)
    depends_on = (*chunks.depends_on, *chunks.selection.depends_on, names, *query.views)
    table = open_table(
        "labels",
        lambda: _make_label_table(
            data_dir, chunks, classes, split=query.split, captions=None if groups is None else groups.captions
        ),
        depends_on=depends_on,
        num_rows=num_rows,
    )
    facts: tuple[object, ...] = (chunks.variant_name, query.loading.group, repeats, names, chunks.selection.text)
    annotations = [Labels(table)]
    reader: Any
    if groups is None:
        reader = ClipReader(chunks, table, query.shape, annotations=annotations, repeats=repeats)
    else:
        reader = groups.reader(table, query.shape, annotations=annotations, repeats=repeats)
        facts = (*facts, *groups.facts)
    source = Source(
        split=query.split,
        variant_name=chunks.variant_name,
        fingerprint=partial(open_fingerprint, table, facts, depends_on=depends_on, num_rows=num_rows),
        empty_error=query.empty_error(chunks),
    )
    return Samples(table, reader, source, query.loading, repeats=repeats)


def open_labels(query: DataQuery) -> Samples[ClipReader]:
    """Open the labelled clips that a task needs; raise UserError as `open_labelled_clips` does."""
    return open_labelled_clips(query_clips(query), classes=query.classes, repeats=query.repeats)


def _make_label_table(
    data_dir: Path, chunks: ChunkSet, classes: Sequence[ClassList], *, split: str, captions: pa.Table | None
) -> SampleTable:
    captions, selection = read_captions(data_dir) if captions is None else captions, chunks.selection
    is_of_split = is_in_splits(captions, read_videos(data_dir), [split])
    labelled = labelled_rows(captions, is_of_split=is_of_split, classes=classes)
    rows, is_selected = labelled.row, selection.select_captions(captions)
    times = {name: captions[name].to_numpy()[rows] for name in ("begin_s", "end_s")}
    video_row = rows_of(captions["video_id"], chunks.video_ids)[rows]
    usable = usable_captions(
        video_row=video_row,
        **times,
        chunks=chunks.table,
        is_of_split=chunks.are_entirely_in_split(video_row=video_row, **times),
        is_selected=None if is_selected is None else is_selected[rows],
        selected_chunks=selection.chunks,
    )
    # Sort the spans of captions by video and time.
    order = np.lexsort((usable.end_us, usable.begin_us, usable.first_chunk))
    spans, caption = spans_at(usable, order), usable.caption[order]
    chunks.require_same_manifest()
    label = labelled.label[caption]
    num = f"{len(caption):,} of {count_noun(labelled.num_captions, 'caption')} of split {split!r}"
    counts = [class_list.describe(column) for class_list, column in zip(classes, label.T, strict=True)]
    remarks = (", ".join([num, *counts]), *labelled.remarks(), *usable.remarks(), *selection.remarks())
    return SampleTable(
        **vars(spans),
        label=label,
        caption_id=captions["caption_id"].to_numpy()[rows[caption]],
        remarks=remarks,
    )
