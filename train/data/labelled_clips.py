"""Sample set of labelled clips: spans and labels from the manifest, frames from the `video` column."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.quoting import counted
from clipmill.manifests.store import num_captions_of, read_captions
from clipmill.train.data.batch import Sample
from clipmill.train.data.chunk_table import rows_of
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.classes import ClassList, labelled_rows
from clipmill.train.data.clip_query import ClipQuery, query_clips
from clipmill.train.data.clip_samples import ClipSamples
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.node_cache import shared
from clipmill.train.data.query import DataQuery
from clipmill.train.data.usable_captions import Spans, spans_of_captions, usable_captions


@dataclass(frozen=True)
class OpenedLabels:
    """The labelled clips of a split; one entry of each array per clip.

    Attributes:
        labels, video: see `LabelledClips`.
        num_captions: of the split.
        num_seen, num_selected: what --where was asked about, and what it selects.
    """

    spans: Spans
    labels: NDArray[np.int64]
    video: NDArray[np.int64]
    caption_ids: NDArray[Any]
    num_caption_ids: int
    num_captions: int
    num_seen: int
    num_selected: int
    remarks: list[str]


def _open_clips(data_dir: Path, chunks: ChunkSet, classes: Sequence[ClassList]) -> OpenedLabels:
    table = read_captions(data_dir)
    video_row = rows_of(table["video_id"], chunks.video_ids)
    labelled = labelled_rows(table, is_of_split=video_row >= 0, classes=classes)
    rows, selected = labelled.row, chunks.selection.of_captions(table)
    usable = usable_captions(
        video_row=video_row[rows],
        begin_s=table["begin_s"].to_numpy()[rows],
        end_s=table["end_s"].to_numpy()[rows],
        chunks=chunks.table,
        selected=None if selected is None else selected[rows],
        selected_chunks=chunks.selection.chunks,
    )
    spans, caption = spans_of_captions(usable)
    caption_ids = table["caption_id"].to_numpy()[rows[caption]]
    return OpenedLabels(
        spans=spans,
        labels=labelled.label[caption],
        video=video_row[rows[caption]].astype(np.int64),
        caption_ids=caption_ids,
        num_caption_ids=int(caption_ids.max(initial=-1)) + 1,
        num_captions=labelled.num_captions,
        num_seen=chunks.selection.num_captions,
        num_selected=chunks.selection.num_selected,
        remarks=labelled.remarks() + usable.remarks(),
    )


class LabelledClips(ClipSamples):
    """The labelled captions of a split, each a clip of its own, even if two have the same span.

    Args:
        classes: number the labels; captions of other classes are excluded and counted.
        also: classes of further labels; captions with any of the labels are then samples.
        repeats: samples of a clip in an epoch (repeated augmentation, Hoffer et al. 2020); divides the loader's group.

    Attributes:
        all_labels: int64 [clips, 1 + further labels], the class of each; -1 if it has none.
        video: int64 [clips], number of the video of each.

    Raises:
        UserError: there is no such data, or no clip that can be shown.
    """

    def __init__(
        self,
        query: ClipQuery,
        *,
        classes: ClassList,
        also: Sequence[ClassList] = (),
        repeats: int = 1,
    ) -> None:
        self._classes = (classes, *also)
        chunks, data_dir = query.open_chunks(has_captions=True), query.data_dir
        names = [its.as_json() for its in self._classes]
        self._depends_on = (*chunks.depends_on, *chunks.selection.depends_on, names)
        self._num_rows = chunks.num_rows + num_captions_of(data_dir)
        opened = self._opened = shared(
            lambda: _open_clips(data_dir, chunks, self._classes),
            of=("labels", *self._depends_on),
            num_rows=self._num_rows,
            types=(OpenedLabels, Spans),
            column="labels",
        )
        chunks.selection.restore(opened.num_seen, opened.num_selected)
        self.all_labels: NDArray[np.int64] = opened.labels
        self.video: NDArray[np.int64] = opened.video
        super().__init__(chunks, opened.spans, query.shape, split=query.split, loading=query.loading, repeats=repeats)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids)."""
        return self._opened.num_caption_ids

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [clips], the class of each in `classes`."""
        return self.all_labels[:, 0]

    @property
    def fingerprint(self) -> str:
        """Hash of the samples, their order and their labels."""
        return shared(
            self._sha256,
            of=("fingerprint", *self._depends_on, self._group, self._repeats),
            num_rows=self._num_rows,
            types=(),
            column="fingerprint",
        )

    def _sha256(self) -> str:
        classes = " ".join(str(its.as_json()) for its in self._classes)
        digest = hashlib.sha256(f"{self.variant_name} {self._group} {classes}".encode())
        digest.update(self.chunks.selection.text.encode())
        if self._repeats > 1:
            digest.update(f"{self._repeats} of each".encode())
        for array in (self._opened.caption_ids, self.all_labels, self.spans.begin_us, self.spans.end_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for the log: captions used and excluded, by reason, and how many of the classes occur."""
        classes = [its.describe(label) for its, label in zip(self._classes, self.all_labels.T, strict=True)]
        first = f"{self.num_clips:,} of {counted(self._opened.num_captions, 'caption')} of split {self.split!r}"
        repeated = [f"{self._repeats} samples of each in an epoch"] if self._repeats > 1 else []
        return "; ".join(
            [
                ", ".join([first, *classes]),
                *repeated,
                *self._opened.remarks,
                *self.chunks.selection.remarks(),
                *self.deviations(),
            ]
        )

    def complete(self, sample: Sample, request: SampleRequest) -> None:
        """Add class and caption id."""
        sample["caption_id"] = int(self._opened.caption_ids[request.sample])
        sample["label"] = int(self.labels[request.sample])


def open_labels(query: DataQuery) -> LabelledClips:
    """Open the labelled clips that a task asks for; raises UserError like `LabelledClips`."""
    first, *others = query.classes
    return LabelledClips(query_clips(query), classes=first, also=others, repeats=query.repeats)
