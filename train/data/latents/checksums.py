"""Compares what is read with the checksums of the indexes, each record once, when it is first needed."""

import zlib

import numpy as np
from numpy.typing import NDArray

from train.data.failures import FailedSample
from train.data.latents.segment_set import SegmentSet, Visits

_UNKNOWN, _GOOD, _BAD = 0, 1, 2


class Checksums:
    """Remembers one byte for each record and each member of embeddings."""

    def __init__(self, samples: SegmentSet) -> None:
        self._samples = samples
        self._latents = np.zeros(len(samples.records), np.uint8)
        self._text = np.zeros(0 if samples.text is None else len(samples.text.address), np.uint8)

    def failed(self, visits: Visits, begin: int, end: int) -> dict[int, FailedSample]:
        """Those of visits[begin:end] whose bytes are not those written, by their place in `visits`."""
        chunk = visits.chunk[begin:end]
        for unknown in np.unique(chunk[self._latents[chunk] == _UNKNOWN]).tolist():
            address, size = self._samples.records.payload(unknown)
            is_good = self._crc32(address, size) == self._samples.records.crc32[unknown]
            self._latents[unknown] = _GOOD if is_good else _BAD
        bad = self._latents[chunk] == _BAD
        members = self._text_members(visits, begin, end)
        bad_text = self._text[members] == _BAD if len(members) else np.zeros(len(chunk), bool)
        return {
            begin + row: self._failure(visits, begin + row, is_text=not bad[row])
            for row in np.flatnonzero(bad | bad_text).tolist()
        }

    def _text_members(self, visits: Visits, begin: int, end: int) -> NDArray[np.int64]:
        """The member that holds each embedding, compared by now; empty in a set without text."""
        text = self._samples.text
        if text is None or visits.text_address is None:
            return np.empty(0, np.int64)
        members = np.searchsorted(text.address, visits.text_address[begin:end], side="right") - 1
        for unknown in np.unique(members[self._text[members] == _UNKNOWN]).tolist():
            address, size = int(text.address[unknown]), int(text.size_bytes[unknown])
            is_good = self._crc32(address, size) == text.crc32[unknown]
            self._text[unknown] = _GOOD if is_good else _BAD
        return members

    def _crc32(self, address: int, size: int) -> int:
        return zlib.crc32(self._samples.tars.bytes_at(address, size))

    def _failure(self, visits: Visits, at: int, *, is_text: bool) -> FailedSample:
        column = "text" if is_text else "latents"
        key = self._samples.key(int(visits.chunk[at]))
        what = "embeddings of its video" if is_text else "bytes"
        return FailedSample(
            int(visits.position[at]), key, "checksum", f"its {what} in the {column} column are not those written"
        )
