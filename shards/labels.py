"""Labels of captions in `--where`: columns `label_NAME` of the manifest's captions, as texts.

A label holds for the times of its caption. A caption with labels is selected by its labels. A caption without labels is
selected by the labels of every labelled caption that covers its times, because the manifest stores labels that captions
of the same times repeat only once. A chunk is selected by the labels of every labelled caption that it overlaps.
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import open_captions

_TIMES = ("begin_s", "end_s")


class Spans(NamedTuple):
    """Parts of videos: the number of the video of each, and its times, float64 [N]."""

    video_row: NDArray[np.integer]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def read_labelled(data_dir: Path, names: Collection[str] | None = None) -> pa.Table:
    """Read the captions that have one of some labels: `video_id`, `begin_s`, `end_s` and the labels as texts.

    Args:
        names: The labels; None for all that are not lists.

    Raises:
        UserError: the captions have no such label, or can have several values of it.
    """
    with open_captions(data_dir) as file:
        fields = {field.name: field for field in file.schema_arrow if field.name.startswith(LABEL_PREFIX)}
        known = [name for name, field in fields.items() if not pa.types.is_nested(field.type)]
        if unknown := sorted(set(names or ()).difference(known)):
            problem = "can have several values of" if unknown[0] in fields else "have no column"
            raise UserError(
                f"--where uses {unknown[0]}, and the captions of {data_dir} {problem} {unknown[0]}",
                hint=f"labels there: {', '.join(known) or 'none'}",
                flags=("--where",),
            )
        labels = known if names is None else sorted(names)
        tables = []
        for group in range(file.num_row_groups):
            table = label_texts(file.read_row_group(group, columns=["video_id", *_TIMES, *labels]), labels)
            tables.append(table.filter(pa.array(has_labels(table, labels))))
    if not tables:  # a manifest without captions has no row groups
        columns = {"video_id": pa.string(), **dict.fromkeys(_TIMES, pa.float64()), **dict.fromkeys(labels, pa.string())}
        return pa.schema(list(columns.items())).empty_table()
    return pa.concat_tables(tables)


def label_texts(captions: pa.Table, names: Collection[str]) -> pa.Table:
    """Return a table with these labels as texts; labels that it lacks are unknown."""
    for name in sorted(names):
        if name in captions.column_names:
            texts = captions[name].cast(pa.string())
            captions = captions.set_column(captions.column_names.index(name), name, texts)
        else:
            captions = captions.append_column(name, pa.nulls(len(captions), pa.string()))
    return captions


def has_labels(captions: pa.Table, names: Collection[str]) -> NDArray[np.bool_]:
    """bool [captions], True for each caption that has one of these labels."""
    has_label = np.zeros(len(captions), bool)
    for name in names:
        has_label |= captions[name].is_valid().to_numpy()
    return has_label


def match_labels(
    labelled: pa.Table, spans: Spans, *, video_ids: pa.Array, covering: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the labelled captions that overlap each of some parts of videos.

    Args:
        labelled: Captions (`read_labelled`).
        video_ids: IDs of the videos of `spans`.
        covering: Take only captions that cover the whole part.

    Returns:
        part: int64 [M], each part as often as it has a labelled caption, and once if it has none.
        caption: int64 [M], the row of that caption in `labelled`; -1 for none.
    """
    video_of_caption = pc.fill_null(pc.index_in(labelled["video_id"].cast(pa.string()), value_set=video_ids), -1)
    begins_s, ends_s = (labelled[name].to_numpy() for name in _TIMES)
    caption_order, caption_of_video = _by_video(video_of_caption.to_numpy(), len(video_ids))
    part_order, part_of_video = _by_video(np.asarray(spans.video_row), len(video_ids))
    part, caption = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for video in np.flatnonzero((np.diff(caption_of_video) > 0) & (np.diff(part_of_video) > 0)):
        parts = part_order[part_of_video[video] : part_of_video[video + 1]]
        captions = caption_order[caption_of_video[video] : caption_of_video[video + 1]]
        begin_s, end_s = spans.begin_s[parts][:, None], spans.end_s[parts][:, None]
        if covering:
            is_match = (begins_s[captions] <= begin_s) & (ends_s[captions] >= end_s)
        else:
            is_match = (begins_s[captions] < end_s) & (ends_s[captions] > begin_s)
        rows, columns = np.nonzero(is_match)
        part.append(parts[rows])
        caption.append(captions[columns])
    matched = np.concatenate(part)
    without = np.setdiff1d(np.arange(len(spans.video_row)), matched)
    return np.concatenate([matched, without]), np.concatenate([*caption, np.full(len(without), -1)])


def _by_video(video_row: NDArray[np.integer], num_videos: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ordered by video, and where the rows of each video begin; rows of no video (-1) are left out."""
    order = np.argsort(video_row, kind="stable")
    return order, np.searchsorted(video_row[order], np.arange(num_videos + 1))
