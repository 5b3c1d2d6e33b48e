"""The set of (clip, class) samples of one split: spans and labels of the manifest, pictures from the `video` column.

With repeats (Hoffer et al. 2020) an epoch shows every clip several times: sample i is of clip i // repeats, and the
samples of a clip stand in one row, so that its chunks are read and decoded once for all of them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.store import read_captions
from shards.tars import TarBytes
from train.data.batch import Sample
from train.data.caption_choice import choose_sources
from train.data.chunks import ChunkSet, rows_of
from train.data.classes import ClassList, names_of, numbers_of
from train.data.clip_samples import ClipSamples, VideoClips
from train.data.decoding.clip import Clip, ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings, SampleRequest
from train.data.outcomes import FailedSample
from train.data.usable_captions import one_by_one, usable_captions

_ONE = choose_sources(["labels"], wanted=None)


class LabelledClips(ClipSamples):
    """Samples of one split: each labelled row of the captions, even where two have the same span.

    Args:
        classes: what labels are numbered by; rows of other classes are left out, and counted.
        also: of further labels; rows that have any of the labels are then samples.
        decode: how frames come out of chunks.
        tars: how bytes of tars are read, where they do not lie in `data_dir`.
        repeats: samples of a clip, which divides the loader's group.

    Attributes:
        all_labels: int64 [clips, 1 + further labels], the classes of each; -1 where it has none.
        video: int64 [clips], number of the video of each.

    Raises:
        UserError: there is no such data, or nothing that can be shown.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        classes: ClassList,
        shape: ClipShape,
        loading: LoaderSettings,
        decode: DecodeRule = "packets",
        tars: TarBytes | None = None,
        also: Sequence[ClassList] = (),
        repeats: int = 1,
    ) -> None:
        self._repeats = repeats
        self._classes = (classes, *also)
        chunks = ChunkSet(data_dir, split=split, rule=decode, tars=tars)
        table = read_captions(data_dir)
        video_row = rows_of(table["video_id"], chunks.video_ids)
        labelled = labelled_rows(table, is_of_split=video_row >= 0, classes=self._classes)
        rows = labelled.row
        usable = usable_captions(
            video_row=video_row[rows],
            begin_s=table["begin_s"].to_numpy()[rows],
            end_s=table["end_s"].to_numpy()[rows],
            chunks=chunks.table,
        )
        found = one_by_one(usable, rank=np.zeros(len(rows), np.int16), sources=_ONE)
        self._num_captions = labelled.num_captions
        self._remarks = labelled.remarks() + usable.remarks()
        self.all_labels: NDArray[np.int64] = labelled.label[found.caption]
        self.video: NDArray[np.int64] = video_row[rows[found.caption]].astype(np.int64)
        self._caption_ids: NDArray[Any] = table["caption_id"].to_numpy()[rows[found.caption]]
        super().__init__(VideoClips(chunks, found.spans, shape), split=split, loading=loading)

    def __len__(self) -> int:
        return len(self.clips) * self._repeats

    @property
    def num_clips(self) -> int:
        """Ids of clips are from 0 to below this."""
        return len(self.clips)

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of `classes`: int64 [clips]."""
        return self.all_labels[:, 0]

    @property
    def variant_name(self) -> str:
        """The variant of the pictures."""
        return self.clips.chunks.variant_name

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where and what it is called."""
        classes = " ".join(str(its.as_json()) for its in self._classes)
        digest = hashlib.sha256(f"{self.variant_name} {self._group} {classes}".encode())
        if self._repeats > 1:
            digest.update(f"{self._repeats} of each".encode())
        for array in (self._caption_ids, self.all_labels, self.clips.spans.begin_us, self.clips.spans.end_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line: what is used and what is not, by reason, and how many of the classes are there."""
        there = [
            f"{len(np.unique(of_it[of_it >= 0])):,} of {len(its):,} classes ({its.label})"
            for its, of_it in zip(self._classes, self.all_labels.T, strict=True)
        ]
        first = f"{self.num_clips:,} of {self._num_captions:,} captions of split {self.split!r}"
        repeated = [f"{self._repeats} samples of each in an epoch"] if self._repeats > 1 else []
        return "; ".join([", ".join([first, *there]), *repeated, *self._remarks, *self.clips.describe()])

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Reads, decodes and crops samples; a chunk that several of them show is decoded once."""
        return super().load(
            [SampleRequest(self._clip(request.sample), request.position, request.seed) for request in requests]
        )

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return super().key(self._clip(sample))

    def sample(self, request: SampleRequest, clip: Clip) -> Sample:
        """The clip with its class and its names."""
        return Sample(
            position=request.position,
            key=self.clips.key(request.sample),
            clip_id=request.sample,
            caption_id=int(self._caption_ids[request.sample]),
            label=int(self.labels[request.sample]),
            video=clip.video,
            colour=clip.colour,
        )

    def _clip(self, sample: int) -> int:
        return sample // self._repeats


# Which captions have labels: rows of the manifest, and the number of the class of each.


@dataclass(frozen=True)
class LabelledRows:
    """The captions of a split that have at least one of some labels.

    Attributes:
        row: int64 [R], place of each in the table of captions, ascending.
        label: int64 [R, L], the class by each of the class lists; -1 where it has none of them.
        num_captions: captions of the split, with labels or without.
        num_unlabelled: those that have none of the labels.
        num_strange: those that have labels, but of none of the classes.
    """

    row: NDArray[np.int64]
    label: NDArray[np.int64]
    num_captions: int
    num_unlabelled: int
    num_strange: int

    def remarks(self) -> list[str]:
        """What is left out, with numbers."""
        counts = {
            f"{self.num_unlabelled:,} without label": self.num_unlabelled,
            f"{self.num_strange:,} of other classes": self.num_strange,
        }
        return [text for text, count in counts.items() if count]


def labelled_rows(captions: pa.Table, *, is_of_split: NDArray[np.bool_], classes: Sequence[ClassList]) -> LabelledRows:
    """Numbers the labels of a split's captions.

    Raises:
        UserError: the captions have no such label, or can have several of it.
    """
    of_split = np.flatnonzero(is_of_split)
    label_RL = np.empty((len(of_split), len(classes)), np.int64)
    has_any = np.zeros(len(of_split), bool)
    for place, its in enumerate(classes):
        names = names_of(captions, label=its.label).take(pa.array(of_split))
        label_RL[:, place] = numbers_of(names, its)
        has_any |= names.is_valid().to_numpy()
    is_kept = (label_RL >= 0).any(axis=1)
    return LabelledRows(
        row=of_split[is_kept],
        label=label_RL[is_kept],
        num_captions=len(of_split),
        num_unlabelled=int((~has_any).sum()),
        num_strange=int((has_any & ~is_kept).sum()),
    )
