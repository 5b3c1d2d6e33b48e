"""Latents of several data folders as one set of segments, and the loader of their mixture.

The arrays of the folders' sets are joined, which makes no difference to what follows: tars are mapped at addresses of
their own, so that a batch is copied from any of them alike. Videos, chunks, segments, captions and samples are numbered
one folder after another.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.train.data.caption_choice import CaptionChoice, CaptionTexts, smallest
from clipmill.train.data.latents.captions import SegmentCaptions
from clipmill.train.data.latents.labels import SegmentLabels
from clipmill.train.data.latents.loader import CaptionedLatents, LatentLoader
from clipmill.train.data.latents.segment_set import SegmentSet
from clipmill.train.data.latents.segments import LatentRecords, Segments
from clipmill.train.data.mapped_tars import JoinedTars
from clipmill.train.data.mixed_clips import MixedFolders, mixed_folders
from clipmill.train.data.order import Resumable
from clipmill.train.data.stored_text import TextMembers


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
        first = sets[0]
        Resumable.__init__(self, seed=first._seed)
        self.first, self._sets, self.split = first, sets, first.split
        self.folders: MixedFolders = mixed_folders(sets, addresses, weights=weights, seed=first._seed)
        self.samples = JoinedSegments([one.samples for one in sets], self.folders)
        self._batch, self._rank, self._num_ranks = first._batch, first._rank, first._num_ranks
        self._order = self.folders.order
        self._tokenize, self._depth, self._verify = first._tokenize, first._depth, first._verify

    def folder_of(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """The folder of each sample, as an index."""
        return self.folders.order.folder_of(clips)

    @cached_property
    def _texts(self) -> CaptionTexts:
        # One table, as finding the folder of each caption of a small batch would take longer than reading its text.
        num_ids = [one.num_caption_ids for one in self._sets]
        return CaptionTexts.joined([one._texts for one in self._sets], num_ids=num_ids)

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions of a folder are the same text."""
        for one in self._sets:
            assert isinstance(one, CaptionedLatents)
            one.require_different_texts()

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [samples], the class of each in the first class list, in sets with labels."""
        assert self.samples.labels is not None
        return self.samples.labels.label[self.samples.rows_of(np.arange(len(self))), 0]


class JoinedSegments(SegmentSet):
    """The segments of several sets that have the same shape, split and columns."""

    def __init__(self, sets: Sequence[SegmentSet], folders: MixedFolders) -> None:
        # Not that of SegmentSet, which reads one folder.
        first = sets[0]
        self.split, self._folders, self._sets, self._opened = first.split, folders, sets, None
        self.video_ids = pa.concat_arrays([one.video_ids for one in sets])
        self.tars = JoinedTars([one.tars for one in sets])
        self.records = _joined_records(sets)
        first_segment = _starts([len(one.segments) for one in sets])
        self.segments = Segments(
            num_frames=first.segments.num_frames,
            first=np.append(
                np.concatenate([one.segments.first[:-1] + at for one, at in zip(sets, first_segment, strict=True)]),
                sum(len(one.segments) for one in sets),
            ),
            num_tails=sum(one.segments.num_tails for one in sets),
            tails=first.segments.tails,
        )
        self.text = None if first.text is None else _joined_text([one.text for one in sets if one.text is not None])
        self.captions = None if first.captions is None else _joined_captions(sets, first_segment)
        self.labels = None if first.labels is None else _joined_labels(sets, first_segment)
        self._unpacked = None
        self._kept = None
        if any(one._kept is not None for one in sets):
            rows = [np.arange(one._num_before) if one._kept is None else one._kept for one in sets]
            before = _starts([one._num_before for one in sets])
            self._kept = np.concatenate([one + at for one, at in zip(rows, before, strict=True)])

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self._folders.variant_name()

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # of SegmentSet cached
        """Hash of the samples and their order, and of the captions' texts."""
        return self._folders.fingerprint([one.fingerprint for one in self._sets])

    def describe(self) -> str:
        """One line for the log: shares, visits, and what the sets contain."""
        return self._folders.describe()


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each of several arrays begins when they are joined."""
    return [0, *np.cumsum(lengths).tolist()][:-1]


def _joined_records(sets: Sequence[SegmentSet]) -> LatentRecords:
    records, first = [one.records for one in sets], sets[0].records
    first_video = _starts([len(one.video_ids) for one in sets])
    names = ("start_ms", "num_frames", "header_bytes", "crc32")
    joined: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in records]) for name in names}
    return LatentRecords(
        shape=first.shape,
        video_row=np.concatenate([one.video_row + np.int32(at) for one, at in zip(records, first_video, strict=True)]),
        array_address=np.concatenate([one.base + one.array_address for one in records]),
        **joined,
        num_unknown=sum(one.num_unknown for one in records),
        packed_bytes=None
        if first.packed_bytes is None
        else np.concatenate([one.packed_bytes for one in records if one.packed_bytes is not None]),
    )


def _joined_text(parts: Sequence[TextMembers]) -> TextMembers:
    names = ("size_bytes", "crc32", "video_row")
    joined: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in parts]) for name in names}
    joined["address"] = np.concatenate([one.base + one.address for one in parts])
    order = np.argsort(joined["address"], kind="stable")
    in_order: dict[str, Any] = {name: array[order] for name, array in joined.items()}
    return TextMembers(width=parts[0].width, **in_order)


def _joined_captions(sets: Sequence[SegmentSet], first_segment: Sequence[int]) -> SegmentCaptions:
    parts = [one.captions for one in sets if one.captions is not None]
    first_caption = _starts([len(one.caption_id) for one in parts])
    first_id = _starts([one.num_caption_ids for one in sets])

    def moved(name: str, by: Sequence[int]) -> NDArray[np.int64]:
        return np.concatenate([getattr(one, name).astype(np.int64) + at for one, at in zip(parts, by, strict=True)])

    address = [one.records.base + its.address for one, its in zip(sets, parts, strict=True) if its.address is not None]
    return replace(
        parts[0],
        segment=smallest(moved("segment", first_segment)),
        choice=_joined_choice([one.choice for one in parts]),
        pair_caption=smallest(moved("pair_caption", first_caption)),
        caption_id=smallest(moved("caption_id", first_id)),
        address=np.concatenate(address) if address else None,
        words_sha256="",
        **{
            name: sum(getattr(one, name) for one in parts)
            for name in ("num_captions", "num_other_sources", "num_not_embedded", "num_not_shown")
        },
    )


def _joined_choice(parts: Sequence[CaptionChoice]) -> CaptionChoice:
    num_runs = [len(one.first_entry) - 1 for one in parts]
    first_entry = np.concatenate(
        [
            one.first_entry[:-1].astype(np.int64) + at
            for one, at in zip(parts, _starts([int(one.first_entry[-1]) for one in parts]), strict=True)
        ]
    )
    first_entry = smallest(np.append(first_entry, sum(int(one.first_entry[-1]) for one in parts)))
    if all(one.first_run is None for one in parts):
        return CaptionChoice(first_entry, None, None)
    runs, before, total = [], [], 0.0
    for one, at, count in zip(parts, _starts(num_runs), num_runs, strict=True):
        first_run = np.arange(count + 1) if one.first_run is None else one.first_run.astype(np.int64)
        weights = np.arange(count + 1.0) if one.before is None else one.before
        runs.append(first_run[:-1] + at)
        before.append(weights[:-1] + total)
        total += float(weights[-1])
    first_run = smallest(np.append(np.concatenate(runs), sum(num_runs)))
    return CaptionChoice(first_entry, first_run, np.append(np.concatenate(before), total))


def _joined_labels(sets: Sequence[SegmentSet], first_segment: Sequence[int]) -> SegmentLabels:
    parts = [one.labels for one in sets if one.labels is not None]
    return SegmentLabels(
        segment=np.concatenate([one.segment + at for one, at in zip(parts, first_segment, strict=True)]),
        label=np.concatenate([one.label for one in parts]),
        mean_share=parts[0].mean_share,
        num_captions=sum(one.num_captions for one in parts),
        remarks=(),
    )
