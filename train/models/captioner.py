"""Captioner: a video tower, and a GPT-2 decoder that attends to the tower's tokens.

GPT-2 is a causal text decoder (Radford et al. 2019) with pre-norm blocks, the tanh approximation of GELU, learned
positions, and tied input and output embeddings. Each block of our decoder also has cross-attention to a video, as in
transformers' `GPT2LMHeadModel(add_cross_attention=True)`.

Shape suffixes: V videos, C channels, T frames, H and W pixels, R rows of text (V * n, grouped by video), L tokens of a
row, N tokens of a video, D decoder width, E tower width, H heads, K width of a head, W vocabulary size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from clipmill.train.models.attention import Attend
from clipmill.train.models.transformer import LayerNorm, Linear, Mlp, SelfAttention, Stack, TransformerSize

# A GPT-2 block with cross-attention, and its key-value cache for decoding token by token.
#
# Each of V videos can have n texts: R = V * n rows, grouped by video. The keys and values of a video are computed once
# for all of its rows.

_STD = 0.02  # standard deviation of GPT-2's initial weights


class CrossAttention(nn.Module):
    """Multi-head attention from text to the tokens of its video."""

    def __init__(self, width: int, num_heads: int, *, attend: Attend) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.attend = attend
        self.q_proj = Linear(width, width)
        self.kv_proj = Linear(width, 2 * width)
        self.out_proj = Linear(width, width)

    def keys_and_values(self, video_VND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of the videos, each [V, N, H, K]."""
        k_VNHK, v_VNHK = self.kv_proj(video_VND).unflatten(2, (2, self.num_heads, -1)).unbind(2)
        return k_VNHK, v_VNHK

    def forward(self, x_RLD: Tensor, k_VNHK: Tensor, v_VNHK: Tensor) -> Tensor:
        """Attend from text [R, L, D] to the tokens of its video, and return [R, L, D]."""
        # Treat all rows of a video as queries to the same keys, so that the keys need not be repeated.
        q = apply_to_few_rows(self.q_proj, x_RLD).view(len(k_VNHK), -1, self.num_heads, k_VNHK.shape[3])
        return apply_to_few_rows(self.out_proj, self.attend(q, k_VNHK, v_VNHK).reshape(x_RLD.shape))


@dataclass
class BlockCache:
    """Key-value cache of a block, for the videos and for the text. Memory for all text tokens is preallocated."""

    k_RHLK: Tensor
    v_RHLK: Tensor
    video_k_VNHK: Tensor
    video_v_VNHK: Tensor


@dataclass
class TextCache:
    """Caches of blocks, by block index. The caches contain the first `num_tokens` tokens of each row."""

    blocks: dict[int, BlockCache]
    num_tokens: int = 0

    def keep(self, rows_r: Tensor, videos_v: Tensor | None = None) -> None:
        """Reorder or drop rows, as beam search does.

        Args:
            rows_r: Index of the old row that each new row continues, int64.
            videos_v: Indices of the videos to keep, int64; None for all videos.
        """
        for block in self.blocks.values():
            for x in (block.k_RHLK, block.v_RHLK):
                x[: len(rows_r), :, : self.num_tokens] = x[:, :, : self.num_tokens].index_select(0, rows_r)
            if videos_v is not None:
                block.video_k_VNHK, block.video_v_VNHK = (
                    # Copy in memory order, head by head.
                    x.transpose(1, 2).index_select(0, videos_v).transpose(1, 2)
                    for x in (block.video_k_VNHK, block.video_v_VNHK)
                )


