"""Counter-based random numbers for training: pure functions of a seed, a purpose, and the position of a sample.

The numbers depend neither on other samples in a batch nor on earlier draws, so a sample gets the same numbers on any
rank, in a resumed run, and in an evaluation of only this sample. `draw_uniform` and `integers_below` draw numbers for
many positions in one call (captions, augmentation, masks), and `device_uniform` does so on any device. `generator`
draws numbers for one position (frames, crops) or one epoch (the shuffle window of a stream).
"""

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Positions = NDArray[np.int64]  # positions in the sample order, which has no end (clipmill.train.data.order)

_MANTISSA_BITS = 53
_WORD = 1 << 64


def draw_uniform(positions: Positions, count: int, *, seed: int, purpose: str) -> NDArray[np.float64]:
    """Draw `count` numbers in [0, 1) for each position: float64 [B, count]."""
    hashes = _hashes(positions, count, seed=seed, purpose=purpose)
    return np.asarray((hashes >> np.uint64(64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS, dtype=np.float64)


def integers_below(bounds: NDArray[np.int64], positions: Positions, *, seed: int, purpose: str) -> NDArray[np.int64]:
    """Draw an integer in [0, bound) for each bound and its position: int64 [B]."""
    hashes = _hashes(positions, 1, seed=seed, purpose=purpose)[:, 0]
    return ((hashes >> np.uint64(32)) * bounds.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def generator(position: int, *, seed: int, purpose: str) -> np.random.Generator:
    """Return a generator for one position, for code that does not know in advance how many numbers it needs."""
    return np.random.default_rng((_key(seed=seed, purpose=purpose), position))


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each number with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hashes(positions: Positions, count: int, *, seed: int, purpose: str) -> NDArray[np.uint64]:
    key = np.array([_key(seed=seed, purpose=purpose)], dtype=np.uint64)
    keys = splitmix64(np.asarray(key + np.arange(count, dtype=np.uint64), dtype=np.uint64))
    # Hash the positions before they are combined with the keys. Otherwise, two keys that differ in a few bits would
    # draw the same numbers for positions that differ in the same bits.
    return splitmix64(splitmix64(positions.astype(np.uint64))[:, None] ^ keys[None, :])


@lru_cache
def _key(*, seed: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{purpose}/{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def device_uniform(
    positions_B: "torch.Tensor", count: int, *, seed: int, purpose: str, device: "torch.device | None" = None
) -> "torch.Tensor":
    """Draw the same numbers as `draw_uniform` (bit-identical) on any device: float64 [B, count].

    Args:
        positions_B: Positions, int64 [B].
        device: Device of the numbers. Default: the device of the positions.
    """
    import torch  # imported here, so that reading tars needs no torch

    from clipmill.train.device.transfer import send

    if device is not None:
        positions_B = send(positions_B, device)
    keys_N = _device_splitmix64(
        _to_signed(_key(seed=seed, purpose=purpose)) + torch.arange(count, device=positions_B.device)
    )
    hashes_BN = _device_splitmix64(_device_splitmix64(positions_B)[:, None] ^ keys_N)
    return _shift_right(hashes_BN, 64 - _MANTISSA_BITS).double() * 2.0**-_MANTISSA_BITS


def _device_splitmix64(values: "torch.Tensor") -> "torch.Tensor":
    # torch cannot multiply unsigned 64-bit integers, but products of int64 values wrap around to the same bits.
    values = (values ^ _shift_right(values, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift_right(values, 27)) * _to_signed(0x94D049BB133111EB)
    return values ^ _shift_right(values, 31)


def _shift_right(values: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Shift right and fill with zeros. torch's operator would fill with the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
