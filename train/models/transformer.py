"""CLIP's pre-norm transformer, the trunk of both towers. Parameters carry CLIP's names.

Shape suffixes: B batch, L tokens, D width, H heads, K width of a head.
"""

from dataclasses import dataclass

import torch
from torch import nn

from train.models.attention import Attend


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Width, number of blocks and number of heads of a tower."""

    width: int
    depth: int
    num_heads: int


class SelfAttention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, num_heads: int, *, attend: Attend) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attend = attend
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BLD: torch.Tensor, *, causal: bool) -> torch.Tensor:
        num_items, num_tokens, width = x_BLD.shape
        qkv = nn.functional.linear(x_BLD, self.in_proj_weight, self.in_proj_bias)
        q_BLHK, k_BLHK, v_BLHK = qkv.view(num_items, num_tokens, 3, self.num_heads, -1).unbind(2)
        out_BLHK = self.attend(q_BLHK, k_BLHK, v_BLHK, causal=causal)
        projected: torch.Tensor = self.out_proj(out_BLHK.reshape(num_items, num_tokens, width))
        return projected


class Mlp(nn.Module):
    """Two linear layers with GELU between them, four times wider inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        x_BLD = self.c_proj(nn.functional.gelu(self.c_fc(x_BLD)))
        return x_BLD


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and a residual."""

    def __init__(self, size: TransformerSize, *, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = SelfAttention(size.width, size.num_heads, attend=attend)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = Mlp(size.width)
        # CLIP's initialisation: residual branches shrink with the depth.
        into_residual = size.width**-0.5 * (2 * size.depth) ** -0.5
        nn.init.normal_(self.attn.in_proj_weight, std=size.width**-0.5)
        nn.init.normal_(self.attn.out_proj.weight, std=into_residual)
        nn.init.zeros_(self.attn.out_proj.bias)
        nn.init.normal_(self.mlp.c_fc.weight, std=(2 * size.width) ** -0.5)
        nn.init.normal_(self.mlp.c_proj.weight, std=into_residual)

    def forward(self, x_BLD: torch.Tensor, *, causal: bool) -> torch.Tensor:
        x_BLD = x_BLD + self.attn(self.ln_1(x_BLD), causal=causal)
        return x_BLD + self.mlp(self.ln_2(x_BLD))


class Transformer(nn.Module):
    """A stack of blocks."""

    def __init__(self, size: TransformerSize, *, attend: Attend) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(size, attend=attend) for _ in range(size.depth))

    def forward(self, x_BLD: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        for block in self.resblocks:
            x_BLD = block(x_BLD, causal=causal)
        return x_BLD
