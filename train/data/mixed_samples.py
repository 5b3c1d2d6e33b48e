"""Mixtures: the samples of several data folders, which one loader reads; clipmill.train.data.mixture has their order.

The tables of a mixture do not know of each other. Samples, clips and captions of the mixture are numbered one folder
after another, so that a loss that keeps state for each clip or caption has a place for each. Failures name their
folder.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import import_object
from clipmill.train.config.shards import folder_names
from clipmill.train.data.loader import Loader, Reader, SampleRequest
from clipmill.train.data.mixture import MixedOrder
from clipmill.train.data.order import set_fingerprint
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.samples import BatchedSamples, Samples
from clipmill.train.data.workers import Outcome, ReadAhead, ThreadedReader


@dataclass(frozen=True)
class MixedFolders:
    """The folders of a mixture, for the log, metrics and the results page; one entry per folder.

    Attributes:
        names: short ones.
        addresses: as in --shards.
        described: Description of each set.
        variants: that each set comes from.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    described: tuple[str, ...]
    variants: tuple[str, ...]
    order: MixedOrder

    @property
    def shares(self) -> list[float]:
        """Share of each folder in the samples of a run."""
        return [share / sum(self.order.shares) for share in self.order.shares]

    def counts(self, position: int) -> dict[str, int]:
        """Number of samples of each folder before a position, failed ones included."""
        return dict(zip(self.names, self.order.counts(position), strict=True))

    def facts(self) -> list[dict[str, Any]]:
        """Entry of run.json: address, share, and visits of each sample per epoch."""
        sizes = np.diff(self.order.offsets).tolist()
        columns = (
            self.names,
            self.addresses,
            sizes,
            self.shares,
            self.order.per_epoch(),
            self.described,
            self.variants,
        )
        keys = ("name", "shards", "num_samples", "share", "per_epoch", "data", "variant")
        return [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]

    def describe(self) -> str:
        """One line for the log: shares, how often each folder is visited, and what the sets contain."""
        each = [
            f"{folder['name']} ({folder['share']:.1%} of the samples, {_visits(folder['per_epoch'])}: {folder['data']})"
            for folder in self.facts()
        ]
        total = self.order.num_samples
        return f"mixture of {len(self.names)} data folders, {total:,} samples per epoch; {'; '.join(each)}"

    def variant_name(self) -> str:
        """The variants that the samples come from."""
        if len(set(self.variants)) == 1:
            return self.variants[0]
        return ", ".join(f"{variant} ({name})" for name, variant in zip(self.names, self.variants, strict=True))

    def fingerprint(self, parts: Sequence[str]) -> str:
        """Hash of the order, from the fingerprints of the sets."""
        orders, contents = zip(*(part.partition("-")[::2] for part in parts), strict=True)
        order, content = (
            hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest()
            for texts in ((self.order.shares, *orders), contents)
        )
        return set_fingerprint(order, content) if any(contents) else order


def _visits(per_epoch: float) -> str:
    return "each visited once per epoch" if per_epoch == 1 else f"each visited {per_epoch:.3g} times per epoch"


def mixed_folders(
    sets: Sequence[Any], addresses: Sequence[str], *, weights: Sequence[Fraction] | None, seed: int, group: int = 1
) -> MixedFolders:
    """The folders of sample sets that can be mixed.

    Raises:
        UserError: they differ in what has to be the same.
    """
    require_alike({address: samples.source.alike for address, samples in zip(addresses, sets, strict=True)})
    return MixedFolders(
        names=folder_names(addresses),
        addresses=tuple(addresses),
        described=tuple(samples.describe() for samples in sets),
        variants=tuple(samples.variant_name for samples in sets),
        order=MixedOrder([samples.num_samples for samples in sets], weights=weights, seed=seed, group=group),
    )


