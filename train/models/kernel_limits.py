"""How much one call of a GPU's attention kernel can take, and calls in parts.

Shape suffixes: B sequences, M tokens, H heads, K width of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Sequences and heads are the second and third dimension of the grid of every fused kernel, which CUDA limits.
_MOST_BLOCKS = 65_535
# FlashAttention's backward pass counts the elements of a query gradient in 32 bits, padded to these multiples; packed
# sequences have padding in addition to their tokens.
_MOST_ELEMENTS, _PADDED_TOKENS, _PADDED_WIDTH = 2**31, 128, 64


def most_sequences(num_tokens: int, num_heads: int, head_width: int, *, packed: bool = False) -> int:
    """Number of sequences of `num_tokens` (packed: of the mean) that a kernel can take in one call, at least 1."""
    padded_tokens = num_tokens + _PADDED_TOKENS if packed else -(-num_tokens // _PADDED_TOKENS) * _PADDED_TOKENS
    padded_width = -(-head_width // _PADDED_WIDTH) * _PADDED_WIDTH
    return max(1, min(_MOST_BLOCKS, _MOST_ELEMENTS // (padded_tokens * padded_width * num_heads)))


def attend_in_parts(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *qkv_BMHK: Tensor) -> Tensor:
    """`attend`, called for parts of the heads and of the batch where a GPU's kernel cannot take all at once."""
    num_sequences, num_tokens, num_heads, head_width = qkv_BMHK[0].shape
    if qkv_BMHK[0].is_cuda:
        most = most_sequences(num_tokens, min(num_heads, _MOST_BLOCKS), head_width)
        for dim, size, limit in ((2, num_heads, _MOST_BLOCKS), (0, num_sequences, most)):
            if size > limit:
                parts = zip(*(x.split(limit, dim) for x in qkv_BMHK), strict=True)
                return torch.cat([attend_in_parts(attend, *part) for part in parts], dim)
    return attend(*qkv_BMHK)
