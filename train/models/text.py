"""CLIP's text tower and its byte-pair tokenizer.

Shape suffixes: B batch, L tokens, M tokens of all captions, D width, E embedding width.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding

from clipmill.train.models.attention import Attend, pack
from clipmill.train.models.transformer import LayerNorm, Transformer, TransformerSize

VOCABULARY_SIZE = 49408
CONTEXT_LENGTH = 77
_MAX_WORDS = 100_000  # maximum number of words in the tokenizer's cache

Tokenize = Callable[[str], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class TextTowerSize:
    """Dimensions of a text tower; `trunk` is its transformer."""

    trunk: TransformerSize
    vocabulary_size: int = VOCABULARY_SIZE
    context_length: int = CONTEXT_LENGTH


class TextTower(nn.Module):
    """Causal text tower. The embedding is projected from the output at the end token, which has the largest ID.

    Args:
        size: Dimensions of the tower.
        embedding_width: Width E of the embedding.
        attend: Attention function.
        is_packed: True to concatenate captions without padding, which requires their lengths. Otherwise every caption
            is padded to the context length, so that all batches have the same shape.
    """

    def __init__(self, size: TextTowerSize, *, embedding_width: int, attend: Attend, is_packed: bool = True) -> None:
        super().__init__()
        width = size.trunk.width
        self.is_packed = is_packed
        self.token_embedding = nn.Embedding(size.vocabulary_size, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(size.context_length, width))
        self.transformer = Transformer(size.trunk, attend=attend)
        self.ln_final = LayerNorm(width, eps=size.trunk.norm_eps)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, embedding_width))
        nn.init.normal_(self.token_embedding.weight, std=0.02)

    def forward(self, tokens_BL: Tensor, lengths_B: NDArray[np.int64] | None = None) -> Tensor:
        """Embed int64 token IDs [B, L] as [B, E], without normalisation to unit length.

        Args:
            tokens_BL: Token IDs.
            lengths_B: Number of tokens of each caption, including the end token. Without the lengths, a packed tower
                has to synchronise with the device.
        """
        if not self.is_packed:
            x_BLD = self.token_embedding(tokens_BL) + self.positional_embedding[: tokens_BL.shape[1]]
            x_BLD = self.transformer(x_BLD, causal=True)
            ends_BD = x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), tokens_BL.argmax(dim=1)]
        else:
            ends_BD = self._packed_ends(tokens_BL, lengths_B)
        embedding_BE: Tensor = self.ln_final(ends_BD) @ self.text_projection
        return embedding_BE

    def _packed_ends(self, tokens_BL: Tensor, lengths_B: NDArray[np.int64] | None) -> Tensor:
        if lengths_B is None:
            lengths_B = (tokens_BL.argmax(dim=1) + 1).cpu().numpy()
        packing = pack(lengths_B.tolist(), device=tokens_BL.device)
        tokens_M = tokens_BL[packing.sequence_M, packing.position_M]
        # Use `embedding` instead of indexing: on a CPU, the backward pass of indexing (`index_put_` with `accumulate`)
        # adds float32 rows with atomic operations, whose order depends on the threads.
        positions_MD = embedding(packing.position_M, self.positional_embedding)
        x_1MD = (self.token_embedding(tokens_M) + positions_MD)[None]
        x_1MD = self.transformer(x_1MD, causal=True, packing=packing)
        return x_1MD[0].index_select(0, packing.end_N)


@cache
def load_tokenizer(context_length: int = CONTEXT_LENGTH) -> Tokenize:
    """Return CLIP's tokenizer. It converts a text to int64 token IDs [context_length], truncated or zero-padded.

    The IDs are the same as open_clip's, and include the start and end tokens. Loader threads call the tokenizer for
    every sample, and hold the interpreter lock meanwhile. Therefore the IDs of words are cached (tokens do not span
    white space), and plain texts skip open_clip's cleaning.
    """
    tokenizer = _open_clip_tokenizer_module().SimpleTokenizer(context_length=context_length)
    ids_of_word: dict[str, list[int]] = {}

    def ids_of(word: str) -> list[int]:
        ids = ids_of_word.get(word)
        if ids is None:
            tokens = (
                "".join(map(tokenizer.byte_encoder.__getitem__, part.encode())) for part in tokenizer.pat.findall(word)
            )
            ids = [tokenizer.encoder[part] for token in tokens for part in tokenizer.bpe(token).split(" ")]
            if len(ids_of_word) >= _MAX_WORDS:
                ids_of_word.clear()
            ids_of_word[word] = ids
        return ids

    def tokenize(text: str) -> NDArray[np.int64]:
        # In printable ASCII without HTML entities, cleaning changes only case and white space.
        is_plain = text.isascii() and text.isprintable() and "&" not in text
        clean_text = text.lower() if is_plain else tokenizer.clean_fn(text)
        ids = [tokenizer.sot_token_id, *chain.from_iterable(map(ids_of, clean_text.split()))][: context_length - 1]
        tokens = np.zeros(context_length, np.int64)
        tokens[: len(ids)] = ids
        tokens[len(ids)] = tokenizer.eot_token_id
        return tokens

    return tokenize


def _open_clip_tokenizer_module() -> Any:
    """Load the module open_clip.tokenizer without the rest of open_clip.

    The package's __init__ would import all models, timm, torchvision and transformers. These imports take 2 s, even if
    a run needs none of them.
    """
    if (loaded_module := sys.modules.get("open_clip.tokenizer")) is not None:
        return loaded_module
    package = find_spec("open_clip")
    assert package is not None and package.submodule_search_locations is not None, "open_clip is not installed"
    path = Path(package.submodule_search_locations[0]) / "tokenizer.py"
    spec = spec_from_file_location("open_clip.tokenizer", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
