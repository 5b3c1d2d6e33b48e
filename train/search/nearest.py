"""Exact nearest neighbours by blocks: a file of any size is read once, through a buffer of a few megabytes.

Shape suffixes: Q queries, N rows of the file, R rows of a block, E width, K found.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError

# Read in one piece and scored while it is still in the processor's cache.
_BLOCK_BYTES = 1 << 22
_MAX_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class Nearest:
    """The best rows of each query, best first; rows of equal scores are in ascending order.

    Attributes:
        row_QK: int64.
        score_QK: float32, cosine similarity.
    """

    row_QK: NDArray[np.int64]
    score_QK: NDArray[np.float32]


def nearest(
    path: Path,
    query_QE: NDArray[np.float32],
    *,
    count: int,
    is_unit_length: bool = True,
    say_done: Callable[[int], object] = lambda num_rows: None,
) -> Nearest:
    """The `count` rows of an npy file (float32 [N, E]) that are most similar to each query of unit length.

    Args:
        is_unit_length: False if the rows of the file have other lengths; they are then divided by them.
        say_done: called with the number of rows after each block.

    Raises:
        UserError: the file is damaged, or its rows are not as wide as the queries.
    """
    num_queries = len(query_QE)
    row_QK = np.empty((num_queries, 0), np.int64)
    score_QK = np.empty((num_queries, 0), np.float32)
    for begin, block_RE in blocks(path, width=query_QE.shape[1]):
        score_QR = query_QE @ block_RE.T
        if not is_unit_length:
            length_R = np.sqrt(np.einsum("re,re->r", block_RE, block_RE))
            score_QR /= np.maximum(length_R, np.finfo(np.float32).tiny)
        row_QK, score_QK = _merged(row_QK, score_QK, begin, score_QR, count=count)
        say_done(len(block_RE))
    return Nearest(row_QK, score_QK)


def blocks(path: Path, *, width: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, rows [R, E]) of an npy file; a block is valid until the next one is requested.

    Read, not mapped: mapped pages would count as memory of the process, and a file that is cut short would kill it.

    Raises:
        UserError: see `nearest`.
    """
    mapped = open_matrix(path)
    num_rows, its_width = mapped.shape
    if its_width != width:
        raise UserError(
            f"{path} has vectors of width {its_width}, and the queries are of width {width}",
            hint="search with the weights that made the embeddings",
        )
    offset: int = mapped.offset  # type: ignore[attr-defined]  # of np.memmap
    del mapped
    block_rows = min(_MAX_BLOCK_ROWS, max(1, _BLOCK_BYTES // (4 * width)))
    buffer = np.empty((block_rows, width), np.float32)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for begin in range(0, num_rows, block_rows):
            block = buffer[: num_rows - begin]
            _fill(file.readinto, block.data.cast("B"), path=path)
            yield begin, block


def open_matrix(path: Path) -> NDArray[np.float32]:
    """Map an npy file of float32 rows; UserError if it is missing, cut short or of another kind."""
    try:
        mapped: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint="run train embed again, with another --out") from error
    if (
        mapped.dtype != np.float32
        or mapped.ndim != 2
        or not mapped.flags.c_contiguous
        or not isinstance(mapped, np.memmap)
    ):
        raise UserError(
            f"{path} is not float32 [N, E] but {mapped.dtype} {list(mapped.shape)}",
            hint="run train embed again, with another --out",
        )
    return mapped


def _fill(read_into: Callable[[memoryview], int | None], view: memoryview, *, path: Path) -> None:
    filled = 0
    while filled < len(view):
        count = read_into(view[filled:])
        if not count:
            raise UserError(f"{path} ends too early", hint="run train embed again, with another --out")
        filled += count


def _merged(
    row_QK: NDArray[np.int64],
    score_QK: NDArray[np.float32],
    begin: int,
    score_QR: NDArray[np.float32],
    *,
    count: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The best of what was found before and of a block."""
    if score_QK.shape[1] == count and not (score_QR > score_QK[:, -1:]).any():
        return row_QK, score_QK
    rows, scores = [], []
    for before_K, best_K, score_R in zip(row_QK, score_QK, score_QR, strict=True):
        # An equal score in a later row ranks lower, so a row has to score higher than the last one.
        found = np.flatnonzero(score_R > best_K[-1]) if len(best_K) == count else np.arange(len(score_R))
        if len(found) > count:
            least = np.partition(score_R[found], -count)[-count]
            found = found[score_R[found] >= least]
        row = np.concatenate([before_K, begin + found])
        score = np.concatenate([best_K, score_R[found]])
        order = np.lexsort((row, -score))[:count]
        rows.append(row[order])
        scores.append(score[order])
    return np.stack(rows), np.stack(scores)
