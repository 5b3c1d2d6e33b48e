"""What chance decides about a sample: a pure function of the seed, the purpose and the sample's position.

Neither the other samples of a batch nor what was drawn before matters, so ranks, resumed runs and evaluations of one
sample draw alike.
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from train.data.order import Positions, mix

MANTISSA_BITS = 53


def uniform(positions: Positions, count: int, *, seed: int, purpose: str) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each position, [B, count]."""
    hashes = _hashes(positions, count, seed=seed, purpose=purpose)
    return np.asarray((hashes >> np.uint64(64 - MANTISSA_BITS)) * 2.0**-MANTISSA_BITS, dtype=np.float64)


def below(counts: NDArray[np.int64], positions: Positions, *, seed: int, purpose: str) -> NDArray[np.int64]:
    """A whole number from 0 to below each of `counts`, one for each position, [B]."""
    hashes = _hashes(positions, 1, seed=seed, purpose=purpose)[:, 0]
    return ((hashes >> np.uint64(32)) * counts.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def _hashes(positions: Positions, count: int, *, seed: int, purpose: str) -> NDArray[np.uint64]:
    key = np.array([key_of(seed=seed, purpose=purpose)], dtype=np.uint64)
    keys = mix(np.asarray(key + np.arange(count, dtype=np.uint64), dtype=np.uint64))
    # Hashed twice: keys that differ in a few bits only would otherwise pair positions that differ in the same bits.
    return mix(mix(positions.astype(np.uint64))[:, None] ^ keys[None, :])


@lru_cache
def key_of(*, seed: int, purpose: str) -> int:
    """A number of 64 bits in which seed and purpose count."""
    digest = hashlib.blake2b(f"{purpose}/{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
