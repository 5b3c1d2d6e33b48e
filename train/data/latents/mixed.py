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
from clipmill.train.data.mixed_clips import MixedFolders, mixed_folders, spans_of
from clipmill.train.data.outcomes import FailedSample


class MixedLatents(LatentLoader):
    """A `LatentLoader` of several folders.

    Args:
        sets: opened with the same arguments.
        addresses: of their folders.
        weights: of the folders; None for proportions by size.

    Attributes:
        first: a set that stands for all of them where only the shape of samples counts.
        folders: for the log and the metrics.

    Raises:
        UserError: the sets cannot be mixed.
    """

    def __init__(
        self, sets: Sequence[LatentLoader], addresses: Sequence[str], *, weights: Sequence[Fraction] | None
    ) -> None:
        # Not that of LatentLoader, which opens one folder.
        first = sets[0]
        BatchLoader.__init__(self, first.loading)
        self.first, self._sets, self.split, self.samples = first, sets, first.split, first.samples
        self.folders: MixedFolders = mixed_folders(sets, addresses, weights=weights, seed=first.loading.seed)
        self._order, self._tokenize = self.folders.order, first._tokenize
        self._first_caption = np.cumsum([0, *(one.num_caption_ids for one in sets)])

    def __len__(self) -> int:
        """Number of samples in an epoch, of all folders and ranks together."""
        return self.folders.order.num_samples

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in sets without captions."""
        return int(self._first_caption[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the captions' texts."""
        return self.folders.fingerprint([one.fingerprint for one in self._sets])

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self.folders.variant_name()

    def describe(self) -> str:
        """One line for the log: shares, visits, and what the sets contain."""
        return self.folders.describe()

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [samples], the class of each in the first class list, in sets with labels."""
        return np.concatenate([one.labels for one in self._sets])  # type: ignore[attr-defined]

    def folder_of(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """The folder of each sample, as an index."""
        return self.folders.order.folder_of(clips)

    def span_us(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of the samples' segments in their videos, microseconds."""
        return spans_of(self._sets, samples, self.folders.order.offsets)

    def keys_of(self, samples: NDArray[np.int64]) -> list[str]:
        """The chunks of samples."""
        folder = self.folder_of(samples)
        own = samples - self.folders.order.offsets[folder]
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
            own = samples[rows] - self.folders.order.offsets[number]
            requests = one.samples.request(own, position=positions[rows], seed=seed)
            moves = {"clip_id": self.folders.order.offsets[number], "caption_id": self._first_caption[number]}
            for name, column in requests.columns.items():
                columns.setdefault(name, np.empty(len(samples), np.int64))[rows] = column + moves.get(name, 0)
            parts[number] = one.reader.read(replace(requests, columns=columns, rows=rows.tolist()))
        for number in folder.tolist():
            yield next(parts[number])
