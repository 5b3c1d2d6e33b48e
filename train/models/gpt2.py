"""GPT-2 with cross-attention to a video in each block: a causal text decoder (Radford et al. 2019).

The architecture is that of transformers' `GPT2LMHeadModel(add_cross_attention=True)`: pre-norm, tanh-approximated GELU,
learned positions and tied input and output embeddings.

Shape suffixes: V videos, R rows of text (V * n, grouped by video), L tokens of a row, N tokens of a video, D width,
W vocabulary size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from train.models.attention import Attend
from train.models.gpt2_block import Gpt2Block, TextCache, linear_for_few
from train.models.transformer import LayerNorm, Stack, TransformerSize

VOCABULARY_SIZE = 50257
CONTEXT_LENGTH = 1024
_STD = 0.02

Gpt2Name = Literal["tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]


@dataclass(frozen=True, kw_only=True)
class Gpt2Size:
    """Dimensions of a decoder; `trunk` is its transformer."""

    trunk: TransformerSize
    vocabulary_size: int = VOCABULARY_SIZE
    context_length: int = CONTEXT_LENGTH


def _size(width: int, depth: int, num_heads: int) -> Gpt2Size:
    return Gpt2Size(trunk=TransformerSize(width=width, depth=depth, num_heads=num_heads))


GPT2_SIZES: dict[Gpt2Name, Gpt2Size] = {
    "tiny": _size(128, 2, 4),
    "gpt2": _size(768, 12, 12),
    "gpt2-medium": _size(1024, 24, 16),
    "gpt2-large": _size(1280, 36, 20),
    "gpt2-xl": _size(1600, 48, 25),
}


def gpt2_size(name: Gpt2Name, *, vocabulary_size: int = VOCABULARY_SIZE, context_length: int | None = None) -> Gpt2Size:
    """Dimensions by name, with another vocabulary size or context length."""
    size = GPT2_SIZES[name]
    return replace(size, vocabulary_size=vocabulary_size, context_length=context_length or size.context_length)


class Gpt2(nn.Module):
    """Text decoder that predicts next tokens from token ids and a video encoder's output; `dropout` as in GPT-2."""

    def __init__(self, size: Gpt2Size, *, attend: Attend, dropout: float = 0.0) -> None:
        super().__init__()
        width = size.trunk.width
        self.size = size
        self.token_embedding = nn.Embedding(size.vocabulary_size, width)
        self.positional_embedding = nn.Parameter(_STD * torch.randn(size.context_length, width))
        self.transformer = Stack(Gpt2Block(size.trunk, attend=attend, dropout=dropout) for _ in range(size.trunk.depth))
        self.dropout = nn.Dropout(dropout)
        self.ln_final = LayerNorm(width, eps=size.trunk.norm_eps)
        nn.init.normal_(self.token_embedding.weight, std=_STD)

    def forward(self, tokens_RL: Tensor, video_VND: Tensor) -> Tensor:
        """Logits [R, L, W] of the token after each given one."""
        return self.logits(self.transformer(self.embed(tokens_RL), video_VND))

    def embed(self, tokens_RL: Tensor, *, begin: int = 0) -> Tensor:
        """Embed tokens at positions from `begin` on, [R, L, D]; ValueError beyond the context length."""
        end = begin + tokens_RL.shape[1]
        if end > self.size.context_length:
            raise ValueError(f"{end} tokens, and the decoder's context has {self.size.context_length}")
        x_RLD: Tensor = self.dropout(self.token_embedding(tokens_RL) + self.positional_embedding[begin:end])
        return x_RLD

    def logits(self, x_RLD: Tensor) -> Tensor:
        """Logits [R, L, W] from the last block's output and the token embedding."""
        return linear_for_few(self.ln_final(x_RLD), self.token_embedding.weight)

    def start(
        self, video_VND: Tensor, *, num_tokens: int, rows_per_video: int = 1, numbers: Iterable[int] | None = None
    ) -> TextCache:
        """Create a cache to decode texts of videos step by step.

        Args:
            video_VND: the encoder's output.
            num_tokens: maximum number of tokens of a row.
            numbers: indices of the blocks that run on this rank; None for all.
        """
        num_rows = len(video_VND) * rows_per_video
        chosen = range(len(self.transformer.resblocks)) if numbers is None else numbers
        return TextCache(
            {
                number: self._block(number).start(video_VND, num_rows=num_rows, num_tokens=num_tokens)
                for number in chosen
            }
        )

    def step(self, tokens_RL: Tensor, cache: TextCache) -> Tensor:
        """Logits [R, W] of the next tokens; the first step may have several tokens per row, later steps one."""
        x_RLD = self.run_blocks(self.embed(tokens_RL, begin=cache.num_tokens), cache)
        return self.logits(x_RLD[:, -1])

    def run_blocks(self, x_RLD: Tensor, cache: TextCache) -> Tensor:
        """Run the blocks of a cache on the tokens that follow the cached ones, [R, L, D]."""
        for number, block_cache in cache.blocks.items():
            x_RLD = self._block(number).step(x_RLD, block_cache, begin=cache.num_tokens)
        cache.num_tokens += x_RLD.shape[1]
        return x_RLD

    def _block(self, number: int) -> Gpt2Block:
        block = self.transformer.resblocks[number]
        assert isinstance(block, Gpt2Block)
        return block
