"""Sample order: a pure function of (seed, epoch, position), O(1) to jump into.

Every epoch visits every sample exactly once, in an order of its own. The order is a format-preserving
permutation: an alternating Feistel network on the smallest power of two that holds all samples, walked along
its cycle until it lands on a sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It
needs no table, so a set of 10^9 samples costs what one of ten costs, and it does not know of workers or ranks.

Positions run on over the epochs without end: position p is place p % num_samples of epoch p // num_samples.

Samples may be visited in groups: then whole groups are permuted, group g being the samples g * G to g * G + G - 1,
which stand in one row. What is left over when G does not divide the samples is a smaller group at the end of every
epoch; the places that it lacks are empty.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 8

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class SampleOrder:
    """The order in which `num_samples` samples are visited under `seed`, `group` of them in a row."""

    num_samples: int
    seed: int
    group: int = 1

    def __post_init__(self) -> None:
        if self.num_samples <= 0:
            raise ValueError(f"an order needs at least one sample, got num_samples={self.num_samples}")
        if self.group <= 0:
            raise ValueError(f"a group needs at least one sample, got group={self.group}")

    @property
    def places_per_epoch(self) -> int:
        """Positions of an epoch: the samples, and the empty places of its last group."""
        return -(-self.num_samples // self.group) * self.group

    def at(self, positions: Positions) -> Positions:
        """Samples (in [0, num_samples)) at endless `positions` (int64, any shape, any order, not negative).

        An empty place has -1.
        """
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.places_per_epoch)
        groups, members = np.divmod(places, self.group)
        num_full = self.num_samples // self.group
        for epoch in np.unique(epochs):
            chosen = (epochs == epoch) & (groups < num_full)
            groups[chosen] = permute(groups[chosen], num_full, seed=self.seed, epoch=int(epoch))
        samples = groups * self.group + members
        samples[samples >= self.num_samples] = -1
        return samples


def positions_of_rank(begin: int, count: int, *, rank: int, num_ranks: int, group: int = 1) -> Positions:
    """The `count` positions that one rank takes after its first `begin`, counted from where all ranks began.

    Rank r takes every num_ranks-th group of positions, the r-th first: parts are equal and together leave nothing out.
    """
    groups, members = np.divmod(begin + np.arange(count, dtype=np.int64), group)
    return (groups * num_ranks + rank) * group + members


def permute(places: Positions, num_samples: int, *, seed: int, epoch: int) -> Positions:
    """Maps places in [0, num_samples) to samples in [0, num_samples), one to one, for one epoch."""
    num_bits = max(2, (num_samples - 1).bit_length())
    keys = _round_keys(seed, epoch)
    samples = _feistel(places.astype(np.uint64), num_bits, keys)
    outside = samples >= num_samples
    while outside.any():
        samples[outside] = _feistel(samples[outside], num_bits, keys)
        outside = samples >= num_samples
    return samples.astype(np.int64)


def _feistel(values: NDArray[np.uint64], num_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permutes [0, 2**num_bits): each round xors one half with a hash of the other, which can be undone."""
    right_bits = np.uint64(num_bits // 2)
    left_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    right_mask = np.uint64((1 << (num_bits // 2)) - 1)
    left, right = values >> right_bits, values & right_mask
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (mix(left ^ key) & right_mask)
        else:
            left = left ^ (mix(right ^ key) & left_mask)
    return (left << right_bits) | right


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each number: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Round keys from a hash, so that neighbouring seeds and epochs share nothing."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
