"""What chance decides about a sample: a pure function of the seed, the purpose and the sample's position.

Neither the other samples of a batch nor what was drawn before matters, so ranks, resumed runs and evaluations of one
sample draw alike.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.order import Positions, mix
from train.device.transfer import sent

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


# `train.device.random.uniform` on any device: the same numbers to the bit, drawn where they are needed.
#
# torch has no unsigned 64-bit products, but int64's wrap around to the same bits; only shifts to the right must drop
# the sign that they would copy.


_WORD = 1 << 64


def device_uniform(
    positions_B: torch.Tensor, count: int, *, seed: int, purpose: str, device: torch.device | None = None
) -> torch.Tensor:
    """`count` numbers in [0, 1) for each position (int64 [B]), float64 [B, count], as `train.device.random.uniform`.

    Args:
        device: where they are drawn; that of the positions when left out.
    """
    if device is not None:
        positions_B = sent(positions_B, device)
    keys_N = _mix(_signed(key_of(seed=seed, purpose=purpose)) + torch.arange(count, device=positions_B.device))
    hashes_BN = _mix(_mix(positions_B)[:, None] ^ keys_N)
    return _shifted(hashes_BN, 64 - MANTISSA_BITS).double() * 2.0**-MANTISSA_BITS


def _mix(values: torch.Tensor) -> torch.Tensor:
    """`train.data.order.mix` on the bits of int64."""
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
