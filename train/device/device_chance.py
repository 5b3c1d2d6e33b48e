"""`train.device.random.uniform` on any device: the same numbers to the bit, drawn where they are needed.

torch has no unsigned 64-bit products, but int64's wrap around to the same bits; only shifts to the right must drop the
sign that they would copy.
"""

import torch

from train.device.random import MANTISSA_BITS, key_of
from train.device.sending import sent

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
