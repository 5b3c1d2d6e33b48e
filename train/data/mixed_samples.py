"""Mixtures: samples from several data folders, read by a single loader, and the order of these samples.

The tables of the folders stay independent. The samples, clips and captions of a mixture are numbered one folder after
another, so that a loss can keep state for each clip or caption. A failure contains the path or URL of the sample's
folder.
"""

import hashlib
import math
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
from clipmill.train.data.order import SampleOrder, set_fingerprint
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.samples import BatchedSamples, Samples
from clipmill.train.data.workers import Outcome, ReadAhead, ThreadedReader
from clipmill.train.device.random import Positions, draw_uniform

_MAX_BLOCK = 16  # maximum number of groups in a block
_MAX_WEIGHT = 1 << 31  # maximum sum of weights; products of two such numbers fit into int64


class MixedOrder:
    """Order of the samples of several folders: a pure function of seed and position.

    Consecutive positions form groups (clipmill.train.data.order), and each group comes from a single folder. The folder
    is chosen in two stages from the weights w_k, which are integers with the sum W:

    1. Numbering. A binary tree over the folders divides the groups 0, 1, 2, ...: of the first n groups of a node,
       floor(n * w_left / w_node + 1/2) belong to the left half of the node. Therefore the number of groups of folder k
       among the first n groups can be computed without a table: it is n * w_k / W, with an error of at most half the
       depth of the tree, and exactly w_k in any W consecutive groups.
    2. Shuffling. The folders in each block are shuffled as a function of seed and block. A block is a period of W
       groups, or 16 groups of a longer period. Without shuffling, a rank could get all its samples from the same
       folder, which may be slower than the others.

    With a tree of D levels, numbering deviates by at most D / 2 at each end of a block. Within a block, all groups of a
    folder with a fraction p of the weights may come first, which adds at most 16 p (1 - p) <= 4. A window of
    consecutive groups has two ends, so the number of a folder's groups in the window deviates by at most 8 + D.

    The n-th group of folder k is the n-th group of the folder's `SampleOrder`. After all samples of a folder have been
    visited, the next epoch of the folder begins, independently of the other folders. Without weights, w_k is
    proportional to the number of groups of folder k, and an epoch of the mixture is one epoch of each folder.

    Shape suffixes: N positions, U blocks, S slots of a block, K folders.

    Args:
        sizes: Number of samples of each folder.
        weights: Weight of each folder, all positive; None for weights proportional to size.
        seed: Random seed.
        group: Number of consecutive positions that belong to the same folder.

    Attributes:
        weights: Weights as the smallest integers with the same proportions.
        period: Number W of groups in a period. Each period has exactly w_k groups of folder k.
        offsets: Index of the first sample of each folder, followed by the number of samples, int64 [K + 1].
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[Fraction] | None, seed: int, group: int = 1) -> None:
        # Each folder has a different seed, so that folders of equal size are not visited in the same order.
        digests = [hashlib.blake2b(f"{seed}/folder {index}".encode(), digest_size=8) for index in range(len(sizes))]
        self._orders = [
            SampleOrder(size, int.from_bytes(digest.digest()), group)
            for size, digest in zip(sizes, digests, strict=True)
        ]
        self._seed, self._group = seed, group
        groups = [Fraction(order.positions_per_epoch, group) for order in self._orders]
        self.weights = integer_weights(weights or groups)
        self.offsets: NDArray[np.int64] = np.cumsum([0, *sizes])
        self._bounds = [0, *np.cumsum(self.weights).tolist()]
        self.period: int = self._bounds[-1]
        if self.period > _MAX_WEIGHT:
            raise ValueError(f"the weights {self.weights} add up to more than {_MAX_WEIGHT}")
        self._block = min(self.period, _MAX_BLOCK)

    @property
    def num_samples(self) -> int:
        """Number of samples in all folders, which is also the number of samples in an epoch."""
        return int(self.offsets[-1])

    def folder_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the folder of each sample."""
        return np.searchsorted(self.offsets, samples, side="right") - 1

    def at(self, positions: Positions) -> Positions:
        """Return the samples, in [0, num_samples), at `positions` (int64 [N], >= 0); -1 for empty positions."""
        group_N, member_N = np.divmod(np.asarray(positions, dtype=np.int64), self._group)
        folder_N, index_N = self._locate(group_N)
        samples_N = np.empty_like(group_N)
        for folder in np.unique(folder_N):
            mask_N = folder_N == folder
            samples = self._orders[folder].at(index_N[mask_N] * self._group + member_N[mask_N])
            samples_N[mask_N] = np.where(samples < 0, -1, samples + self.offsets[folder])
        return samples_N

    def counts(self, position: int) -> list[int]:
        """Return the number of samples of each folder before a position."""
        group, member = divmod(position, self._group)
        first, slot = self._block_of(np.array([group]))
        folders = self._shuffle(first)[0]
        num_groups = self._counts_before(first)[0] + np.bincount(folders[: int(slot[0])], minlength=len(self._orders))
        num_positions = num_groups * self._group
        num_positions[folders[int(slot[0])]] += member
        return [_num_samples(order, num) for order, num in zip(self._orders, num_positions.tolist(), strict=True)]

    def visits_per_epoch(self) -> list[float]:
        """Return the average number of visits to a sample in an epoch of the mixture, for each folder."""
        total = Fraction(sum(order.positions_per_epoch for order in self._orders), self._bounds[-1])
        pairs = zip(self.weights, self._orders, strict=True)
        return [float(weight * total / order.positions_per_epoch) for weight, order in pairs]

    def _locate(self, group_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the folder of each group, and the index of the group in this folder."""
        first_N, slot_N = self._block_of(group_N)
        first_U, block_N = np.unique(first_N, return_inverse=True)
        folder_US = self._shuffle(first_U)
        folder_N = folder_US[block_N, slot_N]
        is_earlier_NS = np.arange(self._block) < slot_N[:, None]
        num_earlier_N = ((folder_US[block_N] == folder_N[:, None]) & is_earlier_NS).sum(axis=1)
        return folder_N, self._counts_before(first_U)[block_N, folder_N] + num_earlier_N

    def _block_of(self, group_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first group of the block that contains each group, and the group's slot in the block."""
        slot_N = group_N % self.period % self._block
        return group_N - slot_N, slot_N

    def _shuffle(self, first_U: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the folder of each slot of the blocks that start at `first_U`, after shuffling.

        The last block of a period may have unused slots.
        """
        group_US = first_U[:, None] + np.arange(self._block)
        folder_US = self._folders(group_US.ravel(), 0, len(self._orders)).reshape(group_US.shape)
        key_US = draw_uniform(group_US.ravel(), 1, seed=self._seed, purpose="folder").reshape(group_US.shape)
        key_US[first_U[:, None] % self.period + np.arange(self._block) >= self.period] = 1.0  # unused slots come last
        return np.take_along_axis(folder_US, key_US.argsort(axis=1, kind="stable"), axis=1)

    def _folders(self, group_N: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
        """Return the folder of each group of the tree node for the folders [low, high), before shuffling."""
        if high - low == 1:
            return np.full(len(group_N), low)
        middle = (low + high) // 2
        left_N = self._num_in_left_half(group_N, low, high)
        is_left_N = self._num_in_left_half(group_N + 1, low, high) > left_N
        folder_N = np.empty_like(group_N)
        folder_N[is_left_N] = self._folders(left_N[is_left_N], low, middle)
        folder_N[~is_left_N] = self._folders((group_N - left_N)[~is_left_N], middle, high)
        return folder_N

    def _counts_before(self, group_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many groups of each folder precede each group, before shuffling, int64 [N, K]."""
        count_NK = np.empty((len(group_N), len(self._orders)), np.int64)

        def divide(group_N: NDArray[np.int64], low: int, high: int) -> None:
            if high - low == 1:
                count_NK[:, low] = group_N
                return
            left_N, middle = self._num_in_left_half(group_N, low, high), (low + high) // 2
            divide(left_N, low, middle)
            divide(group_N - left_N, middle, high)

        divide(group_N, 0, len(self._orders))
        return count_NK

    def _num_in_left_half(self, group_N: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
        """Return how many of the first `group_N` groups of a tree node belong to its left half."""
        left = self._bounds[(low + high) // 2] - self._bounds[low]
        total = self._bounds[high] - self._bounds[low]
        rounds, rest = np.divmod(group_N, total)
        return rounds * left + (rest * left + total // 2) // total


def integer_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest integers that are proportional to the weights."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    scaled_weights = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*scaled_weights)
    return tuple(weight // divisor for weight in scaled_weights)


def _num_samples(order: SampleOrder, num_positions: int) -> int:
    """Return the number of samples at the first `num_positions` positions. Empty positions are at the end of epochs."""
    epochs, rest = divmod(num_positions, order.positions_per_epoch)
    return epochs * order.num_samples + min(rest, order.num_samples)


@dataclass(frozen=True)
class MixedFolders:
    """Folders of a mixture, for the log, the metrics and the results page. Each tuple has one entry per folder.

    Attributes:
        names: Short names.
        addresses: Paths or URLs, as in --shards.
        descriptions: Descriptions of the samples.
        variants: Names of the variants that are read.
        order: Order of the samples of the mixture.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    descriptions: tuple[str, ...]
    variants: tuple[str, ...]
    order: MixedOrder

    @property
    def fractions(self) -> list[float]:
        """Fraction of a run's samples that come from each folder."""
        return [weight / sum(self.order.weights) for weight in self.order.weights]

    def counts(self, position: int) -> dict[str, int]:
        """Return the number of samples of each folder before a position, including failed samples."""
        return dict(zip(self.names, self.order.counts(position), strict=True))

    def facts(self) -> list[dict[str, Any]]:
        """Return the entry of each folder in run.json, with the folder's fraction of the samples and other facts."""
        sizes = np.diff(self.order.offsets).tolist()
        columns = (
            self.names,
            self.addresses,
            sizes,
            self.fractions,
            self.order.visits_per_epoch(),
            self.descriptions,
            self.variants,
        )
        keys = ("name", "shards", "num_samples", "share", "per_epoch", "data", "variant")
        return [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]

    def describe(self) -> str:
        """Return a line for the log: the fraction, visits and contents of each folder."""
        folders = []
        for folder in self.facts():
            visits = "once" if folder["per_epoch"] == 1 else f"{folder['per_epoch']:.3g} times"
            fraction = f"{folder['share']:.1%} of the samples, each visited {visits} per epoch"
            folders.append(f"{folder['name']} ({fraction}: {folder['data']})")
        total = self.order.num_samples
        return f"mixture of {len(self.names)} data folders, {total:,} samples per epoch; {'; '.join(folders)}"

    def variant_name(self) -> str:
        """Return the names of the variants that are read."""
        if len(set(self.variants)) == 1:
            return self.variants[0]
        pairs = zip(self.names, self.variants, strict=True)
        return ", ".join(f"{variant} ({name})" for name, variant in pairs if variant)

    def fingerprint(self, parts: Sequence[str]) -> str:
        """Return the fingerprint of the mixture, given the fingerprints of the folders."""
        orders, contents = zip(*(part.partition("-")[::2] for part in parts), strict=True)
        order, content = (
            hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest()
            for texts in ((self.order.weights, *orders), contents)
        )
        return set_fingerprint(order, content) if any(contents) else order


def require_equal_facts(facts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a UserError if the folders of a mixture differ in a property.

    Args:
        facts: Properties of each folder, by its path or URL (`Source.mixture_facts`).
    """
    (first_address, first_facts), *other_folders = facts.items()
    for address, other_facts in other_folders:
        for name, value in first_facts.items():
            if (other_value := other_facts[name]) != value:
                raise UserError(
                    f"{first_address} and {address} cannot be mixed: {name} {value} in the first, {other_value} in the "
                    "second",
                    hint="make the column with the same settings and weights in both folders, or train on one folder",
                )


class MixedSamples(BatchedSamples):
    """Samples of several data folders. See `clipmill.train.data.samples.Samples` for the methods.

    Args:
        parts: Samples of each folder, opened with the same loader settings.
        addresses: Paths or URLs of the folders.
        weights: Weights of the folders; None for weights proportional to size.

    Attributes:
        first, parts: Samples of the first folder, and of each folder.
        folders: Facts about the folders, for the log, the metrics and the results page.
        numbering: IDs of the clips and captions of the mixture.

    Raises:
        UserError: The folders differ in a property that must be the same in all folders.
    """

    def __init__(
        self, parts: Sequence[Samples], addresses: Sequence[str], *, weights: Sequence[Fraction] | None
    ) -> None:
        first = self.first = parts[0]
        self.parts, loading = parts, first.loader.loading
        require_equal_facts(
            {address: part.source.mixture_facts for address, part in zip(addresses, parts, strict=True)}
        )
        sizes = [part.num_samples for part in parts]
        self.folders = MixedFolders(
            names=folder_names(addresses),
            addresses=tuple(addresses),
            descriptions=tuple(part.describe() for part in parts),
            variants=tuple(part.variant_name for part in parts),
            order=MixedOrder(sizes, weights=weights, seed=loading.seed, group=loading.group),
        )
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
        """Number of samples in a training epoch: the sum over all folders."""
        return float(sum(part.visits_per_epoch for part in self.parts))

    @property
    def num_clips(self) -> int:
        """Number of distinct clips. Clip IDs are in [0, num_clips)."""
        return int(self.numbering.first_clip[-1])

    @property
    def num_caption_ids(self) -> int:
        """Exclusive upper bound of the caption IDs; 0 without captions."""
        return int(self.numbering.first_caption[-1])

    @property
    def variant_name(self) -> str:
        """Names of the variants that are read."""
        return self.folders.variant_name()

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        return self.folders.fingerprint([part.fingerprint for part in self.parts])

    def describe(self) -> str:
        """Return a line for the log: the fraction, visits and contents of each folder."""
        return self.folders.describe()

    @property
    def labels(self) -> NDArray[np.int64]:
        """Class of each clip, int64 [clips], if all folders have labels."""
        return np.concatenate([part.labels for part in self.parts])

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions of a folder have the same text."""
        for part in self.parts:
            part.require_different_texts()

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end of clips in their videos, in microseconds."""
        begin_us, end_us = np.empty_like(clips), np.empty_like(clips)
        for folder, indices, rows in self.numbering.divide(clips):
            begin_us[indices], end_us[indices] = self.parts[folder].span_us(rows)
        return begin_us, end_us


class Numbering:
    """IDs of the clips and captions of several folders, which are numbered one folder after another.

    Attributes:
        first_clip: ID of the first clip of each folder, followed by the number of all clips, int64 [K + 1].
        first_caption: ID of the first caption of each folder, followed by the number of all captions, int64 [K + 1].
    """

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.first_clip: NDArray[np.int64] = np.cumsum([0, *(part.num_clips for part in parts)])
        self.first_caption: NDArray[np.int64] = np.cumsum([0, *(part.num_caption_ids for part in parts)])

    def folder_of(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each clip's folder."""
        return np.searchsorted(self.first_clip, clips, side="right") - 1

    def divide(self, clips: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Divide clips by folder.

        Yields:
            folder: Index of a folder that contains any of the clips.
            indices: Indices in `clips` of the clips of this folder.
            rows: Rows of these clips in the folder's table.
        """
        folders = self.folder_of(clips)
        for folder in np.unique(folders).tolist():
            indices = np.flatnonzero(folders == folder)
            yield folder, indices, clips[indices] - self.first_clip[folder]


class MixedReader(ThreadedReader):
    """Reader of the clips and images of several data folders, with the same threads for all folders.

    Args:
        parts: Samples of each folder.
        addresses: Paths or URLs of the folders, for failures.
        numbering: IDs of the clips and captions of the mixture.
    """

    def __init__(self, parts: Sequence[Samples], addresses: Sequence[str], numbering: Numbering) -> None:
        self._readers: list[Any] = [part.reader for part in parts]
        self._addresses, self._numbering = addresses, numbering
        self._first_sample: list[int] = np.cumsum([0, *map(len, parts)]).tolist()
        decoders = [reader.decoder for reader in self._readers if reader.decoder is not None]
        for reader in self._readers:
            if reader.decoder is not None:
                # Share one decoder among all folders, because each decoder keeps codec contexts in memory.
                reader.decoder = decoders[0]

    @property
    def read_ahead(self) -> ReadAhead | None:
        """Functions that load samples in two steps, if a folder is remote; None if all folders are local."""
        num_threads = [reader.read_ahead.num_threads for reader in self._readers if reader.read_ahead is not None]
        return ReadAhead(self.read, self.load_read, max(num_threads)) if num_threads else None

    def key(self, sample: int) -> str:
        """Return the key of the chunk in which the clip begins, or the name of the image."""
        folder, index = self._locate(sample)
        return str(self._readers[folder].key(index))

    def folder_suffix(self, sample: int) -> str:
        """Return a suffix for messages that names the data folder of a sample."""
        return f" (data folder {self._addresses[self._locate(sample)[0]]})"

    def load(self, requests: Sequence[SampleRequest]) -> list[Outcome]:
        """Load the samples of a group of requests, in order. Consecutive samples of a folder can share work.

        All samples of a group belong to the same folder, unless a run was resumed in the middle of a group.
        """
        outcomes: list[Outcome] = []
        for folder, part in self._divide_requests(requests):
            outcomes += self._renumber(folder, self._readers[folder].load(part))
        return outcomes

    def read(self, requests: Sequence[SampleRequest]) -> list[tuple[int, Any]]:
        """Read the bytes for a group of requests; return the index of each folder with the result of its reader."""
        return [(folder, self._readers[folder].read(part)) for folder, part in self._divide_requests(requests)]

    def load_read(self, parts: list[tuple[int, Any]]) -> list[Outcome]:
        """Decode and crop the samples that `read` returned."""
        outcomes: list[Outcome] = []
        for folder, part in parts:
            outcomes += self._renumber(folder, self._readers[folder].load_read(part))
        return outcomes

    def _divide_requests(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, list[SampleRequest]]]:
        """Yield runs of consecutive requests for the same folder, with the sample indices of this folder."""
        for folder, part in groupby(requests, key=lambda request: self._locate(request.sample)[0]):
            first = self._first_sample[folder]
            yield folder, [replace(request, sample=request.sample - first) for request in part]

    def _renumber(self, folder: int, outcomes: list[Outcome]) -> list[Outcome]:
        for sample in outcomes:
            if not isinstance(sample, FailedSample):
                sample["clip_id"] += int(self._numbering.first_clip[folder])
                if "caption_id" in sample:
                    sample["caption_id"] += int(self._numbering.first_caption[folder])
        return outcomes

    def _locate(self, sample: int) -> tuple[int, int]:
        """Return the folder of a sample, and the index of the sample in this folder."""
        folder = bisect_right(self._first_sample, sample) - 1
        return folder, sample - self._first_sample[folder]
