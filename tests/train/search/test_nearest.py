"""Exact search by blocks: it returns the result of sorting all similarities, in bounded memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.search import nearest as module
from clipmill.train.search.nearest import find_nearest


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def write_rows(path: Path, rows: np.ndarray) -> Path:
    np.save(path, rows)
    return path


@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("block_rows", [1, 13, 4096])
def test_the_best_rows_are_those_of_a_full_sort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int, block_rows: int
) -> None:
    monkeypatch.setattr(module, "_MAX_BLOCK_ROWS", block_rows)
    rng = np.random.default_rng(num_rows)
    # Values are small integers, so many similarities are equal and exact. Rows decide the order of ties.
    rows = rng.integers(-2, 3, (num_rows, 8)).astype(np.float32)
    queries = rng.integers(-2, 3, (5, 8)).astype(np.float32)
    hits = find_nearest(write_rows(tmp_path / "rows.npy", rows), queries, count=10)
    expected = np.argsort(-(queries @ rows.T), axis=1, kind="stable")[:, :10]
    assert np.array_equal(hits.row_QK, expected)
    assert np.array_equal(hits.score_QK, np.take_along_axis(queries @ rows.T, expected, axis=1))


def test_rows_of_any_length_are_compared_by_cosine(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((200, 16)).astype(np.float32) * rng.uniform(0.01, 100, (200, 1)).astype(np.float32)
    queries = unit(rng.standard_normal((3, 16)))
    hits = find_nearest(write_rows(tmp_path / "rows.npy", rows), queries, count=20, is_unit_length=False)
    similarity = queries @ unit(rows).T
    best = -np.sort(-similarity, axis=1)[:, :20]
    np.testing.assert_allclose(np.take_along_axis(similarity, hits.row_QK, axis=1), best, rtol=1e-5)
    np.testing.assert_allclose(hits.score_QK, best, rtol=1e-5)


def test_memory_is_that_of_a_block_whatever_the_file(tmp_path: Path) -> None:
    path, width = tmp_path / "rows.npy", 64
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(300_000, width))
    rows[:] = np.random.default_rng(0).standard_normal((1, width), dtype=np.float32)
    rows.flush()
    del rows
    query = np.ones((1, width), np.float32)
    tracemalloc.start()
    hits = find_nearest(path, query, count=5)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert hits.row_QK.tolist() == [[0, 1, 2, 3, 4]]
    assert peak_bytes < 12 << 20 < path.stat().st_size


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((4, 8), np.float32), "the queries have width 4"),
        (np.zeros((4, 4), np.float64), "not float32"),
        (np.zeros((4, 3, 4), np.float32), "not float32"),
        (np.asfortranarray(np.zeros((4, 4), np.float32)), "not float32"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, rows: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_nearest(write_rows(tmp_path / "rows.npy", rows), np.ones((1, 4), np.float32), count=1)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.npy", np.zeros((64, 4), np.float32))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        find_nearest(path, np.ones((1, 4), np.float32), count=1)
    with pytest.raises(UserError, match="cannot be read"):
        find_nearest(tmp_path / "missing.npy", np.ones((1, 4), np.float32), count=1)