class Gpt2Block(nn.Module):
    """Pre-norm residual block with causal attention, cross-attention and an MLP, each followed by dropout."""

    num_branches = 3

    def __init__(self, size: TransformerSize, *, attend: Attend, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.ln_1 = LayerNorm(size.width, eps=size.norm_eps)
        self.attn = SelfAttention(size.width, size.num_heads, attend=attend)
        self.ln_cross = LayerNorm(size.width, eps=size.norm_eps)
        self.cross_attn = CrossAttention(size.width, size.num_heads, attend=attend)
        self.ln_2 = LayerNorm(size.width, eps=size.norm_eps)
        self.mlp = Mlp(size.width, size.mlp_width, "gelu_tanh")
        for layer in (self.cross_attn.q_proj, self.cross_attn.kv_proj, self.mlp.c_fc):
            nn.init.normal_(layer.weight, std=_STD)
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.attn.in_proj_weight, std=_STD)
        # GPT-2's initialisation: the weights at the end of residual branches are smaller in deeper models.
        for layer in (self.attn.out_proj, self.cross_attn.out_proj, self.mlp.c_proj):
            nn.init.normal_(layer.weight, std=_STD * (2 * size.depth) ** -0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x_RLD: Tensor, video_VND: Tensor, *, branches: Tensor | None = None) -> Tensor:
        """Compute the block's output [R, L, D]; `branches` is None, because the block has no drop path."""
        x_RLD = x_RLD + self.dropout(self.attn(self.ln_1(x_RLD), causal=True, packing=None))
        attended_RLD = self.cross_attn(self.ln_cross(x_RLD), *self.cross_attn.keys_and_values(video_VND))
        x_RLD = x_RLD + self.dropout(attended_RLD)
        output_RLD: Tensor = x_RLD + self.dropout(self.mlp(self.ln_2(x_RLD)))
        return output_RLD

    def start(self, video_VND: Tensor, *, num_rows: int, num_tokens: int) -> BlockCache:
        """Create a cache for `num_rows` rows of up to `num_tokens` tokens."""
        k_VNHK, v_VNHK = (
            # Keep the memory of each head contiguous, because a step reads all keys of a head in sequence.
            x.transpose(1, 2).contiguous().transpose(1, 2)
            for x in self.cross_attn.keys_and_values(video_VND)
        )
        num_heads, head_width = k_VNHK.shape[2:]
        k_RHLK, v_RHLK = (k_VNHK.new_empty(num_rows, num_heads, num_tokens, head_width) for _ in range(2))
        return BlockCache(k_RHLK=k_RHLK, v_RHLK=v_RHLK, video_k_VNHK=k_VNHK, video_v_VNHK=v_VNHK)

    def step(self, x_RLD: Tensor, cache: BlockCache, *, offset: int) -> Tensor:
        """Compute the block's output for tokens that start at position `offset`. The cache contains all earlier tokens.

        Raises:
            ValueError: A step after the first has several tokens per row.
        """
        if offset and x_RLD.shape[1] > 1:
            raise ValueError(f"{x_RLD.shape[1]} tokens per row: only the first step may have several")
        attention = self.attn
        num_rows, num_tokens, width = x_RLD.shape
        end = offset + num_tokens
        qkv = attention.product(self.ln_1(x_RLD), attention.in_proj_bias, multiply=linear_of_few_rows)
        q_RLHK, k_RLHK, v_RLHK = qkv.view(num_rows, num_tokens, 3, attention.num_heads, -1).unbind(2)
        cache.k_RHLK[:num_rows, :, offset:end] = k_RLHK.transpose(1, 2)
        cache.v_RHLK[:num_rows, :, offset:end] = v_RLHK.transpose(1, 2)
        k_RLHK, v_RLHK = (x[:num_rows, :, :end].transpose(1, 2) for x in (cache.k_RHLK, cache.v_RHLK))
        out_RLHK = attention.attend(q_RLHK, k_RLHK, v_RLHK, causal=offset == 0 and num_tokens > 1)
        x_RLD = x_RLD + apply_to_few_rows(attention.out_proj, out_RLHK.reshape(num_rows, num_tokens, width))
        x_RLD = x_RLD + self.cross_attn(self.ln_cross(x_RLD), cache.video_k_VNHK, cache.video_v_VNHK)
        hidden = self.mlp.activate(apply_to_few_rows(self.mlp.c_fc, self.ln_2(x_RLD)))
        output_RLD: Tensor = x_RLD + self.mlp.c_proj(hidden)
        return output_RLD


