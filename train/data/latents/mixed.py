"""`MixedLatentReader`: segments of latents of several data folders, each read by the reader of its folder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch
from clipmill.train.data.captions import Captions
from clipmill.train.data.latents.reader import LatentReader
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
        self._numbering = numbering
        self._rings: dict[LoaderSettings, LatentRing] = {}

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """The samples or failures of some blocks, in order."""
        return chain.from_iterable(self._read(block, loading) for block in blocks)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[LatentSample]], Batch]:
        """The function that makes batches of samples; it uses the same memory in all iterations."""
        if loading not in self._rings:
            self._rings[loading] = LatentRing(
                self._readers[0].segments, loading, keys_of=self.keys_of, captions=self.captions
            )
        return self._rings[loading].collate

    @cached_property
    def captions(self) -> Captions | None:
        """The captions of all folders, whose texts are numbered one folder after another; None without."""
        parts = [reader.captions for reader in self._readers if reader.captions is not None]
        if not parts:
            return None
        # One table, as finding the folder of each caption of a small batch would take longer than reading its text.
        texts = pa.chunked_array([chunk for part in parts for chunk in part.stored_texts.chunks], pa.string())
        return Captions(parts[0].rows, texts, tokenize=parts[0].tokenize)

    @cached_property
    def _first_text(self) -> list[int]:
        """The number of the first text of each folder."""
        counts = [0 if reader.captions is None else len(reader.captions.stored_texts) for reader in self._readers]
        return np.cumsum([0, *counts]).tolist()

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
                "text_row": self._first_text[folder],
            }
            for name, column in requests.columns.items():
                of_all = columns.setdefault(name, np.empty(len(block.samples), np.int64))
                of_all[where] = column + first.get(name, 0)
            requests = replace(requests, columns=columns, rows=where.tolist())
            parts[folder] = reader.segment_reader.read(requests, loading)
        for folder in folder_of.tolist():
            yield next(parts[folder])
