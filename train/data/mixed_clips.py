"""Mixtures of sample sets, one for each data folder, that one loader reads; clipmill.train.data.mixture has their
order.

The sets of a mixture do not know of each other. Samples, clips and captions of the mixture are numbered one folder
after another, so that a loss that keeps state for each clip or caption has a place for each. Failures name their
folder.
"""

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.config.shards import folder_names
from clipmill.train.data.batch import Sample
from clipmill.train.data.clip_samples import ClipSamples
from clipmill.train.data.images.samples import TarImages
from clipmill.train.data.loader import Loader, ReadAhead, SampleRequest
from clipmill.train.data.mixture import MixedOrder
from clipmill.train.data.order import set_fingerprint
from clipmill.train.data.outcomes import FailedSample


@dataclass(frozen=True)
class MixedFolders:
    """The folders of a mixture, for the log, metrics and the results page; one entry per folder.

    Attributes:
        names: short ones.
        addresses: as in --shards.
        described: what each set contains.
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
            f"{one['name']} ({one['share']:.1%} of the samples, {_visits(one['per_epoch'])}: {one['data']})"
            for one in self.facts()
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
        orders, contents = zip(*(one.partition("-")[::2] for one in parts), strict=True)
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
    require_alike({one: samples.mixing_facts for one, samples in zip(addresses, sets, strict=True)})
    return MixedFolders(
        names=folder_names(addresses),
        addresses=tuple(addresses),
        described=tuple(samples.describe() for samples in sets),
        variants=tuple(samples.variant_name for samples in sets),
        order=MixedOrder([samples.num_samples for samples in sets], weights=weights, seed=seed, group=group),
    )


def require_alike(facts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a UserError where data folders differ in one of some facts, given by address."""
    (first, wanted), *others = facts.items()
    for address, found in others:
        for name, value in wanted.items():
            if found[name] != value:
                raise UserError(
                    f"{first} and {address} cannot be mixed: {name} {value} in the one, {found[name]} in the other",
                    hint="make the column of both with the same settings and weights, or train on one of them",
                )


class MixedSets:
    """What mixtures of clips and of latents have in common.

    Args:
        sets: opened with the same loader settings.
        addresses: of their folders.
        weights: of the folders; None for proportions by size.

    Attributes:
        first: a set that stands for all of them where only the shape of samples counts.
        folders: for the log and the metrics.

    Raises:
        UserError: the sets cannot be mixed.
    """

    def __init__(self, sets: Sequence[Any], addresses: Sequence[str], *, weights: Sequence[Fraction] | None) -> None:
        self.first, self._sets = sets[0], sets
        loading = self.first.loading
        self.folders = mixed_folders(sets, addresses, weights=weights, seed=loading.seed, group=loading.group)
        self._first_clip: NDArray[np.int64] = np.cumsum([0, *(one.num_clips for one in sets)])
        self._first_caption: NDArray[np.int64] = np.cumsum([0, *(one.num_caption_ids for one in sets)])

    def __len__(self) -> int:
        return self.folders.order.num_samples

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch: those of all folders."""
        return len(self)

    @property
    def visits_per_epoch(self) -> float:
        """Number of samples that training takes in an epoch: those of all folders, each once on average."""
        return float(sum(one.visits_per_epoch for one in self._sets))

    @property
    def num_clips(self) -> int:
        """Number of distinct clips; ids of clips are in [0, num_clips)."""
        return int(self._first_clip[-1])

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in sets without captions."""
        return int(self._first_caption[-1])

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self.folders.variant_name()

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        return self.folders.fingerprint([one.fingerprint for one in self._sets])

    def describe(self) -> str:
        """One line for the log: shares, visits, and what the sets contain."""
        return self.folders.describe()

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [clips], the class of each clip, in sets with labels."""
        return np.concatenate([one.labels for one in self._sets])

    def folder_of(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """The folder of each clip, as an index."""
        return np.searchsorted(self._first_clip, clips, side="right") - 1

    def own_clip(self, clip: int) -> tuple[Any, NDArray[np.int64]]:
        """The set of a clip, and its number there."""
        number = int(self.folder_of(np.array(clip)))
        return self._sets[number], np.array([clip - self._first_clip[number]])

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of clips in their videos, microseconds."""
        begin_us, end_us = np.empty_like(clips), np.empty_like(clips)
        number = self.folder_of(clips)
        for one in np.unique(number).tolist():
            of = number == one
            begin_us[of], end_us[of] = self._sets[one].span_us(clips[of] - self._first_clip[one])
        return begin_us, end_us


