"""Bank of the column `text`: a temporary store for the embeddings that a run writes to shards.

In this module, an embedding is either one vector (CLIP) or a sequence of vectors (T5); the rows of a text are its
vectors. The bank is the folder `<variant>/bank/`. It contains blocks: Arrow files with the digests and rows of texts. A
block is named after the hash of its content, so the next run can verify and reuse the blocks of a killed run, even if
it divides the texts differently. Embeddings in committed shards of the variant are copied to the bank, and workers
encode all other texts in blocks.
"""

import errno
import hashlib
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import publish_bytes, remove, remove_temporaries
from clipmill.manifests.storage.mirrors import refresh
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.engines import MachineFault
from clipmill.prep.text.captions import DIGEST_BYTES, DIGESTS, CaptionReader, digests_of, from_arrow, positions_in
from clipmill.prep.text.recipe import BLOCK_FILE, MEMBER, TextSettings
from clipmill.shards.npy import data_offset
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant

_BLOCK_BYTES = 1 << 25  # size at which a block of copied embeddings is written
MAX_BLOCK_TEXTS = 2048
_MAX_BLOCK_SEQUENCES = 64  # a block takes 268 MB if each sequence has 512 tokens and width 4096
_MAX_BLOCK_CHARS = 1 << 20  # limits the size of a task, because some texts may be very long


