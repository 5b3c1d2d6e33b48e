import io

import numpy as np
import pytest

from clipmill.shards.npy import data_offset, npy_bytes


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float16).reshape(2, 3, 4),
        np.arange(24, dtype=np.int64).reshape(2, 3, 4).transpose(2, 0, 1),
        np.float32(3.5),
        np.zeros((0, 5), np.uint8),
        np.zeros((1,) * 30, np.uint8),
        np.zeros(2, dtype=[(f"a_long_name_of_a_field_{number}", "<f4") for number in range(40)]),
    ],
    ids=["plain", "strided", "scalar", "empty", "many axes", "a header of several blocks"],
)
def test_numpy_reads_the_array_and_its_data_begin_on_a_block(array: np.ndarray) -> None:
    payload = npy_bytes(np.asarray(array))
    read = np.load(io.BytesIO(payload), allow_pickle=False)
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert (read == array).all()
    assert data_offset(payload) % 512 == 0
    assert payload[data_offset(payload) :] == array.tobytes()


def test_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="pickled"):
        npy_bytes(np.array([{}], dtype=object))


@pytest.mark.parametrize("payload", [b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00\x00\x00\x00\x00", b"text"])
def test_other_files_have_no_data_offset(payload: bytes) -> None:
    with pytest.raises(ValueError, match="npy"):
        data_offset(payload)
