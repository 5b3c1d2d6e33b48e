"""Sample order: a pure function of (seed, epoch, position) with random access in O(1).

Every epoch contains every sample exactly once, in an order of its own. The order is a format-preserving permutation: an
alternating Feistel network on the smallest power of two that holds all samples, followed along its cycle until it
reaches a valid sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no table, so 10^9
samples cost as much as ten, and it does not depend on the number of workers or ranks.

Positions count on across epochs: position p is position p % num_samples of epoch p // num_samples.

With groups of G samples, whole groups are permuted: group g holds the samples g * G to g * G + G - 1, which stay next
to each other. If G does not divide the number of samples, the last group of every epoch is incomplete and its remaining
positions are empty.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.device.random import Positions, splitmix64

_NUM_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Order of `num_samples` samples under `seed`, in groups of `group` consecutive samples."""

    num_samples: int
    seed: int
    group: int = 1

    def __post_init__(self) -> None:
        if self.num_samples <= 0:
            raise ValueError(f"an order needs at least one sample, got num_samples={self.num_samples}")
        if self.group <= 0:
            raise ValueError(f"a group needs at least one sample, got group={self.group}")

    @property
    def positions_per_epoch(self) -> int:
        """Number of positions in an epoch: the samples and the empty positions of the last group."""
        return -(-self.num_samples // self.group) * self.group

    def at(self, positions: Positions) -> Positions:
        """Samples, in [0, num_samples), at `positions` (int64, any shape and order, not negative); -1 where empty."""
        epochs, of_epoch = np.divmod(np.asarray(positions, dtype=np.int64), self.positions_per_epoch)
        groups, members = np.divmod(of_epoch, self.group)
        num_full = self.num_samples // self.group
        for epoch in np.unique(epochs):
            chosen = (epochs == epoch) & (groups < num_full)
            groups[chosen] = permute(groups[chosen], num_full, seed=self.seed, epoch=int(epoch))
        samples = groups * self.group + members
        samples[samples >= self.num_samples] = -1
        return samples


def positions_of_rank(begin: int, count: int, *, rank: int, num_ranks: int, group: int = 1) -> Positions:
    """The `count` positions that a rank takes after its first `begin`, relative to the common start of all ranks.

    Rank r takes every num_ranks-th group, starting with the r-th: the shares are equal and cover every position.
    """
    groups, members = np.divmod(begin + np.arange(count, dtype=np.int64), group)
    return (groups * num_ranks + rank) * group + members


def permute(positions: Positions, num_samples: int, *, seed: int, epoch: int) -> Positions:
    """Map positions in [0, num_samples) to samples in [0, num_samples), one to one, for one epoch."""
    num_bits = max(2, (num_samples - 1).bit_length())
    keys = _round_keys(seed, epoch)
    samples = _feistel(positions.astype(np.uint64), num_bits, keys)
    outside = samples >= num_samples
    while outside.any():
        samples[outside] = _feistel(samples[outside], num_bits, keys)
        outside = samples >= num_samples
    return samples.astype(np.int64)


def _feistel(values: NDArray[np.uint64], num_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute [0, 2**num_bits): each round XORs one half with a hash of the other, which is invertible."""
    right_bits = np.uint64(num_bits // 2)
    left_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    right_mask = np.uint64((1 << (num_bits // 2)) - 1)
    left, right = values >> right_bits, values & right_mask
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (splitmix64(left ^ key) & right_mask)
        else:
            left = left ^ (splitmix64(right ^ key) & left_mask)
    return (left << right_bits) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Round keys from a cryptographic hash, so that neighbouring seeds and epochs are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
