"""Attention of many short sequences, such as the frames of each patch.

Shape suffixes: B batch, S sequences of an item, L tokens of a sequence, H heads, K width of a head; G groups of
sequences that lie side by side, M tokens of a group, N groups of the batch.
"""

import torch
from torch import Tensor
from torch.nn import functional

from clipmill.train.models.attention import Attend, attend_naively

# Rows of a tile of the memory-efficient kernel.
_TILE = 64


def attend_short(
    attend: Attend,
    q_BSLHK: Tensor,
    k_BSLHK: Tensor,
    v_BSLHK: Tensor,
    *,
    first: tuple[Tensor, Tensor] | None = None,
    per_tile: int | None = None,
) -> Tensor:
    """Attention within many short sequences, S of length L for each item, [B, S, L, H, K] in and out.

    A GPU computes attention in tiles of 64 or 128 queries by as many keys, of a single sequence: with a few frames,
    `attend` would fill some percent of them. So several sequences lie side by side in a tile, and a mask separates
    them. docs/models.md has the arithmetic. (Products of separate L x K matrices would be in tiles of 32 or 64 as
    well, with the scores in memory.)

    Args:
        first: Key and value that the queries of all sequences see too, [B, 1, H, K].
        per_tile: Number of sequences side by side, a divisor of S; default 1 on a CPU, which computes them one by one.
    """
    num_sequences, length, num_heads = q_BSLHK.shape[1:4]
    if per_tile is None:
        is_tiled = q_BSLHK.is_cuda and attend is not attend_naively
        per_tile = sequences_per_tile(num_sequences, length) if is_tiled else 1
    if per_tile == 1 and first is None:
        # Sequences are heads: `q_BSLHK` may be a view of tokens in the order of L, and nothing is copied.
        out_BLNK = attend(*(x.transpose(1, 2).flatten(2, 3) for x in (q_BSLHK, k_BSLHK, v_BSLHK)))
        return out_BLNK.unflatten(2, (num_sequences, num_heads)).transpose(1, 2)

    def side_by_side(x_BSLHK: Tensor, first_B1HK: Tensor | None = None) -> Tensor:
        x_BGMHK = x_BSLHK.unflatten(1, (-1, per_tile)).flatten(2, 3)
        if first_B1HK is not None:
            first_BG1HK = first_B1HK[:, None].expand(-1, x_BGMHK.shape[1], -1, -1, -1)
            x_BGMHK = torch.cat([first_BG1HK, x_BGMHK], dim=2)
        return x_BGMHK.flatten(0, 1)

    first_k, first_v = (None, None) if first is None else first
    q_NMHK, k_NMHK, v_NMHK = side_by_side(q_BSLHK), side_by_side(k_BSLHK, first_k), side_by_side(v_BSLHK, first_v)
    if per_tile == 1:
        out_NMHK = attend(q_NMHK, k_NMHK, v_NMHK)
    else:
        sequence_M = torch.arange(per_tile * length, device=q_BSLHK.device) // length
        mask_MM = sequence_M[:, None] == sequence_M
        if first is not None:
            mask_MM = functional.pad(mask_MM, (1, 0), value=True)
        q_NHMK, k_NHMK, v_NHMK = (x.transpose(1, 2) for x in (q_NMHK, k_NMHK, v_NMHK))
        out_NMHK = functional.scaled_dot_product_attention(q_NHMK, k_NHMK, v_NHMK, attn_mask=mask_MM).transpose(1, 2)
    return out_NMHK.unflatten(1, (per_tile, length)).unflatten(0, (len(q_BSLHK), -1)).flatten(1, 2)


def sequences_per_tile(num_sequences: int, length: int) -> int:
    """The number of sequences that lie side by side: the largest that divides their number and fits in a tile."""
    return max(number for number in range(1, max(1, _TILE // length) + 1) if num_sequences % number == 0)