def write_block(folder: Path, digests: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> None:
    """Write a block to the bank.

    Args:
        folder: Folder of the bank.
        digests: Digests of the texts, DIGESTS [texts].
        rows: Rows of all texts, float16 [sum of lengths, width].
        lengths: Number of rows of each text, [texts].
    """
    ends = np.concatenate([[0], np.cumsum(lengths)]) * rows.shape[1] * rows.itemsize
    buffers = [None, pa.py_buffer(ends.astype(np.int64).tobytes()), pa.py_buffer(np.ascontiguousarray(rows).tobytes())]
    digest_buffers = [None, pa.py_buffer(np.ascontiguousarray(digests).tobytes())]
    columns = [
        pa.Array.from_buffers(pa.binary(DIGEST_BYTES), len(digests), digest_buffers),
        pa.Array.from_buffers(pa.large_binary(), len(digests), buffers),
    ]
    table = pa.table(columns, names=["digest", "row"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    folder.mkdir(exist_ok=True)
    publish_bytes(folder / f"{hashlib.sha256(content).hexdigest()[:32]}.arrow", content)


class Bank:
    """Bank of a variant, which the parts of a run (`--part`) share.

    Opening or refreshing the bank removes damaged blocks.

    Args:
        folder: Folder of the bank, which may not exist yet.
        width: Embedding dimension.
        is_only_writer: True if no other process is writing to the bank, so that temporary files can be removed.
    """

    def __init__(self, folder: Path, *, width: int, is_only_writer: bool = True) -> None:
        self.folder, self._width = folder, width
        self._files: list[Path] = []
        self._starts = [0]  # index of each block's first digest in `_digests`
        self._digests = np.empty(0, DIGESTS)
        self._order = np.empty(0, np.int32)  # indices that sort `_digests`
        if is_only_writer:
            remove_temporaries(self.folder)  # files that killed writers left
        self.refresh()

    def add_nan_rows(self, digests: Collection[bytes]) -> None:
        """Add a NaN row for each text without a finite embedding, so that other parts do not count it as missing."""
        digest_array = np.frombuffer(b"".join(sorted(digests)), DIGESTS)
        rows = np.full((len(digest_array), self._width), np.nan, np.float16)
        write_block(self.folder, digest_array, rows, np.ones(len(digest_array)))

    def refresh(self) -> None:
        """Read the blocks that were published since the last call."""
        refresh(self.folder)
        known_names = {path.name for path in self._files}
        new_digests = []
        for path in sorted(self.folder.glob("*.arrow")):
            if path.name in known_names or not BLOCK_FILE.fullmatch(path.name):
                continue
            if not is_intact_block(path):
                remove(path)
                continue
            with map_arrow_file(path) as file:
                new_digests.append(from_arrow(pa.ipc.open_file(file).read_all()["digest"].combine_chunks()).copy())
            self._files.append(path)
            self._starts.append(self._starts[-1] + len(new_digests[-1]))
        if new_digests:
            self._digests = np.concatenate([self._digests, *new_digests])
            new_digests.clear()
            self._order = np.argsort(self._digests).astype(np.int32)

    def has(self, digests: np.ndarray) -> np.ndarray:
        """Return True for each digest in `digests`, DIGESTS [texts], that the bank contains; bool [texts]."""
        return positions_in(self._digests, digests, order=self._order) >= 0

    def find_missing(self, digests: np.ndarray) -> np.ndarray:
        """Return the `digests`, DIGESTS [texts], that the bank lacks."""
        return np.asarray(digests[~self.has(digests)])

    def rows(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of texts.

        Args:
            digests: Digests of the texts, DIGESTS [texts].

        Returns:
            Rows, float16 [sum of lengths, width], and the number of rows of each text, int64 [texts]; 0 if the bank
            lacks the text.
        """
        positions = positions_in(self._digests, digests, order=self._order)
        lengths = np.zeros(len(digests), np.int64)
        stored_texts = np.flatnonzero(positions >= 0)
        blocks = np.searchsorted(self._starts, positions[stored_texts], side="right") - 1
        parts = []
        for block in np.unique(blocks).tolist():
            in_block = stored_texts[blocks == block]
            values, lengths[in_block] = self._read(self._files[block], positions[in_block] - self._starts[block])
            parts.append((in_block, values))
        # The rows were read block by block; arrange them in the order of `digests`.
        vectors = np.empty((int(lengths.sum()), self._width), np.float16)
        starts = np.cumsum(lengths) - lengths
        for in_block, values in parts:
            part_lengths = lengths[in_block]
            row_in_text = np.arange(len(values)) - np.repeat(np.cumsum(part_lengths) - part_lengths, part_lengths)
            vectors[np.repeat(starts[in_block], part_lengths) + row_in_text] = values
        return vectors, lengths

    def remove(self) -> None:
        """Remove the bank. Its rows must be in committed shards or no longer needed."""
        if not self.folder.is_dir():
            return
        remove_temporaries(self.folder)
        for path in self.folder.iterdir():
            if BLOCK_FILE.fullmatch(path.name):
                remove(path)
        with suppress(OSError):  # the folder may contain files of other programs
            self.folder.rmdir()

    def _read(self, path: Path, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the texts at `indices` in a block, and the number of rows of each text."""
        with map_arrow_file(path) as file:
            selection = pa.ipc.open_file(file).read_all()["row"].combine_chunks().take(pa.array(indices))
            _, offsets, values = selection.buffers()
            ends = np.frombuffer(offsets, np.int64)[selection.offset : selection.offset + len(selection) + 1]
            vectors = np.frombuffer(values, np.uint8)[ends[0] : ends[-1]].view(np.float16).reshape(-1, self._width)
            return vectors, np.diff(ends) // (self._width * vectors.itemsize)


def is_intact_block(path: Path) -> bool:
    """Return True if the content of a block matches the hash in the file name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32] == path.stem


def copy_embeddings(variant_dir: Path, *, missing_digests: np.ndarray, bank_dir: Path, width: int) -> int:
    """Copy embeddings from committed shards to the bank.

    Damaged members and shards are skipped. Their texts are encoded again.

    Args:
        missing_digests: Digests of the texts whose embeddings are to be copied, in ascending order, DIGESTS [texts].
        bank_dir: Folder of the bank.
        width: Embedding dimension.

    Returns:
        Number of texts whose embeddings were copied.
    """
    is_missing = np.ones(len(missing_digests), bool)
    digests: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    num_bytes = 0

    def flush() -> None:
        if digests:
            write_block(bank_dir, np.concatenate(digests), np.concatenate(rows), np.concatenate(lengths))
            for parts in (digests, rows, lengths):
                parts.clear()

    for shard in Variant(variant_dir).shards():
        try:
            for sample in _missing_rows(shard, missing_digests=missing_digests, is_missing=is_missing, width=width):
                sample_digests, vectors, sample_lengths = sample
                digests.append(sample_digests)
                rows.append(vectors)
                lengths.append(sample_lengths)
                num_bytes += vectors.nbytes
                if num_bytes >= _BLOCK_BYTES:
                    flush()
                    num_bytes = 0
        except (Damaged, pa.ArrowException, OSError, KeyError):
            continue
    flush()
    return int(np.count_nonzero(~is_missing))


def _missing_rows(
    shard: CommittedShard, *, missing_digests: np.ndarray, is_missing: np.ndarray, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield digests, rows and lengths of missing texts, sample by sample; set `is_missing` of these texts to False."""
    column = shard.index["text_digest"].combine_chunks()
    offsets, stored_digests = column.offsets.to_numpy(), from_arrow(column.values)
    positions = positions_in(missing_digests, stored_digests)
    is_needed = positions >= 0
    is_needed[is_needed] = is_missing[positions[is_needed]]
    samples = np.unique(np.searchsorted(offsets, np.flatnonzero(is_needed), side="right") - 1)
    checksums = shard.index[f"{MEMBER}_crc32"]
    for sample in samples.tolist():
        payload = shard.read(sample, MEMBER)
        if zlib.crc32(payload) != checksums[sample].as_py():
            continue
        start, end = int(offsets[sample]), int(offsets[sample + 1])
        lengths = np.array(shard.index["row_tokens"][sample].as_py() or np.ones(end - start), np.int64)
        vectors = np.frombuffer(payload, np.float16, offset=data_offset(payload)).reshape(-1, width)
        # A text may have been copied from a different sample already.
        sample_positions = positions[start:end]
        is_selected = (sample_positions >= 0) & is_missing[sample_positions]
        if is_selected.any():
            is_missing[sample_positions[is_selected]] = False
            yield (
                stored_digests[start:end][is_selected].astype(DIGESTS),
                vectors[np.repeat(is_selected, lengths)],
                lengths[is_selected],
            )


@dataclass(frozen=True)
class TextEncoderOptions:
    """Text encoder that workers load, with its options.

    Attributes:
        recipe: Recipe of the plan.
        batch: Batch size in texts.
        device: cuda or cpu.
    """

    recipe: Recipe[TextSettings]
    batch: int
    device: str


@dataclass(frozen=True)
class Block:
    """Texts to encode into the bank; `index` is the index of the block in the run."""

    bank_dir: Path
    encoder: TextEncoderOptions
    texts: tuple[str, ...]
    index: int = 0


@dataclass(frozen=True)
class BlockResult:
    """Result of encoding a block.

    Attributes:
        num_encoded: Number of encoded texts.
        num_cut: Number of encoded texts that were truncated to the maximum length of the encoder.
        not_finite: Digests of texts whose embeddings contain NaN or infinity and are therefore not in the bank.
        stop: Failure code and reason if the block could not be encoded or written; otherwise None.
    """

    num_encoded: int = 0
    num_cut: int = 0
    not_finite: tuple[bytes, ...] = ()
    stop: tuple[FailureCode, str] | None = None

    @property
    def machine_fault(self) -> MachineFault | None:
        """Failure that the worker's machine may have caused, or None."""
        return None if self.stop is None else MachineFault(f"{self.stop[0]}: {self.stop[1]}")


def encode_block(block: Block) -> BlockResult:
    """Encode the texts of a block, and write the finite embeddings to the bank."""
    from clipmill.prep.text import t5, tower

    options, settings = block.encoder, block.encoder.recipe.settings
    sha256 = options.recipe.values["encoder_sha256"]
    if options.device == "cpu":
        tower.use_threads(1)  # there is one worker per core
    try:
        if settings.clip is None:
            encoder: t5.T5Encoder | tower.Tower = t5.load_t5(settings, sha256=sha256, device=options.device)
        else:
            encoder = tower.load_tower(settings.clip, sha256=sha256, device=options.device)
        encoded = encoder.encode(block.texts, batch=options.batch)
        digests, is_finite = digests_of(block.texts), encoded.is_finite
        if is_finite.any():
            rows = encoded.rows[np.repeat(is_finite, encoded.lengths)]
            write_block(block.bank_dir, digests[is_finite], rows, encoded.lengths[is_finite])
    except MemoryError as error:
        return BlockResult(stop=(FailureCode.OUT_OF_MEMORY, str(error) or "the worker is out of memory"))
    except OSError as error:
        code = FailureCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureCode.IO_ERROR
        return BlockResult(stop=(code, f"{error.strerror or error}: {error.filename or block.bank_dir}"))
    not_finite = tuple(digests[row : row + 1].tobytes() for row in np.flatnonzero(~is_finite))
    return BlockResult(len(block.texts), encoded.num_cut, not_finite)


def blocks_of(
    reader: CaptionReader,
    video_ids: pa.Array,
    *,
    missing_digests: np.ndarray,
    bank_dir: Path,
    encoder: TextEncoderOptions,
) -> Iterator[Block]:
    """Divide the texts to encode into blocks. Each text is in exactly one block.

    Args:
        video_ids: IDs of the videos whose captions contain the texts.
        missing_digests: Digests of the texts to encode, in ascending order, DIGESTS [texts].
    """
    is_pending = np.ones(len(missing_digests), bool)
    max_texts = MAX_BLOCK_TEXTS if encoder.recipe.settings.encoder is None else _MAX_BLOCK_SEQUENCES
    texts: list[str] = []
    num_chars = num_blocks = 0
    for caption_batch in reader.batches(video_ids):
        batch_texts = caption_batch.texts.to_pylist()
        positions = positions_in(missing_digests, digests_of(batch_texts))
        for text, position in zip(batch_texts, positions.tolist(), strict=True):
            if position < 0 or not is_pending[position]:
                continue
            is_pending[position] = False
            texts.append(text)
            num_chars += len(text)
            if len(texts) == max_texts or num_chars >= _MAX_BLOCK_CHARS:
                yield Block(bank_dir, encoder, tuple(texts), num_blocks)
                texts, num_chars, num_blocks = [], 0, num_blocks + 1
    if texts:
        yield Block(bank_dir, encoder, tuple(texts), num_blocks)
