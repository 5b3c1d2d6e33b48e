"""The loader of a mixture of latents, of one set for each data folder.

Each set reads its own samples. Samples and captions are numbered one folder after another, as those of
`clipmill.train.data.mixed_clips.MixedClips`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.caption_choice import CaptionTexts
from clipmill.train.data.latents.loader import CaptionedLatents, LatentLoader
from clipmill.train.data.latents.reading import LatentSample
from clipmill.train.data.latents.segment_set import Columns
from clipmill.train.data.loader import BatchLoader
from clipmill.train.data.mixed_clips import MixedSets
from clipmill.train.data.outcomes import FailedSample


class MixedLatents(MixedSets, LatentLoader):
    """A `LatentLoader` of several folders. For the arguments see `MixedSets`."""

    def __init__(
        self, sets: Sequence[LatentLoader], addresses: Sequence[str], *, weights: Sequence[Fraction] | None
    ) -> None:
        MixedSets.__init__(self, sets, addresses, weights=weights)
        # Not that of LatentLoader, which opens one folder.
        BatchLoader.__init__(self, self.first.loading)
        self.split, self.samples, self._tokenize = self.first.split, self.first.samples, self.first._tokenize
        self._order = self.folders.order

    def keys_of(self, samples: NDArray[np.int64]) -> list[str]:
        """The chunks of samples."""
        folder = self.folder_of(samples)
        own = samples - self._first_clip[folder]
        keys = {one: iter(self._sets[one].keys_of(own[folder == one])) for one in np.unique(folder).tolist()}
        return [next(keys[one]) for one in folder.tolist()]

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions of a folder are the same text."""
        for one in self._sets:
            assert isinstance(one, CaptionedLatents)
            one.require_different_texts()

    @cached_property
    def _texts(self) -> CaptionTexts:
        # One table, as finding the folder of each caption of a small batch would take longer than reading its text.
        num_ids = [one.num_caption_ids for one in self._sets]
        return CaptionTexts.joined([one._texts for one in self._sets], num_ids=num_ids)

    def _read(
        self, samples: NDArray[np.int64], positions: NDArray[np.int64], *, seed: int | None
    ) -> Iterator[LatentSample | FailedSample]:
        folder = self.folder_of(samples)
        columns: Columns = {}
        parts: dict[int, Iterator[LatentSample | FailedSample]] = {}
        for number in np.unique(folder).tolist():
            one, rows = self._sets[number], np.flatnonzero(folder == number)
            own = samples[rows] - self._first_clip[number]
            requests = one.samples.request(own, position=positions[rows], seed=seed)
            moves = {"clip_id": self._first_clip[number], "caption_id": self._first_caption[number]}
            for name, column in requests.columns.items():
                columns.setdefault(name, np.empty(len(samples), np.int64))[rows] = column + moves.get(name, 0)
            parts[number] = one.reader.read(replace(requests, columns=columns, rows=rows.tolist()))
        for number in folder.tolist():
            yield next(parts[number])