_MAX_ROWS = 4  # maximum number of rows for `weight @ x`


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Equivalent of `torch.nn.functional.linear` that computes up to four rows on a CPU as weight @ x.

    This halves the time that BLAS libraries take (docs/captions.md). Layers that reduce the width are left to torch.
    """
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or rows > _MAX_ROWS or weight.shape[0] < weight.shape[1]:
        return linear(x, weight, bias)
    out = (weight @ x.reshape(rows, -1).T).T.reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias.to(out.dtype)


def apply_to_few_rows(layer: Linear, x: Tensor) -> Tensor:
    """Apply a linear layer with `linear_of_few_rows`."""
    return layer.product(x, layer.bias, multiply=linear_of_few_rows)


VOCABULARY_SIZE = 50257
CONTEXT_LENGTH = 1024

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
    """Return the dimensions of a GPT-2 with a given vocabulary size and context length (None: GPT-2's length)."""
    size = GPT2_SIZES[name]
    return replace(size, vocabulary_size=vocabulary_size, context_length=context_length or size.context_length)


class Gpt2(nn.Module):
    """Text decoder that predicts the next tokens from token IDs and a video encoder's output.

    Args:
        size: Dimensions.
        attend: Attention function.
        dropout: Dropout probability after the embedding and after each branch of a block. Unlike in GPT-2, attention
            weights have no dropout.
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

    def forward(self, tokens_RL: Tensor, video_VND: Tensor) -> Tensor:
        """Return logits [R, L, W] for the token that follows each token."""
        return self.logits(self.transformer(self.embed(tokens_RL), video_VND))

    def embed(self, tokens_RL: Tensor, *, offset: int = 0) -> Tensor:
        """Embed tokens that start at position `offset`, [R, L, D]; raise ValueError if the context is too short."""
        end = offset + tokens_RL.shape[1]
        if end > self.size.context_length:
            raise ValueError(f"{end} tokens exceed the decoder's context length of {self.size.context_length}")
        x_RLD: Tensor = self.dropout(self.token_embedding(tokens_RL) + self.positional_embedding[offset:end])
        return x_RLD

    def logits(self, x_RLD: Tensor) -> Tensor:
        """Compute logits [R, L, W] from the last block's output."""
        return linear_of_few_rows(self.ln_final(x_RLD), self.token_embedding.weight)

    def start(
        self, video_VND: Tensor, *, num_tokens: int, rows_per_video: int = 1, block_indices: Iterable[int] | None = None
    ) -> TextCache:
        """Create a cache for decoding captions step by step.

        Args:
            video_VND: Output of the video encoder.
            num_tokens: Maximum number of tokens per row.
            rows_per_video: Number of rows per video.
            block_indices: Indices of the blocks that run on this rank; None for all blocks.
        """
        num_rows = len(video_VND) * rows_per_video
        indices = range(len(self.transformer.resblocks)) if block_indices is None else block_indices
        return TextCache(
            {index: self._block(index).start(video_VND, num_rows=num_rows, num_tokens=num_tokens) for index in indices}
        )

    def step(self, tokens_RL: Tensor, cache: TextCache) -> Tensor:
        """Return logits [R, W] for the next tokens. Only the first step may have several tokens per row."""
        x_RLD = self.run_blocks(self.embed(tokens_RL, offset=cache.num_tokens), cache)
        return self.logits(x_RLD[:, -1])

    def run_blocks(self, x_RLD: Tensor, cache: TextCache) -> Tensor:
        """Run the blocks of a cache on the tokens that follow the cached tokens, [R, L, D]."""
        for index, block_cache in cache.blocks.items():
            x_RLD = self._block(index).step(x_RLD, block_cache, offset=cache.num_tokens)
        cache.num_tokens += x_RLD.shape[1]
        return x_RLD

    def _block(self, index: int) -> Gpt2Block:
        block = self.transformer.resblocks[index]
        assert isinstance(block, Gpt2Block)
        return block


class VideoTower(Protocol):
    """Interface of video towers, which `TokenTower` and `LibraryImage` implement."""

    @property
    def token_width(self) -> int:
        """Width E of the tokens."""

    def tokens(self, video_BCTHW: Tensor) -> Tensor:
        """Return all tokens of normalised clips [V, C, T, H, W] after the last norm, [V, N, E]."""


class Captioner(nn.Module):
    """Model that predicts the next tokens of captions from clips.

    Attributes:
        projection: Linear layer from the tower's width to the decoder's width; None if the widths are equal.
    """

    def __init__(self, video: nn.Module, decoder: Gpt2) -> None:
        super().__init__()
        self.video = video
        widths = tower_of(self).token_width, decoder.size.trunk.width
        self.projection = None if widths[0] == widths[1] else nn.Linear(*widths)
        self.decoder = decoder

    def forward(self, video_VCTHW: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [R, L, W] for the token that follows each token; `tokens` are int64 [V, L] or [V, n, L]."""
        return self.decoder(tokens.flatten(0, -2), self.encode(video_VCTHW))  # type: ignore[no-any-return]

    def encode(self, video_VCTHW: Tensor) -> Tensor:
        """Return the video encoder's output [V, N, D], which the decoder attends to."""
        x_VNE = tower_of(self).tokens(video_VCTHW)
        return x_VNE if self.projection is None else self.projection(x_VNE)

    def start(self, video_VCTHW: Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """Encode clips, and create the cache for `step`; see `Gpt2.start`."""
        return self.decoder.start(self.encode(video_VCTHW), num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens_RL: Tensor, cache: TextCache) -> Tensor:
        """Return logits [R, W] for the next tokens; see `Gpt2.step`."""
        return self.decoder.step(tokens_RL, cache)


def tower_of(model: nn.Module) -> VideoTower:
    """Return the video tower of a captioner, or of a pipeline stage of a captioner."""
    tower: VideoTower = model.video  # type: ignore[assignment]
    return tower
