"""Encoding texts in blocks: the task of a worker, and the division of texts without an embedding into blocks."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.prep.core.failures import FailureCode
from clipmill.prep.text.bank import write_block
from clipmill.prep.text.captions import CaptionReader
from clipmill.prep.text.digests import digests_of, positions_in
from clipmill.prep.text.recipe import TextRecipe

MAX_BLOCK_TEXTS = 2048
_MAX_BLOCK_SEQUENCES = 64  # of 512 tokens of width 4096: 268 MB
_MAX_BLOCK_CHARS = 1 << 20  # limits what is sent to a worker, since some texts may be very long


@dataclass(frozen=True)
class TowerUse:
    """Which text tower the workers load, and how they use it.

    Attributes:
        recipe: as given by the user; a weights file is given by its path.
        sha256: hash of the weights used by the plan.
        batch: batch size in texts.
        device: cuda or cpu.
    """

    recipe: TextRecipe
    sha256: str
    batch: int
    device: str


@dataclass(frozen=True)
class Block:
    """Texts to encode into the bank; `number` is its position among the blocks of a run."""

    bank_dir: Path
    tower: TowerUse
    texts: tuple[str, ...]
    number: int = 0


@dataclass(frozen=True)
class BlockResult:
    """Result of encoding a block.

    Attributes:
        num_encoded: number of texts encoded.
        num_cut: number of these longer than the tower's context length.
        not_finite: digests of texts whose embedding contains NaN or infinity; they are not in the bank.
        stopped: (code, reason) why nothing was stored, or None.
    """

    num_encoded: int = 0
    num_cut: int = 0
    not_finite: tuple[bytes, ...] = ()
    stopped: tuple[FailureCode, str] | None = None


def encode_block(block: Block) -> BlockResult:
    """Encode the texts of a block and publish their embeddings in the bank."""
    from clipmill.prep.text import t5, tower

    use = block.tower
    if use.device == "cpu":
        tower.use_threads(1)  # there is one worker per core
    try:
        if use.recipe.clip is None:
            encoded = t5.load_t5(use.recipe, sha256=use.sha256, device=use.device).encode(block.texts, batch=use.batch)
        else:
            loaded = tower.load_tower(use.recipe.clip, sha256=use.sha256, device=use.device)
            encoded = loaded.encode(block.texts, batch=use.batch)
        digests, is_finite = digests_of(block.texts), encoded.is_finite
        if is_finite.any():
            rows = encoded.rows[np.repeat(is_finite, encoded.lengths)]
            write_block(block.bank_dir, digests[is_finite], rows, encoded.lengths[is_finite])
    except MemoryError as error:
        return BlockResult(stopped=(FailureCode.OUT_OF_MEMORY, str(error) or "the worker is out of memory"))
    except OSError as error:
        code = FailureCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureCode.IO_ERROR
        return BlockResult(stopped=(code, f"{error.strerror or error}: {error.filename or block.bank_dir}"))
    not_finite = tuple(digests[row : row + 1].tobytes() for row in np.flatnonzero(~is_finite))
    return BlockResult(len(block.texts), encoded.num_cut, not_finite)


def blocks_of(
    reader: CaptionReader, video_ids: pa.Array, *, missing: np.ndarray, bank_dir: Path, tower: TowerUse
) -> Iterator[Block]:
    """Yield blocks with the captions of `video_ids` whose digests are `missing` (ascending), each text exactly once."""
    is_waiting = np.ones(len(missing), bool)
    max_texts = MAX_BLOCK_TEXTS if tower.recipe.encoder is None else _MAX_BLOCK_SEQUENCES
    texts: list[str] = []
    num_chars = num_blocks = 0
    for piece in reader.pieces(video_ids):
        found = piece.texts.to_pylist()
        positions = positions_in(missing, digests_of(found))
        for text, position in zip(found, positions.tolist(), strict=True):
            if position < 0 or not is_waiting[position]:
                continue
            is_waiting[position] = False
            texts.append(text)
            num_chars += len(text)
            if len(texts) == max_texts or num_chars >= _MAX_BLOCK_CHARS:
                yield Block(bank_dir, tower, tuple(texts), num_blocks)
                texts, num_chars, num_blocks = [], 0, num_blocks + 1
    if texts:
        yield Block(bank_dir, tower, tuple(texts), num_blocks)
