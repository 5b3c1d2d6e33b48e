"""The set of (segment of latents, class) samples of one split: the twin of `train.data.labelled_clips`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.classes import ClassList
from train.data.latents.labelled import SegmentLabels
from train.data.latents.loader import LatentLoader


class LabelledLatents(LatentLoader):
    """A `LatentLoader` of the segments that have a label; `train.data.latents.labelled` says which they have.

    Args:
        classes: what labels are numbered by.
        also: of further labels; segments that have any of the labels are then samples.

    Raises:
        UserError: there is no such data, or no segment with a label.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        classes: ClassList,
        segment: str,
        batch: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        also: Sequence[ClassList] = (),
    ) -> None:
        super().__init__(
            data_dir,
            split=split,
            segment=segment,
            batch=batch,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
            text=False,
            classes=(classes, *also),
        )
        self.split = split

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """int64 [samples, 1 + further labels], the classes of each; -1 where it has none."""
        return self._labels.label

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of `classes`: int64 [samples]."""
        return self._labels.label[:, 0]

    @property
    def video(self) -> NDArray[np.int64]:
        """int64 [samples], number of the video of each."""
        return self.samples.video_of(np.arange(len(self)))

    @property
    def _labels(self) -> SegmentLabels:
        assert self.samples.labels is not None
        return self.samples.labels
