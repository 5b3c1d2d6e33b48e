"""GPT-2 that looks at a video: a causal text decoder with cross-attention in each block (Radford et al. 2019).

The layout is that of transformers' `GPT2LMHeadModel(add_cross_attention=True)`: layer norm before each part, GELU by
tanh, learned positions, and logits through the transposed token embedding.

Shape suffixes: V videos, R rows of text (V * n, those of a video one behind the other), L tokens of a row, N tokens of
a video, D width, W words of the vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from train.models.attention import Attend
from train.models.gpt2_block import Gpt2Block, TextCache, linear_for_few
from train.models.transformer import LayerNorm, Stack, TransformerSize

VOCABULARY_SIZE = 50257
CONTEXT_LENGTH = 1024
_STD = 0.02

Gpt2Name = Literal["tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]


@dataclass(frozen=True, kw_only=True)
class Gpt2Size:
    """A decoder; `trunk` is its transformer."""

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
    """The size that a name stands for, with another vocabulary or context."""
    size = GPT2_SIZES[name]
    return replace(size, vocabulary_size=vocabulary_size, context_length=context_length or size.context_length)


class Gpt2(nn.Module):
    """Token ids to logits of the next tokens, given what a video's encoder made of it.

    Args:
        dropout: share of the embeddings, and of what each part of a block adds, that training leaves out.
    """

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

    def forward(self, tokens_RL: torch.Tensor, video_VND: torch.Tensor) -> torch.Tensor:
        """Logits [R, L, W] of the token after each."""
        return self.logits(self.transformer(self.embed(tokens_RL), video_VND))

    def embed(self, tokens_RL: torch.Tensor, *, begin: int = 0) -> torch.Tensor:
        """Tokens with their places, from place `begin` on, [R, L, D].

        Raises:
            ValueError: a token is beyond the context.
        """
        end = begin + tokens_RL.shape[1]
        if end > self.size.context_length:
            raise ValueError(f"{end} tokens, and the decoder's context has {self.size.context_length}")
        x_RLD: torch.Tensor = self.dropout(self.token_embedding(tokens_RL) + self.positional_embedding[begin:end])
        return x_RLD

    def logits(self, x_RLD: torch.Tensor) -> torch.Tensor:
        """What the last block gave, as logits [R, L, W] by the token embedding."""
        return linear_for_few(self.ln_final(x_RLD), self.token_embedding.weight)

    def start(
        self, video_VND: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1, numbers: Iterable[int] | None = None
    ) -> TextCache:
        """A cache for the texts of videos, to be written step by step.

        Args:
            video_VND: what the encoder made of the videos, as `forward` takes it.
            num_tokens: of a row at most.
            numbers: of the blocks that are to run here; all when left out.
        """
        num_rows = len(video_VND) * rows_per_video
        chosen = range(len(self.transformer.resblocks)) if numbers is None else numbers
        return TextCache(
            {
                number: self._block(number).start(video_VND, num_rows=num_rows, num_tokens=num_tokens)
                for number in chosen
            }
        )

    def step(self, tokens_RL: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Logits [R, W] of what follows these tokens, which follow those in the cache.

        There may be several tokens a row in the first step, and one in all others.
        """
        x_RLD = self.run_blocks(self.embed(tokens_RL, begin=cache.num_tokens), cache)
        return self.logits(x_RLD[:, -1])

    def run_blocks(self, x_RLD: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """The blocks of a cache on tokens that follow those in it, [R, L, D]."""
        for number, block_cache in cache.blocks.items():
            x_RLD = self._block(number).step(x_RLD, block_cache, begin=cache.num_tokens)
        cache.num_tokens += x_RLD.shape[1]
        return x_RLD

    def _block(self, number: int) -> Gpt2Block:
        block = self.transformer.resblocks[number]
        assert isinstance(block, Gpt2Block)
        return block
