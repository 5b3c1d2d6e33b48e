"""The order of a mixture of data folders: a pure function of (seed, position), like that of one folder.

Positions come in groups of consecutive ones (clipmill.train.data.order), and a group is of one folder. Which one
follows from the weights w_k, whole numbers with the sum W, in two stages:

1. Numbering. A binary tree over the folders divides the groups 0, 1, 2, ...: of the first n groups of a node,
   floor(n * w_left / w_node + 1/2) are of its left half. So it takes no table to know how many of the first n groups
   are of folder k: n * w_k / W, give or take half the depth of the tree, and exactly w_k of any W in a row.
2. Shuffling. The folders of each block are shuffled, as a function of the seed and the block: of each period of W
   groups, or of 16 of a longer period. Otherwise a rank could get all of its samples from one folder, which may be
   slower than the others.

With D levels of the tree, numbering is off by at most D / 2 at the ends of a block. Within one, all groups of a folder
with the share p may come first, which are 16 p (1 - p) <= 4 more. A window has two ends, and is off by at most 8 + D.

The n-th group of folder k is the n-th group of that folder's own `SampleOrder`: when all of its samples have been
visited, its next epoch begins, whatever the other folders have come to. Without weights, w_k is in proportion to the
number of groups of folder k, and an epoch of the mixture is one of each folder.

Shape suffixes: N positions, U blocks, S slots of a block, K folders.
"""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.order import SampleOrder
from clipmill.train.device.random import Positions, draw_uniform

_MOST_BLOCK = 16
_MOST_SHARES = 1 << 31  # products of two of them fit into int64


