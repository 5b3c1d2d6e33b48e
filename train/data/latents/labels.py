"""Labels of segments of latents: those of the captions that overlap them.

A segment has the label of the labelled caption that shares the most time with it; among equal ones, that of the lowest
caption id. Captions without this label do not count. A segment that no labelled caption overlaps is not a sample.

Suffixes: N segments, C captions, L labels.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.data.chunk_table import rows_of
from clipmill.train.data.classes import ClassList, labelled_rows
from clipmill.train.data.latents.captions import SegmentSpans
from clipmill.train.data.latents.segments import LatentRecords, Segments
from clipmill.train.data.selection import Selection


def label_segments(
    data_dir: Path,
    *,
    records: LatentRecords,
    segments: Segments,
    video_ids: pa.Array,
    classes: Sequence[ClassList],
    selection: Selection,
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Read the labels of the captions of the videos `video_ids` and find the segments that have them.

    Returns:
        The segments with at least one of the labels, ascending; int64 [N, L] the class of each in each class list, -1
        if it has none; and remarks.

    Raises:
        UserError: the captions have no such label, can have several values of it, or none is selected.
    """
    table = read_captions(data_dir)
    video_row = rows_of(table["video_id"], video_ids)
    labelled = labelled_rows(table, is_of_split=video_row >= 0, classes=classes)
    selected = selection.of_captions(table)
    begin_s, end_s = (table[name].to_numpy()[labelled.row] for name in ("begin_s", "end_s"))
    spans = SegmentSpans(records, segments)
    label_NL = np.full((len(segments), len(classes)), -1)
    share_NL = np.zeros((len(segments), len(classes)))
    for column, label_C in enumerate(labelled.label.T):
        has_label = np.flatnonzero(label_C >= 0 if selected is None else (label_C >= 0) & selected[labelled.row])
        caption_N, shared_us_N = spans.longest(
            video_row=video_row[labelled.row[has_label]], begin_s=begin_s[has_label], end_s=end_s[has_label]
        )
        found = caption_N >= 0
        label_NL[found, column] = label_C[has_label[caption_N[found]]]
        share_NL[found, column] = shared_us_N[found] / spans.lengths_us[found]
    is_labelled = (label_NL >= 0).any(axis=1)
    segment = np.flatnonzero(is_labelled)
    remarks = [", ".join(its.describe(label) for its, label in zip(classes, label_NL[is_labelled].T, strict=True))]
    if num_without := len(segments) - len(segment):
        remarks.append(f"{count_noun(num_without, 'segment')} without label left out")
    if of_captions := labelled.remarks():
        remarks.append(f"captions: {', '.join(of_captions)}")
    mean_share = float(share_NL[label_NL >= 0].mean()) if len(segment) else 0.0
    remarks.append(f"the caption that gives the label covers {mean_share:.0%} of a segment on average")
    return segment, label_NL[is_labelled], remarks
