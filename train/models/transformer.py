"""CLIP's pre-norm transformer, the trunk of both towers. Parameters carry CLIP's names.

Shape suffixes: B batch, L tokens, D width, H heads, K width of a head. Packed sequences (train.models.packing) are a
batch of 1.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from train.config.model import Activation
from train.models.attention import Attend
from train.models.packing import Packing

NORM_EPS = 1e-5  # CLIP's
MlpActivation = Activation | Literal["gelu_tanh"]  # gelu_tanh: GELU's approximation by tanh, GPT-2's
_MAX_GRAPHS = 32


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Width, number of blocks and of heads of a tower, and what its blocks compute between the matrices.

    Attributes:
        has_key_bias: queries, keys and values have one bias (CLIP); else queries and values have one each (BEiT). What
            is added to all keys alike changes no attention.
    """

    width: int
    depth: int
    num_heads: int
    activation: Activation = "gelu"
    norm_eps: float = NORM_EPS
    has_key_bias: bool = True


class LayerNorm(nn.LayerNorm):
    """Layer norm whose result has the type of what it was given; mean and deviation are float32 at least.

    Autocast would copy its input and output to float32, and the residual stream would stay so: twice the memory of a
    block's input, which is most of what activation checkpointing keeps.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SelfAttention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, num_heads: int, *, attend: Attend, has_key_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attend = attend
        self.has_key_bias = has_key_bias
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        if has_key_bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        else:
            self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BLD: torch.Tensor, *, causal: bool, packing: Packing | None) -> torch.Tensor:
        num_items, num_tokens, width = x_BLD.shape
        bias = self.in_proj_bias if self.has_key_bias else self._bias_without_keys()
        qkv = nn.functional.linear(x_BLD, self.in_proj_weight, bias)
        q_BLHK, k_BLHK, v_BLHK = qkv.view(num_items, num_tokens, 3, self.num_heads, -1).unbind(2)
        out_BLHK = self.attend(q_BLHK, k_BLHK, v_BLHK, causal=causal, packing=packing)
        projected: torch.Tensor = self.out_proj(out_BLHK.reshape(num_items, num_tokens, width))
        return projected

    def _bias_without_keys(self) -> torch.Tensor:
        return torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])


class Mlp(nn.Module):
    """Two linear layers with an activation between them, four times wider inside."""

    def __init__(self, width: int, activation: MlpActivation) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)
        self.activate = _ACTIVATIONS[activation]

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        x_BLD = self.c_proj(self.activate(self.c_fc(x_BLD)))
        return x_BLD


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x), which OpenAI trained CLIP with; it differs from GELU by 0.02 at most."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[MlpActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": nn.functional.gelu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and a residual."""

    num_branches = 2

    def __init__(self, size: TransformerSize, *, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(size.width, eps=size.norm_eps)
        self.attn = SelfAttention(size.width, size.num_heads, attend=attend, has_key_bias=size.has_key_bias)
        self.ln_2 = LayerNorm(size.width, eps=size.norm_eps)
        self.mlp = Mlp(size.width, size.activation)
        # CLIP's initialisation: residual branches shrink with the depth.
        into_residual = size.width**-0.5 * (2 * size.depth) ** -0.5
        nn.init.normal_(self.attn.in_proj_weight, std=size.width**-0.5)
        nn.init.normal_(self.attn.out_proj.weight, std=into_residual)
        nn.init.zeros_(self.attn.out_proj.bias)
        nn.init.normal_(self.mlp.c_fc.weight, std=(2 * size.width) ** -0.5)
        nn.init.normal_(self.mlp.c_proj.weight, std=into_residual)

    def forward(
        self,
        x_BLD: torch.Tensor,
        *,
        causal: bool = False,
        packing: Packing | None = None,
        branches: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The block's output, [B, L, D].

        Args:
            branches: [2, B, 1, 1], factors of what attention and MLP add, one an item (see `drawn_branches`).
        """
        attended_BLD = self.attn(self.ln_1(x_BLD), causal=causal, packing=packing)
        x_BLD = x_BLD + (attended_BLD if branches is None else attended_BLD * branches[0])
        changed_BLD = self.mlp(self.ln_2(x_BLD))
        return x_BLD + (changed_BLD if branches is None else changed_BLD * branches[1])


class Stack(nn.Module):
    """Blocks one behind the other.

    Args:
        blocks: each takes tokens [B, L, D], and the factors of its branches as `branches`; it says how many it has as
            `num_branches`.
        drop_path: for each block, the probability that it is skipped for an item in training; empty for none.

    Attributes:
        checkpointing: blocks keep their input alone, and compute the rest again in the backward pass.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, drop_path: Sequence[float] = ()) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)
        self.drop_path = tuple(drop_path) or (0.0,) * len(self.resblocks)
        if len(self.drop_path) != len(self.resblocks):
            raise ValueError(f"{len(self.drop_path)} probabilities for {len(self.resblocks)} blocks")
        self.checkpointing = False

    def forward(self, x_BLD: torch.Tensor, *context: torch.Tensor, **options: Any) -> torch.Tensor:
        """All blocks, [B, L, D]; each is also given what else there is."""
        for number in range(len(self.resblocks)):
            x_BLD = self.run(number, x_BLD, *context, **options)
        return x_BLD

    def run(self, number: int, x_BLD: torch.Tensor, *context: torch.Tensor, **options: Any) -> torch.Tensor:
        """One block, by its number."""
        block: Any = self.resblocks[number]
        # Drawn outside of the block: compiled or computed twice, it sees the same. For all or for none, as blocks
        # that are called alike share their compiled code.
        drops = self.training and any(self.drop_path)
        branches = drawn_branches(x_BLD, self.drop_path[number], count=block.num_branches) if drops else None
        run = partial(block, branches=branches, **options)
        out_BLD: torch.Tensor = (
            checkpoint(run, x_BLD, *context, use_reentrant=False) if self.checkpointing else run(x_BLD, *context)
        )
        return out_BLD


