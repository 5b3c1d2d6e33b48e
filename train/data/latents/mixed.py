"""`MixedLatentReader`: segments of latents of several data folders, each read by the reader of its folder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch
from clipmill.train.data.caption_choice import CaptionTexts
from clipmill.train.data.latents.reader import LatentCaptions, LatentReader, ring_of
from clipmill.train.data.latents.reading import Columns, LatentSample
from clipmill.train.data.latents.ring import LatentRing
from clipmill.train.data.loader import Block, LoaderSettings
from clipmill.train.data.mixed_samples import Numbering
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.samples import Samples


class MixedLatentReader:
    """Reads segments of several folders, numbered one folder after another. For the arguments see `MixedReader`."""

    def __init__(self, parts: Sequence[Samples], addresses: Sequence[str], numbering: Numbering) -> None:
        self._readers: list[LatentReader] = [part.reader for part in parts]  # type: ignore[misc]
        self._num_ids = [part.num_caption_ids for part in parts]
        self._numbering = numbering
        self._rings: dict[LoaderSettings, LatentRing] = {}

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """The samples or failures of some blocks, in order."""
        return chain.from_iterable(self._read(block, loading) for block in blocks)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[LatentSample]], Batch]:
        """The function that makes batches of samples; it uses the same memory in all iterations."""
        if loading not in self._rings:
            self._rings[loading] = ring_of(self._readers[0].segments, loading, self.keys_of, self.captions)
        return self._rings[loading].collate

    @cached_property
    def captions(self) -> LatentCaptions | None:
        """The captions of all folders; None without."""
        parts = [reader.captions for reader in self._readers if reader.captions is not None]
        if not parts:
            return None

        def join() -> CaptionTexts:
            # One table, as finding the folder of each caption of a small batch would take longer than reading its text.
            return CaptionTexts.joined([part.texts for part in parts], num_ids=self._num_ids)

        return LatentCaptions(parts[0].rows, join, tokenize=parts[0].tokenize)

    def keys_of(self, clips: NDArray[np.int64]) -> list[str]:
        """The chunks of clips."""
        keys: list[str] = [""] * len(clips)
        for folder, where, rows in self._numbering.divide(clips):
            for index, key in zip(where.tolist(), self._readers[folder].keys_of(rows), strict=True):
                keys[index] = key
        return keys

    def _read(self, block: Block, loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        columns: Columns = {}
        parts: dict[int, Iterator[Any]] = {}
        folder_of = self._numbering.folder_of(block.samples)
        for folder, where, rows in self._numbering.divide(block.samples):
            reader = self._readers[folder]
            requests = reader.requests(Block(rows, block.positions[where], block.seed))
            first = {
                "clip_id": self._numbering.first_clip[folder],
                "caption_id": self._numbering.first_caption[folder],
            }
            for name, column in requests.columns.items():
                of_all = columns.setdefault(name, np.empty(len(block.samples), np.int64))
                of_all[where] = column + first.get(name, 0)
            requests = replace(requests, columns=columns, rows=where.tolist())
            parts[folder] = reader.segment_reader.read(requests, loading)
        for folder in folder_of.tolist():
            yield next(parts[folder])
