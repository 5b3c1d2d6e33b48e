"""Exact nearest-neighbour search in an npy file. The file is read once, in blocks of a few megabytes per thread.

Shape suffixes: Q queries, N rows of the file, R rows of a block, E width, K best rows.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import report_lost_pages

# Size of a block of rows: small enough to stay in the CPU cache while it is scored.
_BLOCK_BYTES = 1 << 22
_MAX_BLOCK_ROWS = 1 << 16
_MAX_THREADS = 16
_NEW_FOLDER_HINT = "run train embed again, with a different --out"


@dataclass(frozen=True)
class NearestRows:
    """The most similar rows for each query, by descending score; rows with equal scores are in ascending order.

    Attributes:
        row_QK: Row indices, int64.
        score_QK: Cosine similarities, float32.
    """

    row_QK: NDArray[np.int64]
    score_QK: NDArray[np.float32]


def find_nearest(
    path: Path,
    query_QE: NDArray[np.float32],
    *,
    count: int,
    is_unit_length: bool = True,
    on_progress: Callable[[int], object] = lambda num_rows: None,
) -> NearestRows:
    """Find the `count` rows of an npy file (float32 [N, E]) that are most similar to each unit-length query.

    Args:
        is_unit_length: True if the rows are unit vectors; otherwise each score is divided by the length of its row.
        on_progress: Function that several threads call with the number of rows of each finished block.

    Raises:
        UserError: The file is damaged, or its rows are not as wide as the queries.
    """
    num_rows, offset = _header(path, width=query_QE.shape[1])
    block_rows = min(_MAX_BLOCK_ROWS, max(1, _BLOCK_BYTES // (4 * query_QE.shape[1])))
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), -(-num_rows // block_rows))
    rows_per_thread = -(-num_rows // (num_threads * block_rows)) * block_rows

    def search_part(begin: int) -> NearestRows:
        best_rows = NearestRows(np.empty((len(query_QE), 0), np.int64), np.empty((len(query_QE), 0), np.float32))
        rows = range(begin, min(begin + rows_per_thread, num_rows))
        for first, block_RE in _blocks(path, rows, offset=offset, block_rows=block_rows, width=query_QE.shape[1]):
            # A matrix product would be slower: BLAS starts threads for each block, and the threads wait for each other.
            score_QR: NDArray[np.float32] = np.vecdot(query_QE[:, None], block_RE)
            if not is_unit_length:
                length_R = np.sqrt(np.vecdot(block_RE, block_RE))
                score_QR /= np.maximum(length_R, np.finfo(np.float32).tiny)
            if not np.isfinite(score_QR).all():
                row = first + int(np.flatnonzero(~np.isfinite(score_QR).all(axis=0))[0])
                raise UserError(f"row {row} of {path} is not finite: the file is damaged", hint=_NEW_FOLDER_HINT)
            best_rows = _merge_block(best_rows, first, score_QR, count=count)
            on_progress(len(block_RE))
        return best_rows

    with ThreadPoolExecutor(num_threads) as threads:
        parts = list(threads.map(search_part, range(0, num_rows, rows_per_thread)))
    row_QK = np.concatenate([part.row_QK for part in parts], axis=1)
    score_QK = np.concatenate([part.score_QK for part in parts], axis=1)
    best_QK = np.lexsort((row_QK, -score_QK), axis=1)[:, :count]
    return NearestRows(np.take_along_axis(row_QK, best_QK, axis=1), np.take_along_axis(score_QK, best_QK, axis=1))


def _blocks(
    path: Path, rows: range, *, offset: int, block_rows: int, width: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, rows [R, E]) for each block of an npy file. A block is valid until the next one is requested.

    The file is read instead of mapped, because mapped pages count as memory of the process, and a file that is
    truncated while mapped would kill the process.
    """
    buffer = np.empty((block_rows, width), np.float32)
    with path.open("rb", buffering=0) as file:
        file.seek(offset + 4 * width * rows.start)
        for begin in rows[::block_rows]:
            block = buffer[: rows.stop - begin]
            view, num_filled = block.data.cast("B"), 0
            while num_filled < len(view):
                count = file.readinto(view[num_filled:])
                if not count:
                    raise UserError(f"{path} is truncated", hint=_NEW_FOLDER_HINT)
                num_filled += count
            yield begin, block


def _header(path: Path, *, width: int) -> tuple[int, int]:
    """Return the number of rows in an npy file, and the byte offset of its first row."""
    matrix = open_matrix(path)
    num_rows, file_width = matrix.shape
    if file_width != width:
        raise UserError(
            f"{path} has vectors of width {file_width}, but the queries have width {width}",
            hint="use the weights that computed the embeddings",
        )
    return num_rows, matrix.offset  # type: ignore[attr-defined]  # attribute of np.memmap


def open_matrix(path: Path) -> NDArray[np.float32]:
    """Map an npy file with a float32 matrix. Raise a UserError if it is missing, truncated or has other content."""
    report_lost_pages()
    try:
        matrix: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint=_NEW_FOLDER_HINT) from error
    if (
        matrix.dtype != np.float32
        or matrix.ndim != 2
        or not matrix.flags.c_contiguous
        or not isinstance(matrix, np.memmap)
    ):
        raise UserError(
            f"{path} is not float32 [N, E], but {matrix.dtype} {list(matrix.shape)}",
            hint=_NEW_FOLDER_HINT,
        )
    return matrix


def _merge_block(best_rows: NearestRows, first_row: int, score_QR: NDArray[np.float32], *, count: int) -> NearestRows:
    """Return the best rows of the earlier blocks and of the next block, which starts at row `first_row`."""
    if best_rows.score_QK.shape[1] == count and not (score_QR > best_rows.score_QK[:, -1:]).any():
        return best_rows
    rows, scores = [], []
    for best_row_K, best_K, score_R in zip(best_rows.row_QK, best_rows.score_QK, score_QR, strict=True):
        # Later rows rank below earlier rows with the same score, so a new row must beat the worst of the best rows.
        new_rows = np.flatnonzero(score_R > best_K[-1]) if len(best_K) == count else np.arange(len(score_R))
        if len(new_rows) > count:
            threshold = np.partition(score_R[new_rows], -count)[-count]
            new_rows = new_rows[score_R[new_rows] >= threshold]
        row = np.concatenate([best_row_K, first_row + new_rows])
        score = np.concatenate([best_K, score_R[new_rows]])
        order = np.lexsort((row, -score))[:count]
        rows.append(row[order])
        scores.append(score[order])
    return NearestRows(np.stack(rows), np.stack(scores))
