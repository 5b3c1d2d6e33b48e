"""The bank: embeddings that are made but not in their shard yet.

It lies in `<variant>/bank/` while a run lasts. A block is an Arrow file of digests and rows that is named after its own
content, so that a killed run's blocks are known to be whole and serve the next run, however that run divides its work.
"""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from manifests.publish import TEMPORARY_PREFIX, publish_bytes
from prep.text.digests import DIGEST_BYTES, DIGESTS, from_arrow, places_in

BANK_FOLDER = "bank"
BLOCK_FILE = re.compile(r"[0-9a-f]{32}\.arrow")


def write_block(folder: Path, digests: np.ndarray, rows: np.ndarray) -> None:
    """Publishes one block.

    Args:
        folder: the bank's.
        digests: of the texts, DIGESTS [texts].
        rows: float16 [texts, width].
    """
    row_bytes = rows.shape[1] * rows.itemsize
    columns = [_fixed(digests, size=DIGEST_BYTES), _fixed(rows, size=row_bytes)]
    table = pa.table(columns, names=["digest", "row"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    publish_bytes(folder / _name(content), content)


class Bank:
    """What the bank holds; one run at a time has it. Blocks that are damaged are removed when they are found.

    Args:
        folder: the bank's; it may not be there.
        width: of an embedding.
    """

    def __init__(self, folder: Path, *, width: int) -> None:
        self.folder, self._width = folder, width
        self._files: list[Path] = []
        self._known: set[str] = set()
        self.digests = np.empty(0, DIGESTS)  # ascending, each once
        self._block = np.empty(0, np.int32)
        self._row = np.empty(0, np.int32)
        for path in self.folder.glob(f"{TEMPORARY_PREFIX}*"):  # of killed writers
            path.unlink()
        self.look_again()

    def look_again(self) -> None:
        """Takes in the blocks that were published meanwhile."""
        digests, blocks, rows = [self.digests], [self._block], [self._row]
        for path in sorted(self.folder.glob("*.arrow")) if self.folder.is_dir() else []:
            if path.name in self._known or not BLOCK_FILE.fullmatch(path.name):
                continue
            with path.open("rb") as file:
                is_whole = hashlib.file_digest(file, "sha256").hexdigest()[:32] == path.stem
            if not is_whole:
                path.unlink()
                continue
            self._known.add(path.name)
            with pa.memory_map(str(path)) as file:
                found = from_arrow(pa.ipc.open_file(file).read_all()["digest"].combine_chunks()).copy()
            digests.append(found)
            blocks.append(np.full(len(found), len(self._files), np.int32))
            rows.append(np.arange(len(found), dtype=np.int32))
            self._files.append(path)
        self.digests, first = np.unique(np.concatenate(digests), return_index=True)
        self._block, self._row = np.concatenate(blocks)[first], np.concatenate(rows)[first]

    def rows(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings of texts.

        Args:
            digests: DIGESTS [texts].

        Returns:
            float16 [texts, width], and whether the bank has each, bool [texts].
        """
        places = places_in(self.digests, digests)
        embedded = np.zeros((len(digests), self._width), np.float16)
        has = places >= 0
        wanted = np.flatnonzero(has)
        blocks, in_block = self._block[places[wanted]], self._row[places[wanted]]
        for block in np.unique(blocks).tolist():
            is_here = blocks == block
            embedded[wanted[is_here]] = self._read(self._files[block], in_block[is_here])
        return embedded, has

    def remove(self) -> None:
        """Removes the bank: its rows are in committed shards, or nobody wants them."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)

    def _read(self, path: Path, rows: np.ndarray) -> np.ndarray:
        with pa.memory_map(str(path)) as file:
            column = pa.ipc.open_file(file).read_all()["row"].combine_chunks()
            stored = np.frombuffer(column.buffers()[1], np.float16).reshape(-1, self._width)
            return np.asarray(stored[rows])


def _fixed(array: np.ndarray, *, size: int) -> pa.Array:
    buffer = pa.py_buffer(np.ascontiguousarray(array).tobytes())
    return pa.Array.from_buffers(pa.binary(size), len(array), [None, buffer])


def _name(content: pa.Buffer) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:32]}.arrow"
