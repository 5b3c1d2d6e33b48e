"""Labelled clips: each labelled caption of a split is a separate clip, even if two captions have the same span."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.divided_videos import is_of_splits
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import num_captions_of, read_captions, read_videos
from clipmill.train.data.batch import Sample
from clipmill.train.data.caption_rows import spans_at, usable_captions
from clipmill.train.data.chunks import ChunkSet, ClipQuery, ClipReader, query_clips
from clipmill.train.data.classes import ClassList, labelled_rows
from clipmill.train.data.data_folder import rows_of
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.query import DataQuery
from clipmill.train.data.samples import Samples, SampleTable, Source, open_fingerprint, open_table

if TYPE_CHECKING:
    from clipmill.train.data.views import GroupedCaptions


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
    """Open the labelled clips of a split.

    Args:
        classes: Class lists, which number the labels. Captions with other classes are omitted and counted. With several
            class lists, a sample has at least one of the labels.
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
        lambda: _make_table(
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
        nothing=query.nothing(chunks),
    )
    return Samples(table, reader, source, query.loading, repeats=repeats)


def open_labels(query: DataQuery) -> Samples[ClipReader]:
    """Open the labelled clips that a task needs; raise UserError as `open_labelled_clips` does."""
    return open_labelled_clips(query_clips(query), classes=query.classes, repeats=query.repeats)


def _make_table(
    data_dir: Path, chunks: ChunkSet, classes: Sequence[ClassList], *, split: str, captions: pa.Table | None
) -> SampleTable:
    captions, selection = read_captions(data_dir) if captions is None else captions, chunks.selection
    is_of_split = is_of_splits(captions, read_videos(data_dir), [split])
    labelled = labelled_rows(captions, is_of_split=is_of_split, classes=classes)
    rows, selected = labelled.row, selection.of_captions(captions)
    times = {name: captions[name].to_numpy()[rows] for name in ("begin_s", "end_s")}
    video_row = rows_of(captions["video_id"], chunks.video_ids)[rows]
    usable = usable_captions(
        video_row=video_row,
        **times,
        chunks=chunks.table,
        is_of_split=chunks.shows_only_split(video_row=video_row, **times),
        selected=None if selected is None else selected[rows],
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