class Transformer(Stack):
    """A stack of CLIP's blocks."""

    def __init__(self, size: TransformerSize, *, attend: Attend, drop_path: Sequence[float] = ()) -> None:
        super().__init__((Block(size, attend=attend) for _ in range(size.depth)), drop_path=drop_path)


def drawn_branches(x_BLD: torch.Tensor, probability: float, *, count: int = 2) -> torch.Tensor:
    """Factors of the branches of a block for each item, [count, B, 1, 1], from torch's generator.

    0 with the given probability, else what keeps the mean (Huang et al. 2016, with the scale in training).
    """
    kept_nB11 = torch.rand(count, len(x_BLD), 1, 1, device=x_BLD.device) >= probability
    return kept_nB11.to(x_BLD.dtype) / (1 - probability)


def drop_path_of(probability: float, *, depth: int, is_rising: bool) -> tuple[float, ...]:
    """The probability of each block: the same, or rising in equal steps from 0 to `probability` in the last."""
    if not is_rising or depth == 1:
        return (probability,) * depth
    return tuple(probability * number / (depth - 1) for number in range(depth))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """All blocks of a model's stacks: the parts that are sharded, checkpointed and compiled one by one.

    Blocks whose parameters are elsewhere, as those of a pipeline's other stages, are left out.
    """
    stacks = (module for module in model.modules() if isinstance(module, Stack))
    return [block for stack in stacks for block in stack.resblocks if next(block.parameters(), None) is not None]


def checkpoint_blocks(model: nn.Module) -> None:
    """Turns activation checkpointing on in all stacks of a model."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.checkpointing = True


def compile_blocks(model: nn.Module, *, backend: str = "inductor", fullgraph: bool = False) -> None:
    """Has torch.compile compile each block of a model when it first runs; names of parameters stay.

    Args:
        fullgraph: raise where a block is not one graph, as with attention by xformers.
    """
    # Training, evaluation, pixels and captions, the last batch: each has a graph of its own, and all blocks share them.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    for block in blocks_of(model):
        block.compile(backend=backend, fullgraph=fullgraph)
