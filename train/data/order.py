"""Sample order: a pure function of (seed, epoch, position), O(1) to jump into.

Every epoch visits every sample exactly once, in an order of its own. The order is a format-preserving
permutation: an alternating Feistel network on the smallest power of two that holds all samples, walked along
its cycle until it lands on a sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It
needs no table, so a set of 10^9 samples costs what one of ten costs, and it does not know of workers or ranks.

Positions run on over the epochs without end: position p is place p % num_samples of epoch p // num_samples.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 8

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class SampleOrder:
    """The order in which `num_samples` samples are visited under `seed`."""

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples <= 0:
            raise ValueError(f"an order needs at least one sample, got num_samples={self.num_samples}")

    def at(self, positions: Positions) -> Positions:
        """Samples (in [0, num_samples)) at endless `positions` (int64, any shape, any order, not negative)."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            samples[chosen] = permute(places[chosen], self.num_samples, seed=self.seed, epoch=int(epoch))
        return samples


def positions_of_rank(begin: int, count: int, *, rank: int, num_ranks: int) -> Positions:
    """The next `count` positions of one rank, from the global position `begin` on.

    Rank r takes every num_ranks-th position beginning with begin + r: parts are equal and together leave nothing
    out, and num_ranks * count positions later all ranks stand at the same global position.
    """
    return begin + rank + num_ranks * np.arange(count, dtype=np.int64)


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