class MixedOrder:
    """Order of the samples of several folders, which are numbered one folder after another.

    Args:
        sizes: number of samples of each folder.
        weights: of each folder, all positive; None for proportions by size.
        group: number of consecutive positions that are of one folder.

    Attributes:
        shares: the weights as the smallest whole numbers.
        period: W, number of groups after which each folder has had exactly its share, from the beginning on.
        offsets: int64 [K + 1], number of the first sample of each folder, and then their total.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[Fraction] | None, seed: int, group: int = 1) -> None:
        self._orders = [SampleOrder(size, _seed_of(seed, number), group) for number, size in enumerate(sizes)]
        self._seed, self._group = seed, group
        groups = [Fraction(order.positions_per_epoch, group) for order in self._orders]
        self.shares = whole_numbers(weights or groups)
        self.offsets: NDArray[np.int64] = np.cumsum([0, *sizes])
        self._bounds = [0, *np.cumsum(self.shares).tolist()]
        self.period: int = self._bounds[-1]
        if self.period > _MOST_SHARES:
            raise ValueError(f"the weights {self.shares} add up to more than {_MOST_SHARES}")
        self._block = min(self.period, _MOST_BLOCK)

    @property
    def num_samples(self) -> int:
        """Number of samples of all folders, which is the length of an epoch of the mixture."""
        return int(self.offsets[-1])

    def folder_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The folder of each sample."""
        return np.searchsorted(self.offsets, samples, side="right") - 1

    def at(self, positions: Positions) -> Positions:
        """Samples, in [0, num_samples), at `positions` (int64 [N], in any order, not negative); -1 where empty."""
        group_N, member_N = np.divmod(np.asarray(positions, dtype=np.int64), self._group)
        folder_N, number_N = self._place(group_N)
        samples_N = np.empty_like(group_N)
        for folder in np.unique(folder_N):
            of = folder_N == folder
            found = self._orders[folder].at(number_N[of] * self._group + member_N[of])
            samples_N[of] = np.where(found < 0, -1, found + self.offsets[folder])
        return samples_N

    def counts(self, position: int) -> list[int]:
        """Number of samples of each folder at the positions before `position`."""
        group, member = divmod(position, self._group)
        first, slot = self._block_of(np.array([group]))
        folders = self._shuffled(first)[0]
        passed = self._numbers(first)[0] + np.bincount(folders[: int(slot[0])], minlength=len(self._orders))
        taken = passed * self._group
        taken[folders[int(slot[0])]] += member
        return [_num_samples(order, num) for order, num in zip(self._orders, taken.tolist(), strict=True)]

    def per_epoch(self) -> list[float]:
        """How often the samples of each folder are visited in an epoch of the mixture, on average."""
        total = Fraction(sum(order.positions_per_epoch for order in self._orders), self._bounds[-1])
        pairs = zip(self.shares, self._orders, strict=True)
        return [float(share * total / order.positions_per_epoch) for share, order in pairs]

    def _place(self, group_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The folder of each group, and which of that folder's groups it is."""
        first_N, slot_N = self._block_of(group_N)
        first_U, block_N = np.unique(first_N, return_inverse=True)
        folder_US = self._shuffled(first_U)
        folder_N = folder_US[block_N, slot_N]
        is_before_NS = np.arange(self._block) < slot_N[:, None]
        own_N = ((folder_US[block_N] == folder_N[:, None]) & is_before_NS).sum(axis=1)
        return folder_N, self._numbers(first_U)[block_N, folder_N] + own_N

    def _block_of(self, group_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first group of the block of each group, and its slot in the block."""
        slot_N = group_N % self.period % self._block
        return group_N - slot_N, slot_N

    def _shuffled(self, first_U: NDArray[np.int64]) -> NDArray[np.int64]:
        """The folder of each slot of some blocks; the last block of a period may have slots that are not in use."""
        group_US = first_U[:, None] + np.arange(self._block)
        folder_US = self._folders(group_US.ravel(), 0, len(self._orders)).reshape(group_US.shape)
        key_US = draw_uniform(group_US.ravel(), 1, seed=self._seed, purpose="folder").reshape(group_US.shape)
        key_US[first_U[:, None] % self.period + np.arange(self._block) >= self.period] = 1.0  # after all others
        return np.take_along_axis(folder_US, key_US.argsort(axis=1, kind="stable"), axis=1)

    def _folders(self, group_N: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
        """The folder of each group of the node [low, high) of the tree, before shuffling."""
        if high - low == 1:
            return np.full(len(group_N), low)
        middle = (low + high) // 2
        left_N = self._left(group_N, low, high)
        is_left_N = self._left(group_N + 1, low, high) > left_N
        folder_N = np.empty_like(group_N)
        folder_N[is_left_N] = self._folders(left_N[is_left_N], low, middle)
        folder_N[~is_left_N] = self._folders((group_N - left_N)[~is_left_N], middle, high)
        return folder_N

    def _numbers(self, group_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the groups before each group, the number that each folder has, before shuffling: [N, K]."""
        number_NK = np.empty((len(group_N), len(self._orders)), np.int64)

        def divide(group_N: NDArray[np.int64], low: int, high: int) -> None:
            if high - low == 1:
                number_NK[:, low] = group_N
                return
            left_N, middle = self._left(group_N, low, high), (low + high) // 2
            divide(left_N, low, middle)
            divide(group_N - left_N, middle, high)

        divide(group_N, 0, len(self._orders))
        return number_NK

    def _left(self, group_N: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
        """Of the first `group_N` groups of a node, the number that its left half has."""
        left = self._bounds[(low + high) // 2] - self._bounds[low]
        total = self._bounds[high] - self._bounds[low]
        whole, rest = np.divmod(group_N, total)
        return whole * left + (rest * left + total // 2) // total


def whole_numbers(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of `weights`."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


def _num_samples(order: SampleOrder, num_positions: int) -> int:
    """Number of samples at the first positions of an order; its empty positions are the last of an epoch."""
    epochs, rest = divmod(num_positions, order.positions_per_epoch)
    return epochs * order.num_samples + min(rest, order.num_samples)


def _seed_of(seed: int, folder: int) -> int:
    """Seed of a folder's own order: folders of equal size are not visited in the same order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/folder {folder}".encode(), digest_size=8).digest())
