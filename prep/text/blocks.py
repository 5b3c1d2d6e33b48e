"""Encoding: what a worker does with a block of texts, and how the texts that have no embedding yet become blocks."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from prep.core.failures import FailureCode
from prep.text.bank import write_block
from prep.text.captions import CaptionReader
from prep.text.digests import digests_of, places_in

MAX_BLOCK_TEXTS = 2048
_MAX_BLOCK_CHARS = 1 << 20  # texts travel to the workers; a few may be very long


@dataclass(frozen=True)
class TowerUse:
    """Which tower the workers load, and how they use it.

    Attributes:
        clip: as the user named it: a file by its path.
        clip_sha256: of the weights that the plan was made with.
        batch: texts computed at a time.
        device: cuda or cpu.
    """

    clip: str
    clip_sha256: str
    batch: int
    device: str


@dataclass(frozen=True)
class Block:
    """Some texts to be encoded into the bank."""

    bank_dir: Path
    tower: TowerUse
    texts: tuple[str, ...]


@dataclass(frozen=True)
class BlockResult:
    """What became of a block.

    Attributes:
        num_encoded: texts that went through the tower.
        num_cut: of these, longer than its context.
        not_finite: digests of those whose embedding is NaN or infinite; they are not in the bank.
        stopped: code and reason why nothing was stored, or None.
    """

    num_encoded: int = 0
    num_cut: int = 0
    not_finite: tuple[bytes, ...] = ()
    stopped: tuple[FailureCode, str] | None = None


def encode_block(block: Block) -> BlockResult:
    """Encodes the texts of a block and publishes their embeddings in the bank."""
    from prep.text import tower

    use = block.tower
    if use.device == "cpu":
        tower.use_threads(1)  # workers are as many as the cores
    try:
        loaded = tower.load_tower(use.clip, sha256=use.clip_sha256, device=use.device)
        encoded = loaded.encode(block.texts, batch=use.batch)
        digests = digests_of(block.texts)
        if encoded.is_finite.any():
            write_block(block.bank_dir, digests[encoded.is_finite], encoded.rows[encoded.is_finite])
    except MemoryError as error:
        return BlockResult(stopped=(FailureCode.OUT_OF_MEMORY, str(error) or "the worker has no memory left"))
    except OSError as error:
        code = FailureCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureCode.IO_ERROR
        return BlockResult(stopped=(code, f"{error.strerror or error}: {error.filename or block.bank_dir}"))
    not_finite = tuple(digests[row : row + 1].tobytes() for row in np.flatnonzero(~encoded.is_finite))
    return BlockResult(len(block.texts), encoded.num_cut, not_finite)


def blocks_of(
    reader: CaptionReader, video_ids: pa.Array, *, missing: np.ndarray, bank_dir: Path, tower: TowerUse
) -> Iterator[Block]:
    """The texts among the captions of `video_ids` whose digests are `missing` (ascending), each in one block."""
    is_waiting = np.ones(len(missing), bool)
    texts: list[str] = []
    num_chars = 0
    for piece in reader.pieces(video_ids):
        found = piece.texts.to_pylist()
        places = places_in(missing, digests_of(found))
        for text, place in zip(found, places.tolist(), strict=True):
            if place < 0 or not is_waiting[place]:
                continue
            is_waiting[place] = False
            texts.append(text)
            num_chars += len(text)
            if len(texts) == MAX_BLOCK_TEXTS or num_chars >= _MAX_BLOCK_CHARS:
                yield Block(bank_dir, tower, tuple(texts))
                texts, num_chars = [], 0
    if texts:
        yield Block(bank_dir, tower, tuple(texts))