class MixedClips(MixedSets, Loader):
    """Clips of several data folders, and images of tars. For the arguments see `MixedSets`."""

    def __init__(
        self,
        sets: Sequence[ClipSamples | TarImages],
        addresses: Sequence[str],
        *,
        weights: Sequence[Fraction] | None,
    ) -> None:
        MixedSets.__init__(self, sets, addresses, weights=weights)
        of_chunks = [one.chunks for one in sets if isinstance(one, ClipSamples)]
        for chunks in of_chunks:
            # What a decoder keeps depends on the packets alone; one per folder would have as many contexts per thread.
            chunks.decoder = of_chunks[0].decoder
        self._first_sample: list[int] = self.folders.order.offsets.tolist()
        readers = [one.ahead.num_threads for one in sets if one.ahead is not None]
        ahead = ReadAhead(self.read, self.load_read, max(readers)) if readers else None
        Loader.__init__(self, self, self.first.loading, order=self.folders.order, ahead=ahead)

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        number, own = self._own(sample)
        return self._sets[number].key(own)

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Load the samples of a group of requests, in their order; those of one folder that follow one another share
        work. A group is of one folder, unless a run was resumed in the middle of one."""
        loaded: list[Sample | FailedSample] = []
        for number, its in self._by_set(requests):
            loaded += self._renumbered(number, self._sets[number].load(its))
        return loaded

    def read(self, requests: Sequence[SampleRequest]) -> list[tuple[int, Any]]:
        """Read the bytes of the clips of a group of requests, with the set of each part."""
        return [(number, self._sets[number].read(its)) for number, its in self._by_set(requests)]

    def load_read(self, read: list[tuple[int, Any]]) -> list[Sample | FailedSample]:
        """Decode and crop clips that were read: those that `load` gives."""
        loaded: list[Sample | FailedSample] = []
        for number, its in read:
            loaded += self._renumbered(number, self._sets[number].load_read(its))
        return loaded

    def _by_set(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, list[SampleRequest]]]:
        """Requests that follow one another in one set, as those of its own samples."""
        for number, its in groupby(requests, key=lambda request: self._own(request.sample)[0]):
            first = self._first_sample[number]
            yield number, [replace(one, sample=one.sample - first) for one in its]

    def _renumbered(self, number: int, loaded: list[Sample | FailedSample]) -> list[Sample | FailedSample]:
        for one in loaded:
            if not isinstance(one, FailedSample):
                one["clip_id"] += int(self._first_clip[number])
                if "caption_id" in one:
                    one["caption_id"] += int(self._first_caption[number])
        return loaded

    def _own(self, sample: int) -> tuple[int, int]:
        """The set of a sample, and its number there."""
        number = bisect_right(self._first_sample, sample) - 1
        return number, sample - self._first_sample[number]

    def _outcomes(self, groups: Iterator[list[SampleRequest | None]]) -> Iterator[Sample | FailedSample | None]:
        """The outcomes of `Loader`, in which failures name their folder."""
        waiting: deque[SampleRequest | None] = deque()

        def noted() -> Iterator[list[SampleRequest | None]]:
            for group in groups:
                waiting.extend(group)
                yield group

        for outcome in super()._outcomes(noted()):
            request = waiting.popleft()
            if isinstance(outcome, FailedSample) and request is not None:
                address = self.folders.addresses[self._own(request.sample)[0]]
                outcome = replace(outcome, detail=f"{outcome.detail} (data folder {address})")
            yield outcome