def require_alike(facts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a UserError where data folders differ in one of some facts, given by address."""
    (first, first_facts), *others = facts.items()
    for address, other_facts in others:
        for name, value in first_facts.items():
            if other_facts[name] != value:
                other = other_facts[name]
                raise UserError(
                    f"{first} and {address} cannot be mixed: {name} {value} in the first, {other} in the second",
                    hint="make the column of both with the same settings and weights, or train on one of them",
                )


class MixedSamples(BatchedSamples):
    """The samples of several folders. For the methods see `clipmill.train.data.samples.Samples`.

    Args:
        parts: Samples of each folder, opened with the same loader settings.
        addresses: Addresses of the folders.
        weights: Weights of the folders; None for proportions by size.

    Attributes:
        folders: Folders for the log and the metrics.

    Raises:
        UserError: the samples cannot be mixed.
    """

    def __init__(
        self, parts: Sequence[Samples], addresses: Sequence[str], *, weights: Sequence[Fraction] | None
    ) -> None:
        first = self.first = parts[0]
        self.parts, loading = parts, first.loader.loading
        self.folders = mixed_folders(parts, addresses, weights=weights, seed=loading.seed, group=loading.group)
        self.numbering = Numbering(parts)
        reader: Reader = import_object(first.reader.mixture)(parts, self.folders.addresses, self.numbering)
        self.loader = Loader(self, reader, loading, order=self.folders.order)
        self.split, self.frame_shape, self.text_width = first.split, first.frame_shape, first.text_width

    def __len__(self) -> int:
        return self.folders.order.num_samples

    @property
    def num_samples(self) -> int:
        """Number of samples of all folders in an epoch."""
        return len(self)

    @property
    def visits_per_epoch(self) -> float:
        """Number of samples that training takes in an epoch: every sample of all folders, once on average."""
        return float(sum(part.visits_per_epoch for part in self.parts))

    @property
    def num_clips(self) -> int:
        """Number of distinct clips; ids of clips are in [0, num_clips)."""
        return int(self.numbering.first_clip[-1])

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in sets without captions."""
        return int(self.numbering.first_caption[-1])

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self.folders.variant_name()

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        return self.folders.fingerprint([part.fingerprint for part in self.parts])

    def describe(self) -> str:
        """One line for the log: shares, visits, and what the folders contain."""
        return self.folders.describe()

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [clips], the class of each clip, in folders with labels."""
        return np.concatenate([part.labels for part in self.parts])

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions of a folder are the same text."""
        for part in self.parts:
            part.require_different_texts()

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of clips in their videos, microseconds."""
        begin_us, end_us = np.empty_like(clips), np.empty_like(clips)
        for folder, where, rows in self.numbering.divide(clips):
            begin_us[where], end_us[where] = self.parts[folder].span_us(rows)
        return begin_us, end_us


class Numbering:
    """Numbers of the clips and captions of several folders, one folder after another.

    Attributes:
        first_clip, first_caption: int64 [K + 1], number of the first clip and caption of each folder, then their total.
    """

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.first_clip: NDArray[np.int64] = np.cumsum([0, *(part.num_clips for part in parts)])
        self.first_caption: NDArray[np.int64] = np.cumsum([0, *(part.num_caption_ids for part in parts)])

    def folder_of(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """The folder of each clip, as an index."""
        return np.searchsorted(self.first_clip, clips, side="right") - 1

    def divide(self, clips: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Each folder that has some of the clips: its index, the indices of its clips, and their rows there."""
        folders = self.folder_of(clips)
        for folder in np.unique(folders).tolist():
            where = np.flatnonzero(folders == folder)
            yield folder, where, clips[where] - self.first_clip[folder]


class MixedReader(ThreadedReader):
    """Reads clips and images of several folders in the same threads.

    Args:
        parts: Samples of each folder.
        addresses: Addresses of the folders, for failures.
    """

    def __init__(self, parts: Sequence[Samples], addresses: Sequence[str], numbering: Numbering) -> None:
        self._readers: list[Any] = [part.reader for part in parts]
        self._addresses, self._numbering = addresses, numbering
        self._first_sample: list[int] = np.cumsum([0, *map(len, parts)]).tolist()
        decoders = [reader.decoder for reader in self._readers if reader.decoder is not None]
        for reader in self._readers:
            if reader.decoder is not None:
                # What a decoder keeps depends on packets alone; one per folder would have as many contexts per thread.
                reader.decoder = decoders[0]

    @property
    def ahead(self) -> ReadAhead | None:
        """How samples of remote folders are read ahead of loading; None if all are local."""
        num_threads = [reader.ahead.num_threads for reader in self._readers if reader.ahead is not None]
        return ReadAhead(self.read, self.load_read, max(num_threads)) if num_threads else None

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins, or the name of the image."""
        folder, number = self._place(sample)
        return str(self._readers[folder].key(number))

    def place(self, sample: int) -> str:
        """The data folder."""
        return f" (data folder {self._addresses[self._place(sample)[0]]})"

    def load(self, requests: Sequence[SampleRequest]) -> list[Outcome]:
        """Load the samples of a group of requests, in their order; samples of one folder that follow one another share
        work. A group is of one folder, unless a run was resumed in the middle of one."""
        loaded: list[Outcome] = []
        for folder, part in self._by_folder(requests):
            loaded += self._renumbered(folder, self._readers[folder].load(part))
        return loaded

    def read(self, requests: Sequence[SampleRequest]) -> list[tuple[int, Any]]:
        """Read the bytes of a group of requests, with the folder of each part."""
        return [(folder, self._readers[folder].read(part)) for folder, part in self._by_folder(requests)]

    def load_read(self, read: list[tuple[int, Any]]) -> list[Outcome]:
        """Decode and crop samples that were read."""
        loaded: list[Outcome] = []
        for folder, part in read:
            loaded += self._renumbered(folder, self._readers[folder].load_read(part))
        return loaded

    def _by_folder(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, list[SampleRequest]]]:
        """Requests that follow one another in one folder, with its own numbers."""
        for folder, part in groupby(requests, key=lambda request: self._place(request.sample)[0]):
            first = self._first_sample[folder]
            yield folder, [replace(request, sample=request.sample - first) for request in part]

    def _renumbered(self, folder: int, loaded: list[Outcome]) -> list[Outcome]:
        for sample in loaded:
            if not isinstance(sample, FailedSample):
                sample["clip_id"] += int(self._numbering.first_clip[folder])
                if "caption_id" in sample:
                    sample["caption_id"] += int(self._numbering.first_caption[folder])
        return loaded

    def _place(self, sample: int) -> tuple[int, int]:
        """The folder of a sample, and its number there."""
        folder = bisect_right(self._first_sample, sample) - 1
        return folder, sample - self._first_sample[folder]
