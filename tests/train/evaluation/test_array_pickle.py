import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.tasks.dual_encoder.egocentric import load_array_pickle

MATRIX = np.arange(12).reshape(3, 4) / 11


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [MATRIX, MATRIX.astype(np.float32), np.asfortranarray(MATRIX), MATRIX.astype(">f8"), MATRIX > 0.5, MATRIX[:0]],
)
def test_arrays_of_numbers_come_back_equal(tmp_path: Path, array: np.ndarray, protocol: int) -> None:
    path = tmp_path / "relevancy.pkl"
    path.write_bytes(pickle.dumps(array, protocol=protocol))
    read = load_array_pickle(path)
    assert read.dtype == array.dtype and read.shape == array.shape and np.array_equal(read, array)


def test_the_names_of_older_numpy_are_known(tmp_path: Path) -> None:
    path = tmp_path / "relevancy.pkl"
    content = pickle.dumps(MATRIX, protocol=2)
    assert b"numpy._core" in content
    path.write_bytes(content.replace(b"numpy._core", b"numpy.core"))
    assert np.array_equal(load_array_pickle(path), MATRIX)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Harmful(), "is not loaded"),
        (np.array([Harmful()], object), "is not loaded"),
        (np.array(["a"]), "is not loaded"),
        (np.zeros(2, [("a", "f8")]), "is not loaded"),
        ([1.0, 2.0], "contains a list"),
        ({"a": MATRIX}, "contains a dict"),
        (np.float64, "contains a|not loaded"),
    ],
)
def test_anything_else_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("relevancy.pkl").write_bytes(pickle.dumps(value))
    with pytest.raises(UserError, match=what) as caught:
        load_array_pickle(Path("relevancy.pkl"))
    assert caught.value.hint == "save it as .npy: numpy.save(FILE, array)"
    assert not Path("touched").exists()


def test_every_cut_and_many_flips_end_in_an_error_or_an_array(tmp_path: Path) -> None:
    content = pickle.dumps(MATRIX, protocol=4)
    path = tmp_path / "relevancy.pkl"
    for end in range(len(content)):
        path.write_bytes(content[:end])
        with pytest.raises(UserError):
            load_array_pickle(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(content), 300):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            assert isinstance(load_array_pickle(path), np.ndarray)
        except UserError:
            continue
