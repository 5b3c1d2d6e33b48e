"""CLIP's text tower and its byte-pair tokenizer.

Shape suffixes: B batch, L tokens, D width, E width of the embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from train.models.attention import Attend
from train.models.transformer import Transformer, TransformerSize

VOCABULARY_SIZE = 49408
CONTEXT_LENGTH = 77

Tokenize = Callable[[str], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class TextTowerSize:
    """A text tower; `trunk` is its transformer."""

    trunk: TransformerSize
    vocabulary_size: int = VOCABULARY_SIZE
    context_length: int = CONTEXT_LENGTH


class TextTower(nn.Module):
    """Token ids to embeddings; a token sees only those before it."""

    def __init__(self, size: TextTowerSize, *, embedding_width: int, attend: Attend) -> None:
        super().__init__()
        width = size.trunk.width
        self.token_embedding = nn.Embedding(size.vocabulary_size, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(size.context_length, width))
        self.transformer = Transformer(size.trunk, attend=attend)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Embeds int64 token ids [B, L] as [B, E], not yet of unit length.

        The embedding is read at the first place of the largest id, which is the end-of-text token. Attention is
        causal, so what follows that token cannot matter, and columns without a caption's own tokens are not computed.
        """
        end_B = tokens_BL.argmax(dim=1)
        tokens_BL = tokens_BL[:, : int(end_B.max()) + 1]
        x_BLD = self.token_embedding(tokens_BL) + self.positional_embedding[: tokens_BL.shape[1]]
        x_BLD = self.ln_final(self.transformer(x_BLD, causal=True))
        x_BD = x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), end_B]
        embedding_BE: torch.Tensor = x_BD @ self.text_projection
        return embedding_BE


def load_tokenizer() -> Tokenize:
    """CLIP's tokenizer: a text to int64 ids [77], start and end tokens around it, zeros behind, cut to length."""
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer(context_length=CONTEXT_LENGTH)

    def tokenize(text: str) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = tokenizer([text])[0].numpy()
        return ids

    return tokenize
