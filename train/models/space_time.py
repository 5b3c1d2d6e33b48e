"""LaViLa's video blocks: attention over time, then over space (Bain et al. 2021, "Frozen in Time", section 3.1).

They differ from TimeSformer's (`clipmill.train.models.timesformer`) in two ways. The class token takes part in both
attentions, where it sees all patches and each of them sees it. The output of spatial attention is added to the input of
the block, so that temporal attention acts through it alone.

Shape suffixes: B clips, T frames, P patches of a frame, L tokens (1 + T * P, by frames), D width, H heads, K width of a
head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipmill.train.models.attention import Attend, Packing
from clipmill.train.models.short_attention import attend_short
from clipmill.train.models.transformer import Block, LayerNorm, SelfAttention, Stack, TransformerSize

LN_PRE_EPS = 1e-5  # whatever the blocks have


class SpaceTimeBlock(Block):
    """A CLIP block with temporal attention before the spatial one; the former is new, and adds nothing at first."""

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
        timed_BLD = x_BLD + self._attended(self.temporal_attn, self.ln_temporal(x_BLD), over_time=True)
        attended_BLD = self._attended(self.attn, self.ln_1(timed_BLD), over_time=False)
        x_BLD = x_BLD + (attended_BLD if branches is None else attended_BLD * branches[0])
        changed_BLD = self.mlp(self.ln_2(x_BLD))
        return x_BLD + (changed_BLD if branches is None else changed_BLD * branches[1])

    def _attended(self, attention: SelfAttention, x_BLD: Tensor, *, over_time: bool) -> Tensor:
        """Attention of the class token to all tokens, and of patches to the class token and those of their group."""
        qkv = attention.product(x_BLD, attention.in_proj_bias)
        q, k, v = qkv.unflatten(2, (3, attention.num_heads, -1)).unbind(2)

        def by_frame(x_BLHK: Tensor) -> Tensor:
            return x_BLHK[:, 1:].unflatten(1, (self.num_frames, -1))  # [B, T, P, H, K]

        class_B1HK = self.attend(q[:, :1], k, v)
        first = k[:, :1], v[:, :1]
        if over_time:
            by_patch = (by_frame(x).transpose(1, 2) for x in (q, k, v))
            patches_BTPHK = attend_short(self.attend, *by_patch, first=first).transpose(1, 2)
        else:
            patches_BTPHK = attend_short(self.attend, *map(by_frame, (q, k, v)), first=first)
        joined_BLD = torch.cat([class_B1HK, patches_BTPHK.flatten(1, 2)], dim=1).flatten(2)
        attended_BLD: Tensor = attention.out_proj(joined_BLD)
        return attended_BLD


def space_time(size: TransformerSize, *, num_frames: int, attend: Attend, drop_path: Sequence[float] = ()) -> Stack:
    """A stack of LaViLa's blocks."""
    blocks = (SpaceTimeBlock(size, num_frames=num_frames, attend=attend) for _ in range(size.depth))
    return Stack(blocks, drop_path=drop_path)
