"""The set of (clip, class) samples of one split: spans and labels of the manifest, pictures from the `video` column."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.store import read_captions
from shards.tars import TarBytes
from train.classify.classes import ClassList, names_of, numbers_of
from train.data.batch import Sample
from train.data.caption_choice import choose_sources
from train.data.chunk_set import ChunkSet
from train.data.chunk_table import rows_of
from train.data.clip_captions import one_by_one
from train.data.clip_samples import ClipSamples
from train.data.decoding.clip import Clip, ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings, Visit
from train.data.usable_captions import usable_captions
from train.data.video_clips import VideoClips

_ONE = choose_sources(["labels"], wanted=None)


class LabelledClips(ClipSamples):
    """Samples of one split: each labelled row of the captions, even where two have the same span.

    Args:
        classes: what labels are numbered by; rows of other classes are left out, and counted.
        decode: how frames come out of chunks.
        tars: how bytes of tars are read, where they do not lie in `data_dir`.

    Attributes:
        labels: int64 [samples], the class of each.

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
    ) -> None:
        self._classes = classes
        chunks = ChunkSet(data_dir, split=split, rule=decode, tars=tars)
        table = read_captions(data_dir)
        video_row = rows_of(table["video_id"], chunks.video_ids)
        of_split = np.flatnonzero(video_row >= 0)
        names = names_of(table, label=classes.label).take(pa.array(of_split))
        labels = numbers_of(names, classes)
        self._num_rows, self._num_unlabelled = len(of_split), names.null_count
        self._num_strange = int((labels < 0).sum()) - names.null_count
        rows, labels = of_split[labels >= 0], labels[labels >= 0]
        usable = usable_captions(
            video_row=video_row[rows],
            begin_s=table["begin_s"].to_numpy()[rows],
            end_s=table["end_s"].to_numpy()[rows],
            chunks=chunks.table,
        )
        found = one_by_one(usable, rank=np.zeros(len(rows), np.int16), sources=_ONE)
        self._remarks = usable.remarks()
        self.labels: NDArray[np.int64] = labels[found.caption]
        self._caption_ids: NDArray[Any] = table["caption_id"].to_numpy()[rows[found.caption]]
        super().__init__(VideoClips(chunks, found.spans, shape), split=split, loading=loading)

    @property
    def variant_name(self) -> str:
        """The variant of the pictures."""
        return self.clips.chunks.variant_name

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where and what it is called."""
        digest = hashlib.sha256(f"{self.variant_name} {self._group} {self._classes.as_json()}".encode())
        for array in (self._caption_ids, self.labels, self.clips.spans.begin_us, self.clips.spans.end_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line: what is used and what is not, by reason, and how many of the classes are there."""
        num_there = len(np.unique(self.labels))
        parts = [
            f"{len(self):,} of {self._num_rows:,} captions of split {self.split!r}, {num_there:,} of "
            f"{len(self._classes):,} classes ({self._classes.label})"
        ]
        if self._num_unlabelled:
            parts.append(f"{self._num_unlabelled:,} without label")
        if self._num_strange:
            parts.append(f"{self._num_strange:,} of other classes")
        return "; ".join(parts + self._remarks + self.clips.describe())

    def sample(self, visit: Visit, clip: Clip) -> Sample:
        """The clip with its class and its names."""
        return Sample(
            position=visit.position,
            key=self.key(visit.sample),
            clip_id=visit.sample,
            caption_id=int(self._caption_ids[visit.sample]),
            label=int(self.labels[visit.sample]),
            video=clip.video,
            colour=clip.colour,
        )
