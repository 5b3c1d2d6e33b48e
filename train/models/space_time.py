"""LaViLa's video blocks: attention over time, then over space (Bain et al. 2021, "Frozen in Time", section 3.1).

These blocks differ from TimeSformer's (`clipmill.train.models.timesformer`) in two ways. The class token takes part in
both attentions: it attends to all patches, and every patch attends to it. The output of spatial attention is added to
the input of the block, so temporal attention has an effect only through spatial attention.

TimeSformer also uses `attend_short`, which computes attention within many short sequences.

Shape suffixes: B clips, T frames, P patches of a frame, L tokens (1 + T * P, frame by frame), D width, H heads, K width
of a head. In `attend_short`: S sequences of L tokens each, G groups of sequences that share a tile, M tokens of a
group, N groups of the batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipmill.train.models.attention import Attend, Packing, attend_masked, attend_naively
from clipmill.train.models.transformer import Block, LayerNorm, SelfAttention, TransformerSize

LN_PRE_EPS = 1e-5  # epsilon of LaViLa's first layer norm, regardless of the epsilon of the blocks


class SpaceTimeBlock(Block):
    """CLIP block with additional temporal attention before spatial attention.

    The output of temporal attention is initially zero. For a single frame, the block then equals CLIP's block.
    """

    def __init__(self, size: TransformerSize, *, num_frames: int, attend: Attend) -> None:
        super().__init__(size, attend=attend)
        self.num_frames, self.attend = num_frames, attend
        self.ln_temporal = LayerNorm(size.width, eps=size.norm_eps)
        self.temporal_attn = SelfAttention(size.width, size.num_heads, attend=attend)
        nn.init.normal_(self.temporal_attn.in_proj_weight, std=size.width**-0.5)
        nn.init.zeros_(self.temporal_attn.out_proj.weight)
        nn.init.zeros_(self.temporal_attn.out_proj.bias)

    def forward(
        self, x_BLD: Tensor, *, causal: bool = False, packing: Packing | None = None, branches: Tensor | None = None
    ) -> Tensor:
        """Compute the block's output [B, L, D]; see `Block.forward`."""
        temporal_BLD = x_BLD + self._attend(self.temporal_attn, self.ln_temporal(x_BLD), over_time=True)
        attended_BLD = self._attend(self.attn, self.ln_1(temporal_BLD), over_time=False)
        x_BLD = x_BLD + (attended_BLD if branches is None else attended_BLD * branches[0])
        changed_BLD = self.mlp(self.ln_2(x_BLD))
        return x_BLD + (changed_BLD if branches is None else changed_BLD * branches[1])

    def _attend(self, attention: SelfAttention, x_BLD: Tensor, *, over_time: bool) -> Tensor:
        """Attend from the class token to all tokens, and from each patch to the class token and its group.

        A group consists of the patches at one position in all frames (`over_time`), or of the patches of one frame.
        """
        qkv = attention.product(x_BLD, attention.in_proj_bias)
        q, k, v = qkv.unflatten(2, (3, attention.num_heads, -1)).unbind(2)

        def split_frames(x_BLHK: Tensor) -> Tensor:
            return x_BLHK[:, 1:].unflatten(1, (self.num_frames, -1))  # [B, T, P, H, K]

        class_B1HK = self.attend(q[:, :1], k, v)
        class_key_value = k[:, :1], v[:, :1]
        if over_time:
            qkv_BPTHK = (split_frames(x).transpose(1, 2) for x in (q, k, v))
            patches_BTPHK = attend_short(self.attend, *qkv_BPTHK, extra_key_value=class_key_value).transpose(1, 2)
        else:
            qkv_BTPHK = map(split_frames, (q, k, v))
            patches_BTPHK = attend_short(self.attend, *qkv_BTPHK, extra_key_value=class_key_value)
        joined_BLD = torch.cat([class_B1HK, patches_BTPHK.flatten(1, 2)], dim=1).flatten(2)
        attended_BLD: Tensor = attention.out_proj(joined_BLD)
        return attended_BLD


_TILE = 64  # rows of a tile of the memory-efficient kernel


def attend_short(
    attend: Attend,
    q_BSLHK: Tensor,
    k_BSLHK: Tensor,
    v_BSLHK: Tensor,
    *,
    extra_key_value: tuple[Tensor, Tensor] | None = None,
    num_per_tile: int | None = None,
) -> Tensor:
    """Attend within S short sequences of length L per clip. Arguments and result are [B, S, L, H, K].

    A GPU computes attention in tiles of 64 or 128 queries by as many keys, all from one sequence. With a few frames,
    `attend` would use only a few percent of each tile. Therefore several sequences share a tile, and a mask separates
    them; docs/models.md contains the arithmetic. (Products of separate L x K matrices would also use tiles of 32 or 64,
    and would store the scores in memory.)

    Args:
        attend: Attention function.
        extra_key_value: Additional key and value, [B, 1, H, K], that the queries of all sequences attend to.
        num_per_tile: Number of sequences that share a tile, a divisor of S. Default: 1 on a CPU, which processes
            sequences one by one; otherwise `sequences_per_tile`.
    """
    num_sequences, length, num_heads = q_BSLHK.shape[1:4]
    if num_per_tile is None:
        is_tiled = q_BSLHK.is_cuda and attend is not attend_naively
        num_per_tile = sequences_per_tile(num_sequences, length) if is_tiled else 1
    if num_per_tile == 1 and extra_key_value is None:
        # Treat sequences as heads. This copies nothing if `q_BSLHK` is a view of memory in the order [B, L, S, H, K].
        out_BLNK = attend(*(x.transpose(1, 2).flatten(2, 3) for x in (q_BSLHK, k_BSLHK, v_BSLHK)))
        return out_BLNK.unflatten(2, (num_sequences, num_heads)).transpose(1, 2)

    def join_sequences(x_BSLHK: Tensor, extra_B1HK: Tensor | None = None) -> Tensor:
        x_BGMHK = x_BSLHK.unflatten(1, (-1, num_per_tile)).flatten(2, 3)
        if extra_B1HK is not None:
            extra_BG1HK = extra_B1HK[:, None].expand(-1, x_BGMHK.shape[1], -1, -1, -1)
            x_BGMHK = torch.cat([extra_BG1HK, x_BGMHK], dim=2)
        return x_BGMHK.flatten(0, 1)

    extra_k, extra_v = (None, None) if extra_key_value is None else extra_key_value
    q_NMHK, k_NMHK, v_NMHK = join_sequences(q_BSLHK), join_sequences(k_BSLHK, extra_k), join_sequences(v_BSLHK, extra_v)
    if num_per_tile == 1:
        out_NMHK = attend(q_NMHK, k_NMHK, v_NMHK)
    else:
        sequence_M = torch.arange(num_per_tile * length, device=q_BSLHK.device) // length
        mask_MM = sequence_M[:, None] == sequence_M
        if extra_key_value is not None:
            mask_MM = functional.pad(mask_MM, (1, 0), value=True)
        out_NMHK = attend_masked(q_NMHK, k_NMHK, v_NMHK, mask_MM)
    return out_NMHK.unflatten(1, (num_per_tile, length)).unflatten(0, (len(q_BSLHK), -1)).flatten(1, 2)


def sequences_per_tile(num_sequences: int, length: int) -> int:
    """Return the largest divisor of `num_sequences` such that this many sequences of this length fit into a tile."""
    return max(count for count in range(1, max(1, _TILE // length) + 1) if num_sequences % count == 0)
